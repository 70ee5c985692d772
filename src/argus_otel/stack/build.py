"""Builds the Collector and Jaeger with Go, once, into the cache folder.

A folder per part is keyed by what goes into it (sources and versions) and by the Go version, so a
change of either builds anew and nothing else does.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argus_otel._runtime.bundled import bundled_path
from argus_otel.stack.cache import cache_dir, exclusive
from argus_otel.stack.errors import BuildFailedError, GoMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# The builder and every module in builder.yaml are of one release.
_BUILDER = "go.opentelemetry.io/collector/cmd/builder@v0.161.0"
# A package path, not a version: v1.76.0 (Jaeger v2.13.0) is pinned in jaeger-build/go.mod. Its own
# go.mod has a `replace`, which `go install …@v1.76.0` refuses; hence the module of its own.
_JAEGER_PACKAGE = "github.com/jaegertracing/jaeger/cmd/jaeger"
_OLDEST_GO = (1, 24)

_COLLECTOR = "argus-collector"
_JAEGER = "jaeger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Executables to run."""

    collector: Path
    jaeger: Path


def _silent(_message: str) -> None:
    pass


def build_stack(
    *, folder: Path | None = None, on_progress: Callable[[str], None] = _silent
) -> Binaries:
    """Build what is not built yet; at once when everything is.

    Args:
        folder: Where to build; the cache folder by default.
        on_progress: Called with one line at a time. A cold build takes minutes.

    Returns:
        Paths of both executables.

    Raises:
        GoMissingError: Something must be built and there is no usable Go.
        BuildFailedError: Go failed; the message names the log.
    """
    folder = folder or cache_dir()
    config = bundled_path("collector-config")
    return Binaries(
        collector=_built(
            _COLLECTOR,
            folder,
            [config / "builder.yaml"],
            lambda work, run: _build_collector(config, work, run),
            on_progress,
        ),
        jaeger=_built(
            _JAEGER,
            folder,
            [config / "jaeger-build" / "go.mod", config / "jaeger-build" / "go.sum"],
            lambda work, run: _build_jaeger(config, work, run),
            on_progress,
        ),
    )


class _Commands:
    """Runs the commands of one build, reports them line by line, and keeps their output."""

    def __init__(self, part: str, log: Path, on_progress: Callable[[str], None]) -> None:
        self._part = part
        self._log = log
        self._on_progress = on_progress

    def __call__(
        self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        env = os.environ | {"GOWORK": "off", "CGO_ENABLED": "0"} | dict(environment or {})
        tail: deque[str] = deque(maxlen=8)
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(  # noqa: S603  (fixed commands)
                argv,
                cwd=cwd,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            log.write(f"$ {' '.join(argv)}\n")
            for count, line in enumerate(process.stdout or (), start=1):
                log.write(line)
                tail.append(line)
                self._on_progress(f"{self._part} [{count}] {line.strip()}")
        if process.returncode != 0:
            raise BuildFailedError(
                f"`{' '.join(argv[:3])} …` for {self._part}",
                got=f"exit code {process.returncode}, ending with:\n{''.join(tail)}",
                expected="exit code 0",
                fix=(
                    f"The whole output is in {self._log}. A build fetches Go modules (GOPROXY) and "
                    "needs about 3 GB of disk in the Go caches."
                ),
            )


def _built(
    name: str,
    folder: Path,
    sources: Sequence[Path],
    build: Callable[[Path, _Commands], Path],
    on_progress: Callable[[str], None],
) -> Path:
    """Give the executable ``name``, from the cache or by calling ``build(work, run)``."""
    digest = hashlib.sha256(f"{_BUILDER} {_JAEGER_PACKAGE}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    key = f"{name}-{digest.hexdigest()[:12]}"

    go_version = _go_version()
    if go_version is None:
        # Built earlier, or brought here with the cache folder: Go is not needed to run it.
        earlier = sorted(folder.glob(f"{key}-go*/{name}"))
        if earlier:
            return earlier[-1]
        raise GoMissingError(got="not found")
    target = folder / f"{key}-go{go_version}" / name
    if target.is_file():
        return target
    if tuple(int(part) for part in go_version.split(".")[:2]) < _OLDEST_GO:
        raise GoMissingError(got=f"version {go_version}")

    with exclusive(
        folder / "build.lock", lambda: on_progress(f"{name}: waiting for another build to end")
    ):
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        log = target.parent / "build.log"
        log.unlink(missing_ok=True)
        on_progress(f"{name}: building (minutes, once); output in {log}")
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as work:
            made = build(Path(work), _Commands(name, log, on_progress))
            made.replace(target)  # last and atomic: a half-built file never has this name
        on_progress(f"{name}: built, {target.stat().st_size / 1e6:.0f} MB")
    return target


def _go_version() -> str | None:
    go = shutil.which("go")
    if go is None:
        return None
    said = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    found = re.search(r"\bgo(\d+\.\d+(?:\.\d+)?)", said)
    return found.group(1) if found else None


def _build_collector(config: Path, work: Path, run: _Commands) -> Path:
    text = (config / "builder.yaml").read_text(encoding="utf-8")
    sources = work / "sources"
    manifest = work / "builder.yaml"
    manifest.write_text(
        re.sub(r"(?m)^(\s+output_path:).*$", lambda m: f"{m[1]} {sources}", text), encoding="utf-8"
    )
    # Compiled apart from the builder, because the builder would show nothing for minutes.
    run(["go", "run", _BUILDER, "--skip-compilation", "--config", str(manifest)], work)
    return _compile(".", _COLLECTOR, sources, run)


def _build_jaeger(config: Path, work: Path, run: _Commands) -> Path:
    for file in ("go.mod", "go.sum"):
        shutil.copy(config / "jaeger-build" / file, work / file)
    return _compile(_JAEGER_PACKAGE, _JAEGER, work, run)


def _compile(package: str, name: str, module: Path, run: _Commands) -> Path:
    flags = ["-v", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"]
    run(["go", "build", *flags, "-o", name, package], module)
    return module / name
