"""``OTEL_*`` variables of our own, which ``opentelemetry-instrument`` offers as options: none.

The entry point is there because distributions are expected to have one. Settings of argus are
``ARGUS_*`` (``argus_otel.settings``); OpenTelemetry's own variables keep their meaning.
"""
