"""Files that a converter reads: found, opened whatever they are packed in, and counted as read."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Final, cast

from typing_extensions import override

from argus_otel._runtime.errors import ArgusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from typing_extensions import Buffer

    Advance: TypeAlias = Callable[[int], None]
    """Told how many more bytes of the files, as they lie on disk, have been read."""

_TAR_ENDINGS: Final = (".tar", ".tar.gz", ".tgz")
NOTHING_OF_THAT_KIND: Final = "without a file of that kind"
_MOST_TOLD: Final = 3
_GZIP_MAGIC: Final = b"\x1f\x8b"
DAMAGED: Final = (OSError, EOFError, zlib.error, tarfile.TarError)
"""What reading a damaged or truncated file raises. ``OSError`` covers bad gzip."""


class SourceError(ArgusError):
    """A file is not what it should be, so it cannot be converted."""


def none_left(skipped: Sequence[tuple[str, str]], expected: str) -> SourceError:
    """Of all files that were given none could be read, and leaving them out leaves nothing."""
    told = "; ".join(
        f"{name} is {why.partition('; expected')[0]}" for name, why in skipped[:_MOST_TOLD]
    )
    more = len(skipped) - _MOST_TOLD
    return source_error(
        "what was given",
        "without a file that can be read" + (f" ({told})" if told else ""),
        expected,
        (f"{more} more were left out as well. " if more > 0 else "")
        + "Check the path and the command.",
    )


def source_error(source: Source | str, got: str, expected: str, fix: str = "") -> SourceError:
    """A ``SourceError`` about one file."""
    name = source if isinstance(source, str) else source.name
    return SourceError(
        name, got=got, expected=expected, fix=fix or "Leave it out, or skip it with --keep-going."
    )


@dataclass(frozen=True, slots=True)
class Source:
    """One file, possibly inside an archive."""

    path: Path
    member: str | None
    """Name inside the archive."""
    size: int
    """Bytes of the file; inside an archive, unpacked."""
    modified_ns: int
    """When it was last written, Unix time."""

    @property
    def name(self) -> str:
        """What people call it."""
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"

    @property
    def file_name(self) -> str:
        """Without folders."""
        return self.path.name if self.member is None else self.member.rpartition("/")[2]

    @contextmanager
    def open(self, advance: Advance | None = None) -> Iterator[BinaryIO]:
        """Its bytes, unzipped where it is gzip.

        Raises:
            SourceError: It cannot be opened, or breaks off.
        """
        try:
            if self.member is None:
                with self.path.open("rb") as raw:
                    yield _unzipped(_Counted(raw, advance))
            else:
                with tarfile.open(self.path) as archive:
                    found = archive.extractfile(self.member)
                    if found is None:
                        raise source_error(self, "not a file", "a file in the archive")
                    yield _unzipped(_Counted(found, advance))
        except DAMAGED as error:
            raise source_error(self, f"not readable: {error}", "a whole file") from error

    def read(self, limit: int, advance: Advance | None = None) -> bytes:
        """All of it.

        Raises:
            SourceError: It cannot be read, or has more than ``limit`` bytes.
        """
        with self.open(advance) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise source_error(self, "too large", f"at most {limit >> 20} MiB")
        return data


def list_sources(
    paths: Sequence[Path],
    wanted: Callable[[str], bool],
    skip: Callable[[SourceError], None] | None = None,
) -> list[Source]:
    """Files in the order given; folders and archives are gone through by name.

    Args:
        paths: Files, tar archives, or folders, which are searched through all levels.
        wanted: Whether a file in a folder or archive is meant, by its name without folders. A
            file that is named itself always is.
        skip: Told of a path that cannot be read, which is then left out; without it that is an
            error.

    Raises:
        SourceError: A path is not there, an archive is damaged, or there is nothing to convert.
    """
    found: list[Source] = []
    for path in paths:
        try:
            found += _sources_of(path, wanted)
        except SourceError as error:
            if skip is None:
                raise
            skip(error)
    if not found:
        named = ", ".join(str(path) for path in paths) or "what was given"
        raise source_error(named, NOTHING_OF_THAT_KIND, "traces to convert", "Check the path.")
    return found


def _sources_of(path: Path, wanted: Callable[[str], bool]) -> list[Source]:
    try:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            return [source for file in inside for source in _file(file, wanted)]
        if not path.is_file():
            raise source_error(str(path), "not there", "a file or folder", "Check the path.")
        return _file(path, lambda name: wanted(name) or name == path.name)
    except OSError as error:
        raise source_error(
            str(path), f"not readable: {error}", "a file or folder", "Check the path."
        ) from error


def _file(path: Path, wanted: Callable[[str], bool]) -> list[Source]:
    if path.name.endswith(_TAR_ENDINGS):
        return _members(path, wanted)
    if not wanted(path.name):
        return []
    about = path.stat()
    return [Source(path, None, about.st_size, about.st_mtime_ns)]


def name_of(paths: Sequence[Path]) -> str:
    """What to call what was given: its name, or of several the folder they are in."""
    first = paths[0].resolve()
    path = first if len(paths) == 1 else first.parent
    return path.name.split(".")[0] or path.name or "traces"


def _members(path: Path, wanted: Callable[[str], bool]) -> list[Source]:
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile()]
    except DAMAGED as error:
        raise source_error(str(path), f"not readable: {error}", "a tar archive") from error
    found = [Source(path, member.name, member.size, int(member.mtime * 1e9)) for member in members]
    return sorted((s for s in found if wanted(s.file_name)), key=lambda s: s.name)


def _unzipped(raw: _Counted) -> BinaryIO:
    buffered = io.BufferedReader(raw)
    if buffered.peek(2)[:2] == _GZIP_MAGIC:
        return cast("BinaryIO", gzip.GzipFile(fileobj=buffered))
    return cast("BinaryIO", buffered)


class _Counted(io.RawIOBase):
    """Says how far reading has come."""

    def __init__(self, file: IO[bytes], advance: Advance | None) -> None:
        self._file, self._advance = file, advance

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = self._file.read(len(view))
        view[: len(data)] = data
        if self._advance is not None and data:
            self._advance(len(data))
        return len(data)
