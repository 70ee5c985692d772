"""Starts a Collector and Jaeger on this machine and waits until both are healthy."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from argus_otel.stack.arrange import arrange
from argus_otel.stack.build import Binaries, build_stack
from argus_otel.stack.errors import StartFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from argus_otel.stack.parts import Stack

# Somebody may take a port between our look and the Collector's bind.
_PORT_ATTEMPTS = 3


@contextmanager
def running_stack(
    *,
    config: str | Path | Sequence[Path] = "gateway",
    decision_wait_s: float | None = None,
    jaeger: bool = True,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
    binaries: Binaries | None = None,
) -> Iterator[Stack]:
    """Run a stack on free ports (never the usual ones) while the block runs.

    Args:
        config: ``gateway``, ``local``, ``agent``, or files of your own. Those must use the variables
            of ``gateway.yaml`` for their addresses and have its ``health_check``.
        decision_wait_s: The tail sampler's wait; the configuration's default otherwise.
        jaeger: False starts the Collector alone; its backend is then what ``env`` says in
            ``ARGUS_COLLECTOR_BACKEND_OTLP_HTTP`` or ``ARGUS_COLLECTOR_GATEWAY_OTLP_HTTP``.
        env: More variables for both processes.
        directory: For logs and the agent's queue; temporary, and removed, by default.
        binaries: Executables to use; built when absent.

    Raises:
        GoMissingError: Nothing is built and there is no Go.
        StartFailedError: A part did not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="argus-stack-") as temporary:
        stack = start_stack(
            config=config,
            decision_wait_s=decision_wait_s,
            jaeger=jaeger,
            env=env,
            directory=directory or Path(temporary),
            binaries=binaries or build_stack(),
            prefer_usual_ports=False,
        )
        try:
            yield stack
        finally:
            stack.stop()


def start_stack(
    *,
    config: str | Path | Sequence[Path],
    decision_wait_s: float | None,
    jaeger: bool,
    env: Mapping[str, str] | None,
    directory: Path,
    binaries: Binaries,
    prefer_usual_ports: bool,
    on_spawn: Callable[[Stack], None] = lambda _stack: None,
) -> Stack:
    """Start a stack that runs on after this process ends; see ``running_stack``.

    Args:
        config: As in ``running_stack``, and the next three as well.
        decision_wait_s: Seconds.
        jaeger: False starts the Collector alone.
        env: More variables.
        directory: For logs and state; must outlive the stack.
        binaries: Executables.
        prefer_usual_ports: 4317, 4318, 16686 … where they are free.
        on_spawn: Called after every process that was started, before it is waited for.

    Raises:
        StartFailedError: A part did not become healthy; what had started is stopped.
    """
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        stack = arrange(
            config, decision_wait_s, jaeger, env, directory, binaries, prefer_usual_ports
        )
        log_starts = {part.name: _size(part.log) for part in stack.parts}
        try:
            for part in stack.parts:
                part.start()
                on_spawn(stack)
                part.wait_until_healthy()
        except StartFailedError:
            stack.stop()
            if attempt == _PORT_ATTEMPTS or not _lost_a_port(stack, log_starts):
                raise
        except BaseException:
            stack.stop()
            raise
        else:
            return stack
    raise AssertionError("unreachable")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _lost_a_port(stack: Stack, log_starts: Mapping[str, int]) -> bool:
    """Say whether this start (not an earlier one in the same log) failed for a port."""
    return any(
        b"address already in use" in part.log.read_bytes()[log_starts[part.name] :]
        for part in stack.parts
        if part.log.exists()
    )
