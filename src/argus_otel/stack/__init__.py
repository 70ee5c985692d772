"""Builds, starts, checks and stops a real OpenTelemetry Collector and Jaeger on this machine.

For tests::

    with running_stack(config="gateway", decision_wait_s=2) as stack:
        post_spans(stack.otlp_http_url)
        read_traces(stack.jaeger_query_url)
        stack.collector.kill(); stack.collector.restart()      # same ports

For people: ``argus stack up``, ``status``, ``down`` (``control``).
"""

from argus_otel.stack.build import Binaries, build_stack
from argus_otel.stack.control import bring_up, read_status, take_down
from argus_otel.stack.errors import BuildFailedError, GoMissingError, StackError, StartFailedError
from argus_otel.stack.parts import Part, Stack
from argus_otel.stack.run import running_stack

__all__ = [
    "Binaries",
    "BuildFailedError",
    "GoMissingError",
    "Part",
    "Stack",
    "StackError",
    "StartFailedError",
    "bring_up",
    "build_stack",
    "read_status",
    "running_stack",
    "take_down",
]
