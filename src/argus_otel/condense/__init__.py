"""Events of many steps at once → digests, timeline spans, detail spans, and what to keep."""

from argus_otel.condense.condenser import Condensed, Condenser

__all__ = ["Condensed", "Condenser"]
