"""Where the data that ships beside the code lies: in a checkout, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from argus_otel._runtime.errors import ArgusError

BundledName = Literal["collector-config", "detectors"]

_PACKAGE = Path(__file__).parents[1]


def bundled_path(name: BundledName) -> Path:
    """Give the folder ``name``, whichever way argus-otel was installed.

    Args:
        name: A folder that lies at the top of the repository and, in the wheel, in ``_bundled``.

    Returns:
        An existing folder; read-only by custom.

    Raises:
        ArgusError: The installation lacks it.
    """
    in_wheel = _PACKAGE / "_bundled" / name
    if in_wheel.is_dir():
        return in_wheel
    # src/argus_otel → src → checkout. The pyproject.toml tells a checkout from whatever folder
    # happens to be two levels above site-packages/argus_otel.
    checkout = _PACKAGE.parents[1]
    in_checkout = checkout / name
    if in_checkout.is_dir() and (checkout / "pyproject.toml").is_file():
        return in_checkout
    raise ArgusError(
        f"the data folder {name}",
        got="absent",
        expected=f"{in_wheel} (from a wheel) or {in_checkout} (in a checkout)",
        fix="Install argus-otel again; if you build wheels yourself, build them from a full checkout.",
    )
