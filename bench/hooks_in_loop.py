"""One rank of bench/record.py's last rows: what hooks take in the middle of training; see there.

opentelemetry-instrument torchrun … bench/hooks_in_loop.py --results FOLDER --steps 300

A hook that has just run is in the processor's caches; one that comes after some milliseconds of
arithmetic is not, and takes several times as long. So each call is timed where it happens. What
torch does to call it lies outside.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from argus_otel.instrument.framework.collectives import Collectives
from argus_otel.instrument.framework.phases import ForwardHooks
from argus_otel.instrument.framework.steps import StepTracker

sys.path.insert(0, str(Path(__file__).parent / "loops"))
import common

from overhead_rank import Bare, Loop

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP_STEPS = 40

PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "forward": ((ForwardHooks, "enter"), (ForwardHooks, "leave")),
    "backward": ((StepTracker, "backward_begins"), (StepTracker, "backward_ends")),
    "optimizer": ((StepTracker, "optimizer_begins"), (StepTracker, "optimizer_ends")),
    "step boundary": ((StepTracker, "_end"),),
}
"""Functions in which each hook spends its time; the step's boundary lies in the optimizer's end."""

took_ns: dict[str, list[int]] = defaultdict(list)


def main() -> None:
    """Train, and say what each hook took."""
    options = common.parser(__doc__)
    given = options.parse_args()
    for owner, function in chain.from_iterable(PARTS.values()):
        setattr(owner, function, _timed(getattr(owner, function), function))
    make = Collectives._make_before  # noqa: SLF001
    Collectives._make_before = lambda *a: _timed(make(*a), "before")  # type: ignore[method-assign]  # noqa: SLF001
    rank = common.begin(given.seed)
    batch = common.batch_for(given.layers, given.step_ms)
    model = DistributedDataParallel(common.make_model(given.layers), bucket_cap_mb=common.BUCKET_MB)
    loop, arm = Loop(model, batch), Bare()
    for _ in range(_WARM_UP_STEPS):
        loop.step(arm)
    took_ns.clear()
    for _ in range(given.steps):
        loop.step(arm)
    common.write_results(given.results, rank, of_hooks())
    dist.destroy_process_group()


def of_hooks() -> dict[str, list[int]]:
    """Nanoseconds of each call, by hook."""
    took = {
        name: [sum(call) for call in zip(*[took_ns[function] for _, function in functions])]
        for name, functions in PARTS.items()
    }
    pairs = zip(took["optimizer"], took["step boundary"], strict=True)
    took["optimizer"] = [ns - boundary_ns for ns, boundary_ns in pairs]
    return {"collective": took_ns["before"], **took}


def _timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    clock, of_this = time.perf_counter_ns, took_ns

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        clock()  # the first call brings it into the caches
        began_ns = clock()
        result = function(*args, **kwargs)
        of_this[name].append(clock() - began_ns)
        return result

    return timed


if __name__ == "__main__":
    main()
