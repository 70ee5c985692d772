"""Options that several commands have: declared once, so that they are called and mean the same."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ConfigError
from argus_otel.detect.definition import load_detectors
from argus_otel.store.opening import default_store, open_store, read_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.store.protocol import Store

StoreUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A folder, or jaeger+http://HOST:16686. Default: ARGUS_STORE, else ./argus-store."
    ),
]
RunName: TypeAlias = Annotated[str, typer.Option(help="latest, a run id, or the start of a nonce.")]
Since: TypeAlias = Annotated[
    str | None, typer.Option(help="Only runs that sent something so long ago: 30m, 2h, 7d.")
]
Headers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="'Name: value' to send with each request; may be repeated."),
]
DetectorFolders: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(help="A folder with more detectors; may be repeated."),
]
UiUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Where links to traces lead: Jaeger's pages (http://jaeger:16686), Grafana over Tempo "
        "(grafana+https://HOST?datasource=UID), or any address with {trace_id} in it."
    ),
]


def replaced_detectors(folders: Sequence[Path]) -> list[str]:
    """Ids of the detectors that come with argus and that some in these folders replace.

    Raises:
        ConfigError: A folder or a file in it is wrong.
    """
    if not folders:
        return []
    own = {detector.id for detector in load_detectors(bundled_path("detectors"))}
    return sorted(own & {detector.id for detector in load_detectors(*folders)})


_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def opened(store: str | None, header: Sequence[str] | None) -> tuple[Store, str]:
    """The store that ``StoreUrl`` and ``Headers`` name, and its address."""
    url = store or default_store()
    return open_store(url, read_headers(header or ())), url


def begin_ns(since: str | None) -> int | None:
    """When ``Since`` begins, in Unix nanoseconds; None for all time."""
    return None if since is None else time.time_ns() - read_age_ns(since)


def read_age_ns(text: str, option: str = "--since") -> int:
    """Nanoseconds of ``30m``, ``2h``, ``7d``.

    Raises:
        ConfigError: It does not read so.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            option,
            got=repr(text),
            expected="a number and one of s, m, h, d, w",
            fix=f"For example: {option} {'2h' if option == '--since' else '10s'}",
        )
    return int(float(match[1]) * _UNITS_S[match[2]] * 1e9)
