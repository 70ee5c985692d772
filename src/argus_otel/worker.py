"""The background thread of a training process: record → condense → encode → export.

It wakes about once a second, works on all steps that have ended since, and gives the GIL away
between the pieces of its work so that the trainer never waits a millisecond for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from argus_otel._runtime.clock import monotonic_ns, wall_offset_ns
from argus_otel.condense import Condenser
from argus_otel.condense.condenser import Condensed, Costs
from argus_otel.encode import (
    EncodedSpans,
    ShapedSpanEncoder,
    SpanTemplate,
    StepRowsEncoder,
    encode_metrics_request,
    encode_resource,
    encode_span,
    encode_trace_requests,
    encode_user_spans,
)
from argus_otel.encode.meters import Meters
from argus_otel.export import Sender, Signal
from argus_otel.record.capture import CapturePlan
from argus_otel.record.recorder import Recorder
from argus_otel.record.ring import EventRing
from argus_otel.semconv import names
from argus_otel.wire import events
from argus_otel.wire import scopes as wire_scopes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from argus_otel._runtime.faults import FaultLog
    from argus_otel.settings import Settings
    from argus_otel.wire.identity import Identity
    from argus_otel.wire.spans import ShapedSpan, Span, SpanRows

_MAX_TEMPLATES: Final = 512
_MAX_USER_SPANS: Final = 8192
_POST_BUDGET_S: Final = 10.0
_MEMORY_INTERVAL_S: Final = 10.0
"""Reading /proc/self/statm costs as much as condensing a step; memory leaks take hours."""
_STATM: Final = Path("/proc/self/statm")

_LONGEST_TURN_NS: Final = 300_000
"""How long the GIL is held where it can be given away, which is every 0.1 ms or so. To give it away costs as much as to encode
a digest (7 µs), and more where other processes wait for the core: their caches come with them."""
_SHAPED_A_TURN: Final = 64
"""Spans of known shapes that are encoded in one go: 0.05 to 0.1 ms."""

_OTHER_HOOK_COST_NS: Final = 5000
_HOOK_COST_NS_BY_KIND: Final = {
    events.COLLECTIVE: 22_000,
    events.END: 12_900,
    events.DATA: 34_000,
    events.FORWARD: 34_000,
    events.BACKWARD: 31_000,
    events.OPTIMIZER: 23_000,
    events.STEP_END: 73_000,
}
"""What one event costs the thread that records it: about the medians of bench/record.py in the
middle of a loop. There the processor's caches hold the model and not our code, and each hook
takes five to fifteen times what it does when it is called again at once: where the host does not
do the arithmetic itself, this says too much. The wait for data was not timed there; it reads what
a forward does. Nor were waits for collectives and a user's phases: two clocks and an append, which
are 5 µs of a collective's hook.

The training thread cannot time itself without doubling the price, so its share of argus's own
CPU time is counted this way."""
_HOOK_COST_NS: Final = tuple(
    _HOOK_COST_NS_BY_KIND.get(kind, _OTHER_HOOK_COST_NS) for kind in range(16)
)


_LOSSES: Final = (
    "ring_overflow",
    "unfit_event",
    "step_too_large",
    "condense",
    "encode",
    "worker",
    "phase_names_full",
    "exceptions_full",
    "compilations_full",
    "user_spans_full",
    "group_info_too_long",
    "collective_hook",
    "forward_hook",
    "backward_hook",
    "optimizer_hook",
    "scaler_hook",
    "data_hook",
    "exception_hook",
    "compilation_hook",
    "user_phase",
)
"""Faults that cost a record each. Others (a nonce that was not shared, a signal's hook that could
not be set) take nothing away from what is told, and are no drops."""


class Worker:
    """Owns the recorder, the sender and the thread between them.

    Args:
        settings: Values in force.
        faults: Where argus's own errors go.
        sender: What posts.
        resource: Makes the resource's attributes that do not depend on the identity; called on
            the background thread, once.
        metric_interval_s: Seconds between metric exports; None for no metrics.
    """

    def __init__(
        self,
        settings: Settings,
        faults: FaultLog,
        sender: Sender,
        *,
        resource: Callable[[], Mapping[str, Any]],
        metric_interval_s: float | None,
    ) -> None:
        self._settings = settings
        self._faults = faults
        self._sender = sender
        self._make_resource = resource
        self._metric_interval_s = metric_interval_s
        self.recorder = Recorder(
            ring=EventRing(settings.ring_events),
            faults=faults,
            plan=CapturePlan(
                baseline_ratio=settings.baseline_ratio,
                overhead_budget=settings.overhead_budget,
            ),
            on_first_record=self._start,
        )
        self._condenser = Condenser(
            self.recorder,
            baseline_ratio=settings.baseline_ratio,
            detail_spans=settings.detail_spans,
            capacity=self.recorder.ring.capacity,
            faults=faults,
        )
        self._templates: OrderedDict[tuple[Any, ...], SpanTemplate] = OrderedDict()
        self._shaped = ShapedSpanEncoder()
        self._step_rows = StepRowsEncoder()
        self._user_spans: deque[Any] = deque()
        self._base_resource: Mapping[str, Any] | None = None
        self._resources: dict[Identity, bytes] = {}
        self._meters = Meters()
        self._next_metrics_s = time.monotonic() + (metric_interval_s or 0)
        self._next_memory_s = 0.0
        self._memory_bytes: int | None = None
        self._told_drops = 0
        self._spare_cpu_s = 0.0
        self._cycling = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.on_start: Callable[[], None] = lambda: None
        """Called with the thread's start; the root arms the exit flushes here."""

    # -- the thread ---------------------------------------------------------------------------

    def _start(self) -> None:
        self.on_start()
        self._thread = threading.Thread(target=self._run, name="argus-worker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._base_resource = self._make_resource()
        except Exception as error:  # noqa: BLE001 - tried again when there is something to send
            self._faults.report("resource", error)
        while not self._stop.wait(self._settings.interval_s):
            try:
                self._cycle()
                began_s = time.thread_time()
                if self._sender.next_due_s() == 0:
                    self._sender.pump(_POST_BUDGET_S)
                self._spare_cpu_s += time.thread_time() - began_s
            except Exception as error:  # noqa: BLE001 - the thread must outlive its bugs
                self._faults.report("worker", error)

    def flush(self, timeout_s: float) -> bool:
        """Condense, encode and send what is there, on the caller's thread.

        Returns:
            Whether everything was accepted in time.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            self._cycle(last=True, timeout_s=timeout_s)
            return self._sender.flush(max(0.0, deadline_s - time.monotonic()))
        except Exception as error:  # noqa: BLE001
            self._faults.report("flush", error)
            return False

    def stop(self) -> None:
        """Ask the thread to end; it is a daemon and is not waited for."""
        self._stop.set()

    def reset_after_fork(self) -> None:
        """In a forked child: nothing recorded, nothing to send, no thread."""
        self.recorder.enabled = False
        self.recorder.reset_after_fork()
        self._cycling = threading.Lock()
        self._stop = threading.Event()
        self._thread = None
        self._base_resource = None  # names the parent's process
        self._resources.clear()
        self._user_spans.clear()
        self.recorder.ring.drain()
        self._sender.reset_after_fork()

    # -- one round ----------------------------------------------------------------------------

    def _cycle(self, *, last: bool = False, timeout_s: float = -1) -> None:
        if not self._cycling.acquire(timeout=timeout_s):
            return
        try:
            began_s = time.thread_time()
            self._send_steps(last=last)
            self._send_user_spans()
            self._send_metrics(last=last)
            self._spare_cpu_s += time.thread_time() - began_s
        finally:
            self._cycling.release()

    def _send_steps(self, *, last: bool) -> None:
        pause = _Pause()
        ring = self.recorder.ring
        lost_before, unfit_before = ring.lost, ring.unfit
        drained = ring.drain(pause)
        lost, unfit = ring.lost - lost_before, ring.unfit - unfit_before
        if lost:
            self._faults.report("ring_overflow", records=lost)
        if unfit:  # their steps lack nothing else
            self._faults.report("unfit_event", records=unfit)
        if not drained and not lost and not last:
            return
        offset_ns = wall_offset_ns()
        own_cpu_s = self._spare_cpu_s + _hook_cost_s(events.kind_counts(drained))
        new_drops = sum(self._drops().values()) - self._told_drops
        held = self._condenser.held_events
        costs = Costs(self_cpu_s=own_cpu_s, drops=new_drops, memory_bytes=self._resident_bytes())
        try:
            condensed = self._condenser.take(
                drained, wall_offset_ns=offset_ns, lost=lost, costs=costs, pause=pause
            )
        except Exception as error:  # noqa: BLE001 - these events are lost, not all later ones
            self._faults.report("condense", error, records=held + len(drained))
            return
        if any(part.digests or part.charted for part in condensed):  # they carry both
            self._spare_cpu_s = 0.0
            self._told_drops += new_drops
        else:
            self._spare_cpu_s = own_cpu_s
        for part in condensed:
            pause()
            self._meters.add([*part.digests, *part.charted], part.wait_s)
            try:
                self._submit(part, pause)
            except Exception as error:  # noqa: BLE001 - the parts after it are sent all the same
                self._faults.report("encode", error, records=part.span_count)
        if last and (left := self._condenser.take_exceptions(offset_ns)) is not None:
            self._submit(Condensed(identity=left[0], digests=[], spans=left[1]), pause)

    def _submit(self, part: Condensed, pause: _Pause) -> None:
        scopes: dict[str, list[EncodedSpans]] = {}
        self._encode_spans(part.spans, scopes, pause)
        self._encode_shaped(part.shaped, scopes, pause)
        for steps in part.steps:
            pause()
            try:
                own, below = self._step_rows.encode(steps, pause)
            except Exception as error:  # noqa: BLE001
                self._faults.report("encode", error, records=steps.spans)
            else:
                scopes.setdefault(wire_scopes.DIGEST, []).append(own)
                scopes.setdefault(wire_scopes.TIMELINE, []).append(below)
        for row in part.rows:
            pause()
            try:
                encoded = self._encode_rows(row)
            except Exception as error:  # noqa: BLE001
                self._faults.report("encode", error, records=row.span_ids.size)
            else:
                scopes.setdefault(row.scope, []).append(encoded)
        # What follows gives the GIL away by itself: to compress, and to post.
        for body, count in encode_trace_requests(self._resource(part.identity), scopes):
            self._meters.spans += count
            self._sender.submit(Signal.TRACES, body, count)

    def _encode_spans(
        self, spans: Sequence[Span], scopes: dict[str, list[EncodedSpans]], pause: _Pause
    ) -> None:
        entries: dict[str, list[bytes]] = {}
        for span in spans:
            pause()
            try:
                entry = _encode_span(span)
            except Exception as error:  # noqa: BLE001 - costs this span, not its neighbours
                self._faults.report("encode", error)
            else:
                entries.setdefault(span.scope, []).append(entry)
        for scope, of_scope in entries.items():
            encoded = EncodedSpans(b"".join(of_scope), len(of_scope))
            scopes.setdefault(scope, []).append(encoded)

    def _encode_shaped(
        self,
        shaped: Mapping[str, Sequence[ShapedSpan]],
        scopes: dict[str, list[EncodedSpans]],
        pause: _Pause,
    ) -> None:
        for scope, spans in shaped.items():
            of_scope = scopes.setdefault(scope, [])
            for begin in range(0, len(spans), _SHAPED_A_TURN):
                turn = spans[begin : begin + _SHAPED_A_TURN]
                pause()
                try:
                    of_scope.append(self._shaped.encode(turn))
                except Exception:  # noqa: BLE001 - one of them; which, the loop below finds out
                    for span in turn:
                        try:
                            of_scope.append(self._shaped.encode([span]))
                        except Exception as error:  # noqa: BLE001
                            self._faults.report("encode", error)

    def _encode_rows(self, row: SpanRows) -> EncodedSpans:
        key = (row.name, tuple(row.constants.items()), tuple(row.ints), tuple(row.doubles))
        template = self._templates.get(key)
        if template is None:
            fields: dict[str, Literal["int", "double", "bool"]] = dict.fromkeys(row.ints, "int")
            fields.update(dict.fromkeys(row.doubles, "double"))
            template = SpanTemplate(row.name, constants=row.constants, fields=fields)
            self._templates[key] = template
            if len(self._templates) > _MAX_TEMPLATES:
                self._templates.popitem(last=False)
        data = template.encode(
            span_id_N=row.span_ids,
            parent_span_id=row.parent_ids,
            start_ns_N=row.start_ns,
            end_ns_N=row.end_ns,
            fields={**row.ints, **row.doubles},
            trace_ids_N=row.trace_ids,
        )
        return EncodedSpans(data, row.span_ids.size)

    def _resource(self, identity: Identity) -> bytes:
        encoded = self._resources.get(identity)
        if encoded is None:
            if self._base_resource is None:
                self._base_resource = self._make_resource()
            attributes = dict(self._base_resource)
            attributes |= {
                "service.instance.id": f"{identity.run_id}-rank{identity.rank}",
                names.ARGUS_RUN_ID: identity.run_id,
                names.ARGUS_RUN_NONCE: identity.nonce.hex(),
                names.ARGUS_ATTEMPT: identity.attempt,
                names.ARGUS_ROLE: identity.role,
                names.DL_RANK: identity.rank,
                names.DL_WORLD_SIZE: identity.world_size,
                names.DL_LOCAL_RANK: identity.local_rank,
            }
            if identity.nonce_local:
                attributes[names.ARGUS_RUN_NONCE_LOCAL] = True
            encoded = self._resources[identity] = encode_resource(attributes)
        return encoded

    # -- the user's spans ---------------------------------------------------------------------

    def add_user_span(self, span: Any) -> None:  # noqa: ANN401 - the SDK's ReadableSpan
        """Queue a span that the user's code has ended; called on their thread."""
        if len(self._user_spans) >= _MAX_USER_SPANS:
            self._faults.report("user_spans_full")
            return
        self._user_spans.append(span)

    def _send_user_spans(self) -> None:
        while self._user_spans:
            batch = [self._user_spans.popleft() for _ in range(min(256, len(self._user_spans)))]
            try:
                bodies = [encode_user_spans(batch)]
            except Exception:  # noqa: BLE001 - one of them; which, the loop below finds out
                bodies = []
                for span in batch:
                    try:
                        bodies.append(encode_user_spans([span]))
                    except Exception as error:  # noqa: BLE001
                        self._faults.report("encode", error)
            for body, count in bodies:
                self._meters.spans += count
                self._sender.submit(Signal.TRACES, body, count)
            time.sleep(0)

    # -- metrics ------------------------------------------------------------------------------

    def _send_metrics(self, *, last: bool) -> None:
        now_s = time.monotonic()
        if self._metric_interval_s is None or not self.recorder.identities:
            return
        if not last and now_s < self._next_metrics_s:
            return
        self._next_metrics_s = now_s + self._metric_interval_s
        stats = self._sender.stats
        points = self._meters.points(
            time.time_ns(),
            sent_bytes=stats.sent_bytes,
            queue_bytes=stats.queue_bytes,
            drops=self._drops(),
        )
        if points:
            body, count = encode_metrics_request(self._resource(self.recorder.identity), points)
            self._sender.submit(Signal.METRICS, body, count)

    def _resident_bytes(self) -> int | None:
        now_s = time.monotonic()
        if now_s >= self._next_memory_s:
            self._next_memory_s = now_s + _MEMORY_INTERVAL_S
            self._memory_bytes = _resident_bytes()
        return self._memory_bytes

    def _drops(self) -> dict[str, int]:
        drops = self._sender.drops
        counts = self._faults.counts
        for cause in _LOSSES:  # not over ``counts``: hooks add to it on other threads
            if count := counts.get(cause, 0):
                drops[cause] = drops.get(cause, 0) + count
        return drops

    @property
    def steps_seen(self) -> int:
        """Whole steps so far; 0 in a job whose loop has none that argus can see."""
        return self._condenser.steps_seen


class _Pause:
    """Lets a waiting trainer have the GIL, if it has been held for long."""

    __slots__ = ("_due_ns",)

    def __init__(self) -> None:
        self._due_ns = monotonic_ns() + _LONGEST_TURN_NS

    def __call__(self) -> None:
        if monotonic_ns() > self._due_ns:
            time.sleep(0)
            self._due_ns = monotonic_ns() + _LONGEST_TURN_NS


def _hook_cost_s(counts: Sequence[int]) -> float:
    """CPU time of the training threads' hooks, from the number of events of each kind."""
    return sum(map(mul, counts, _HOOK_COST_NS)) * 1e-9  # type: ignore[no-any-return]


def _encode_span(span: Span) -> bytes:
    return encode_span(
        name=span.name,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        attributes=span.attributes,  # type: ignore[arg-type]
        error=span.error,
    )


def _resident_bytes() -> int | None:
    try:
        return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
