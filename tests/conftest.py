"""What every test shares: the order of the folders, and patience where a core is not free."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "argus", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("argus")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what starts real servers and processes last: a slip shows within seconds.

    The sort is stable, so the random order within the two halves stays.
    """
    items.sort(key=lambda item: "integration" in item.path.parts)
