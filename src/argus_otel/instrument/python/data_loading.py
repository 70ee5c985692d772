"""Waiting for the next batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.dynamo import never_compile
from argus_otel.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.framework.steps import StepTracker
    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink


def instrument_data_loading(
    module: Any,  # noqa: ANN401 - torch.utils.data.dataloader
    patches: Patches,
    sink: Sink,
    steps: StepTracker,
) -> None:
    """Time ``next()`` of every DataLoader iterator.

    Loaders that are not built on it (DALI, webdataset's own) show as time before the forward.
    """
    append = sink.append

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(self: Any) -> Any:  # noqa: ANN401, N807
            if not sink.enabled or not steps.is_here:
                return original(self)  # a thread that fetches ahead makes nobody wait
            cpu_ns, delay_ns = steps.read_times()
            began_ns = monotonic_ns()
            # A StopIteration is not a batch, and passes through unrecorded.
            batch = original(self)
            try:
                after_cpu_ns, after_delay_ns = steps.read_times()
                append(
                    events.DATA,
                    began_ns,
                    monotonic_ns(),
                    cpu_ns,
                    delay_ns,
                    after_cpu_ns,
                    after_delay_ns,
                )
            except Exception as error:  # noqa: BLE001 - never into the user's training
                sink.faults.report("data_hook", error)
            return batch

        never_compile(__next__)
        return __next__

    patches.replace(module._BaseDataLoaderIter, "__next__", wrap)  # noqa: SLF001
