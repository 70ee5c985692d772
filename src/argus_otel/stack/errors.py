"""What can go wrong with a stack, each with what to do about it."""

from __future__ import annotations

from argus_otel._runtime.errors import ArgusError


class StackError(ArgusError):
    """The Collector or Jaeger could not be built, started or stopped."""

    exit_code = 5


class GoMissingError(StackError):
    """Nothing is built yet, and there is no Go to build it with."""

    def __init__(self, *, got: str) -> None:
        super().__init__(
            "the Go toolchain (go on PATH)",
            got=got,
            expected="Go 1.24 or newer, to build the Collector and Jaeger once",
            fix=(
                "Install Go from https://go.dev/dl/ (1.26 builds as it is; 1.24 and 1.25 fetch the "
                "1.26 toolchain by themselves), or pass --collector-bin and --jaeger-bin with "
                "binaries that you have. For a first look none of this is needed: "
                "`argus run --local` uses the embedded store."
            ),
        )


class BuildFailedError(StackError):
    """Go was there, and the build failed."""


class StartFailedError(StackError):
    """A process ended, or did not report healthy in time."""
