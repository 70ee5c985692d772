"""Instrumentation scopes: the one thing a Collector routes by (DESIGN: three classes of spans)."""

from typing import Final

DIGEST: Final = "argus_otel.digest"
TIMELINE: Final = "argus_otel.timeline"
DETAIL: Final = "argus_otel.detail"
METRICS: Final = "argus_otel.metrics"
