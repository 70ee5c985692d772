"""See and diagnose distributed PyTorch training, as OpenTelemetry.

Nothing here is needed: ``opentelemetry-instrument torchrun train.py`` or
``argus run -- torchrun train.py`` traces an unchanged script. These functions add what a script
alone knows. Where argus is off or absent from the launcher they do nothing, at the cost of one
attribute look-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from argus_otel._runtime import active as _active

if TYPE_CHECKING:
    from collections.abc import Iterator

from contextlib import contextmanager as _contextmanager

__all__ = ["annotate", "disable", "flush", "phase", "set_step"]


@_contextmanager
def phase(name: str) -> Iterator[None]:
    """Time a part of the training loop under a name of its own.

    Args:
        name: Low-cardinality (``"rollout"``, never ``"rollout 17"``): it becomes a span's name.
    """
    tracer = _active.get()
    if tracer is None:
        yield
    else:
        with tracer.phase(name):
            yield


def set_step(iteration: int) -> None:
    """Say that the loop is at its step ``iteration`` from here on.

    A loop that calls it once (a resumed run) only numbers its steps. A loop that calls it in
    every iteration ends its steps here; needed only where there is no optimizer to do so.
    """
    tracer = _active.get()
    if tracer is not None:
        tracer.set_step(iteration)


def annotate(*, tokens: float = 0, samples: float = 0, sum_len2: float = 0) -> None:
    """Say how much work this rank's step holds; amounts add up within a step.

    Detectors divide by it, so that a rank with more tokens is not taken for a slow one.

    Args:
        tokens: Tokens.
        samples: Samples.
        sum_len2: Sum of squared sequence lengths, what attention costs.
    """
    tracer = _active.get()
    if tracer is not None:
        tracer.annotate({"tokens": tokens, "samples": samples, "sum_len2": sum_len2})


def flush(timeout_s: float = 5.0) -> bool:
    """Send everything recorded so far.

    Args:
        timeout_s: Longest wait.

    Returns:
        Whether all of it was accepted; True where argus is off.
    """
    tracer = _active.get()
    return True if tracer is None else tracer.flush(timeout_s)


def disable() -> None:
    """Stop tracing in this process, for good: every hook comes off or returns at once."""
    tracer = _active.get()
    if tracer is not None:
        tracer.disable()
