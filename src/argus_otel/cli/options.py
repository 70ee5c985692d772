"""Options that several commands have: declared once, so that they are called and mean the same."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ConfigError, StoreError
from argus_otel.detect.definition import load_detectors
from argus_otel.report.links import check_ui_url
from argus_otel.store.dataset import MANIFEST
from argus_otel.store.opening import local_folder, named_store, open_store, read_headers
from argus_otel.store.parquet import ParquetStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from argus_otel.store.protocol import Store


def _checked_age(text: str | None) -> str | None:
    """Refused before anything is opened."""
    if text is not None:
        read_age_ns(text)
    return text


StoreUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A folder, or jaeger+http://HOST:16686. Default: ARGUS_STORE, else ./argus-store."
    ),
]
RunName: TypeAlias = Annotated[str, typer.Option(help="latest, a run id, or the start of a nonce.")]
Since: TypeAlias = Annotated[
    str | None,
    typer.Option(
        callback=_checked_age, help="Only runs that sent something so long ago: 30m, 2h, 7d."
    ),
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
        callback=check_ui_url,
        help="Where links to traces lead: Jaeger's pages (http://jaeger:16686), Grafana over Tempo "
        "(grafana+https://HOST?datasource=UID), or any address with {trace_id} in it.",
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
    """The store that ``StoreUrl`` and ``Headers`` name, and its address.

    Raises:
        ConfigError: Not such an address or header.
        StoreError: It is not there, or not a store.
    """
    url = named_store(store)
    source = open_store(url, read_headers(header or ()))
    if isinstance(source, ParquetStore):
        _refuse_foreign(local_folder(url.removeprefix("parquet:").removeprefix("//")))
    return source, url


def _refuse_foreign(folder: Path) -> None:
    """A folder of other things is no empty store; one that is being begun has nothing to see yet.

    Raises:
        StoreError: It has files or folders, and none of a store's.
    """
    seen = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    begun = (folder / ".writer.lock").is_file()
    if seen and not begun and not any((path / MANIFEST).is_file() for path in seen):
        raise StoreError(
            f"the folder {folder}",
            got=f"not a store: it has {seen[0].name}, and no run",
            expected="a folder that `argus serve` or `argus run --local` has written",
            fix="Give the right one with --store.",
        )


@contextmanager
def explained_since(source: Store, url: str, since: str | None) -> Iterator[None]:
    """Where a store has only runs from before ``Since``, its error says that, and names the newest.

    Raises:
        StoreError: As within, or that one.
    """
    try:
        yield
    except StoreError as error:
        newest = None if since is None else newest_before(source, since)
        if newest is None:
            raise
        raise StoreError(
            f"the store {url}",
            got=f"without a run in the last {since}",
            expected="one that sent something since then",
            fix=f"{newest} Give a longer --since, or none.",
        ) from error


def newest_before(source: Store, since: str) -> str | None:
    """``The newest, RUN, is from …``; None where the store has newer runs, none, or is away."""
    try:
        if source.runs(begin_ns(since)):
            return None
        older = source.runs()
    except StoreError:
        return None
    if not older:
        return None
    name = older[0].run_id or older[0].run[:8]
    return f"The newest, {name}, is from {when(older[0].last_ns)} UTC."


def when(time_ns: int) -> str:
    """Unix nanoseconds as people read them, in UTC."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")


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
