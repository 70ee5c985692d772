"""From what a person writes after ``--store`` to a store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from argus_otel._runtime.errors import ConfigError, StoreError
from argus_otel.store.parquet import ParquetStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from argus_otel.store.protocol import Store

DEFAULT_STORE: Final = "./argus-store"
STORE_VARIABLE: Final = "ARGUS_STORE"
_EXPECTED: Final = "a folder, parquet:FOLDER, jaeger+http://HOST:16686 or jaeger+https://HOST"
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE)
_HEADER: Final = re.compile(r"\s*([A-Za-z0-9!#$%&'*+.^_`|~-]+)\s*:\s*([^\r\n]*?)\s*")


def named_store(store: str | None) -> str:
    """What ``--store`` says; without it ARGUS_STORE, else the folder that `argus serve` writes.

    Raises:
        ConfigError: It says nothing: most likely a shell variable that is not set, and then the
            default is not what was meant.
    """
    if store is None:
        return os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    if not store.strip():
        raise ConfigError(
            "--store",
            got="empty",
            expected=_EXPECTED,
            fix="Is a variable in the command not set? Without --store it is ARGUS_STORE, "
            f"else {DEFAULT_STORE}.",
        )
    return store


def open_store(url: str, headers: Mapping[str, str] | None = None) -> Store:
    """Open a store for reading.

    Args:
        url: A folder, ``parquet:FOLDER``, or ``jaeger+http(s)://HOST:PORT/BASE``.
        headers: Sent with each HTTP request.

    Raises:
        ConfigError: Not such a URL.
        StoreError: There is nothing there, or that kind of store cannot be read yet.
    """
    if url.startswith("parquet:"):
        folder = url.removeprefix("parquet:")
        return ParquetStore(local_folder(folder.removeprefix("//")))
    match = _URL.fullmatch(url)
    if match is None:
        return ParquetStore(local_folder(url))
    scheme, rest = match[1].lower(), match[2]
    kind, _, protocol = scheme.partition("+")
    if kind in ("jaeger", "tempo") and (protocol not in ("http", "https") or not rest.strip("/")):
        raise _malformed(url, f"{kind}+http://HOST:PORT")
    if kind == "jaeger":
        # Not above: an HTTP client takes a fifth of a second to load, and a folder needs none.
        from argus_otel.store.jaeger import JaegerStore

        return JaegerStore(f"{protocol}://{rest}", headers)
    if kind == "tempo":
        raise StoreError(
            f"the store {url!r}",
            got="Tempo, which argus cannot read yet",
            expected=_EXPECTED,
            fix="Have the Collector send argus_otel.digest spans to `argus serve` as well, and "
            "read its folder.",
        )
    if scheme in ("http", "https"):
        raise _malformed(url, f"jaeger+{url} if that is Jaeger's query service")
    raise _malformed(url, _EXPECTED)


def local_folder(text: str) -> Path:
    """A folder on this machine.

    Raises:
        ConfigError: Nothing, or a URL where only a folder will do.
    """
    if not text.strip() or _URL.fullmatch(text):
        raise _malformed(text, "a folder")
    return Path(text.removeprefix("parquet:")).expanduser()


def read_headers(lines: Iterable[str]) -> dict[str, str]:
    """Headers from ``Name: value`` lines.

    Raises:
        ConfigError: A line does not read so. The value is not shown: it may be a secret.
    """
    headers = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise ConfigError(
                "--header",
                got=f"{line.partition(':')[0][:40]!r} without a colon, or no header name",
                expected="'Name: value'",
                fix="For example: --header 'Authorization: Bearer …'",
            )
        headers[match[1]] = match[2]
    return headers


def _malformed(url: str, expected: str) -> ConfigError:
    return ConfigError(
        "the store (--store or ARGUS_STORE)",
        got=repr(url),
        expected=expected,
        fix=f"Give {_EXPECTED}.",
    )
