"""How large an effect a paired measurement would have shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESAMPLES = 2000
_Z_FOUND = 1.96 + 0.84
"""Two-sided 5 %, found four times in five."""


def smallest_effect(values: Sequence[float]) -> float:
    """Change of the median that would have been found in four of five such measurements.

    Args:
        values: One ratio (or difference) a pair.

    Returns:
        In the values' own unit: for ratios 0.01 is one percent.
    """
    data = np.asarray(values, dtype=np.float64)
    resampled = np.random.default_rng(0).choice(data, (_RESAMPLES, data.size))
    return _Z_FOUND * float(np.median(resampled, axis=1).std())
