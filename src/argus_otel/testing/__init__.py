"""Public test kit: a real OTLP receiver in the test's own process, and a clock that tests move.

Nothing here is loaded by a training process::

    with InMemoryReceiver() as receiver:
        run_training(environment=receiver.environment)
        receiver.wait_for(lambda got: len(got.spans(name="rank.step")) >= 10, timeout_s=30)
"""

from argus_otel.testing.clock import CounterClock
from argus_otel.testing.received import ReceivedLink, ReceivedMetric, ReceivedPoint, ReceivedSpan
from argus_otel.testing.receiver import InMemoryReceiver, ReceivedRequest

__all__ = [
    "CounterClock",
    "InMemoryReceiver",
    "ReceivedLink",
    "ReceivedMetric",
    "ReceivedPoint",
    "ReceivedRequest",
    "ReceivedSpan",
]
