"""What every test shares: one hypothesis profile that does not fail for want of a free core."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "argus", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("argus")
