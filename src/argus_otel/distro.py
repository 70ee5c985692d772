"""Root of everything in the training process: OpenTelemetry's entry points put the parts together.

``opentelemetry-instrument`` loads the distro (which only sets defaults), then the configurator
(the SDK, for the user's own spans), then the instrumentor (our hooks). With another distro
installed only the instrumentor runs, and everything but the handling of the user's spans is the
same.

In helper processes nothing happens; in processes that may turn out to be ranks (``mp.spawn``),
nothing but a hook that wakes the rest on ``init_process_group``.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.instrumentation.distro import BaseDistro  # type: ignore[attr-defined]
from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)
from opentelemetry.sdk._configuration import _OTelSDKConfigurator
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

from argus_otel._runtime import active, bounded
from argus_otel._runtime.errors import ConfigError
from argus_otel._runtime.faults import FaultLog
from argus_otel._runtime.process_kind import ProcessKind, process_kind
from argus_otel._runtime.termination import SigtermFlush
from argus_otel.semconv import names
from argus_otel.settings import Settings, load
from argus_otel.wire import ids
from argus_otel.wire.identity import Identity

if sys.version_info >= (3, 12):
    from typing import override
else:
    from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from opentelemetry.sdk.trace import ReadableSpan

    from argus_otel.instrument.install import Instrumentation
    from argus_otel.worker import Worker

logger = logging.getLogger("argus_otel")

DEFAULT_SERVICE_NAME: Final = "pytorch-training"
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DEFAULT_METRIC_INTERVAL_MS: Final = 60_000
"""OTEL_METRIC_EXPORT_INTERVAL's default in the OpenTelemetry specification."""

_SCHEDULER_RUN_IDS: Final = (
    "SLURM_JOB_ID",
    "RAY_JOB_ID",
    "KUBERNETES_JOB_NAME",
    "JOB_NAME",
    "TORCHELASTIC_RUN_ID",
)


def kind_of_this_process() -> ProcessKind:
    """What ``sys.orig_argv`` says; settings that turn argus off make any process inert."""
    if _truthy(os.environ.get("OTEL_SDK_DISABLED", "")):
        return ProcessKind.INERT
    return process_kind(sys.orig_argv)


def _truthy(text: str) -> bool:
    return text.strip().lower() == "true"  # OpenTelemetry: only "true" is true


class ArgusDistro(BaseDistro):  # type: ignore[misc]
    """Defaults of the environment; what the user set always wins."""

    @override
    def _configure(self, **kwargs: Any) -> None:
        os.environ.setdefault("OTEL_TRACES_EXPORTER", "otlp")
        os.environ.setdefault("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        os.environ.setdefault("OTEL_PYTHON_ID_GENERATOR", "argus")

    def load_instrumentor(self, entry_point: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Load an instrumentor, but none in helper processes."""
        if kind_of_this_process() is ProcessKind.INERT and entry_point.name != "argus":
            return
        super().load_instrumentor(entry_point, **kwargs)


class ArgusConfigurator(_OTelSDKConfigurator):
    """The SDK for the user's own spans, without threads of its own."""

    @override
    def _configure(self, **kwargs: Any) -> None:
        if kind_of_this_process() is not ProcessKind.MAIN:
            return
        if os.environ.get("OTEL_CONFIG_FILE"):
            super()._configure(**kwargs)  # type: ignore[no-untyped-call] # declarative configuration takes no arguments
            return
        kwargs.setdefault("export_span_processor", _export_processor)
        kwargs.setdefault("resource_attributes", _user_resource_attributes(os.environ))
        super()._configure(**kwargs)  # type: ignore[no-untyped-call]


def _export_processor(exporter: Any) -> SpanProcessor:  # noqa: ANN401
    """The user's OTLP spans ride with ours: one queue, one thread, one connection."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if isinstance(exporter, OTLPSpanExporter):
        exporter.shutdown()  # type: ignore[no-untyped-call]
        return UserSpanProcessor()
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(exporter)


class UserSpanProcessor(SpanProcessor):
    """Hands ended spans to the worker of this process, if it has one."""

    @override
    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span."""
        tracer = active.get()
        sampled = span.context is not None and span.context.trace_flags.sampled
        if sampled and isinstance(tracer, Tracer):
            tracer.add_user_span(span)

    @override
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is queued."""
        tracer = active.get()
        return tracer is None or tracer.flush(timeout_millis / 1000)


class ArgusIdGenerator(IdGenerator):
    """Random ids from the system, so that ``random.seed(0)`` on every rank changes nothing."""

    @override
    def generate_span_id(self) -> int:
        """64 bits, never 0."""
        while not (value := int.from_bytes(os.urandom(8), "little")):
            pass
        return value

    @override
    def generate_trace_id(self) -> int:
        """128 bits, never 0."""
        while not (value := int.from_bytes(os.urandom(16), "little")):
            pass
        return value

    @override
    def is_trace_id_random(self) -> bool:
        """Whether the W3C random flag may be set: yes."""
        return True


class ArgusInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Our hooks, as OpenTelemetry instruments a library."""

    _tracer: Tracer | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """Torch, which the user brings; older than 2.14 has no collectives."""
        return ("torch >= 2.4",)

    def _instrument(self, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        kind = kind_of_this_process()
        if kind is ProcessKind.INERT and not _is_launcher(sys.orig_argv):
            return
        loaded = load(os.environ)
        if kind is not ProcessKind.DORMANT:  # whoever started that one has said it all
            _report_problems(loaded.problems, strict=loaded.settings.strict)
        if kind is ProcessKind.INERT or not loaded.settings.enabled:
            return
        if not _exports_otlp(os.environ, quiet=kind is ProcessKind.DORMANT):
            return
        try:
            self._tracer = Tracer(loaded.settings, dormant=kind is ProcessKind.DORMANT)
        except ConfigError as error:
            if kind is not ProcessKind.DORMANT:
                _report_problems((error,), strict=loaded.settings.strict)
            return
        active.put(self._tracer)
        self._tracer.install()

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        if self._tracer is not None:
            self._tracer.disable()
            self._tracer = None


def _is_launcher(argv: list[str]) -> bool:
    """A launcher reads the settings only to complain about them once, before any rank starts."""
    return "multiprocessing" not in " ".join(argv)


def _report_problems(problems: tuple[ConfigError, ...], *, strict: bool) -> None:
    if not problems:
        return
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank == "0" or strict:
        for problem in problems:
            print(f"argus: {problem}", file=sys.stderr, flush=True)  # noqa: T201 - no logging yet
    if strict:
        print(  # noqa: T201
            "argus: not starting, because ARGUS_STRICT=1.", file=sys.stderr, flush=True
        )
        os._exit(2)  # an exception would be swallowed by the auto-instrumentation's loader


def _exports_otlp(environ: Mapping[str, str], *, quiet: bool) -> bool:
    exporters = {
        name.strip() for name in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")
    }
    if exporters & {"otlp", "otlp_proto_http"}:
        return True
    if exporters != {"none"} and not quiet:
        logger.warning(
            "argus: OTEL_TRACES_EXPORTER is %r; argus sends OTLP/HTTP only, so it records "
            "nothing. Add otlp to the list to have it.",
            environ.get("OTEL_TRACES_EXPORTER"),
        )
    return False


class Tracer:
    """Everything of one process: hooks, worker, step context. See ``active.Tracer``."""

    def __init__(self, settings: Settings, *, dormant: bool) -> None:
        """Prepare; nothing is hooked and no thread runs yet.

        Raises:
            ConfigError: An ``OTEL_EXPORTER_OTLP_*`` variable cannot be used.
        """
        from argus_otel.export import Sender, Signal, targets_from_environment
        from argus_otel.instrument.install import Instrumentation
        from argus_otel.worker import Worker

        self._settings = settings
        self._faults = FaultLog()
        self._dormant = dormant
        self._pid = os.getpid()
        self._armed_pid = 0
        metric_interval_s = _metric_interval_s(os.environ)
        self.worker: Worker = Worker(
            settings,
            self._faults,
            Sender(
                targets_from_environment(
                    os.environ,
                    signals=[Signal.TRACES] if metric_interval_s is None else list(Signal),
                ),
                queue_limit_bytes=settings.queue_bytes,
            ),
            resource=_resource_attributes,
            metric_interval_s=metric_interval_s,
        )
        self.worker.on_start = self._arm_exits
        self._sigterm = SigtermFlush(self._flush_bounded)
        self.recorder = self.worker.recorder
        self.recorder.set_identity(_first_identity(settings, os.environ))
        self.instrumentation: Instrumentation = Instrumentation.create(
            self.recorder,
            self._enter_step,
            exception_messages=settings.exception_messages,
            on_world=self._wake,
        )
        self._step_span = _StepSpan(self._faults)

    def install(self) -> None:
        """Put the hooks in place."""
        self.recorder.enabled = not self._dormant
        os.register_at_fork(after_in_child=self._after_fork)
        if self._dormant:
            self.instrumentation.install_wake_up()
        else:
            self.instrumentation.install()

    # -- public functions ---------------------------------------------------------------------

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time a block under a name."""
        from argus_otel.instrument.framework.phases import user_phase

        return user_phase(self.recorder, name)

    def set_step(self, iteration: int) -> None:
        """Number the step that begins."""
        if self.recorder.enabled:
            try:
                self.instrumentation.steps.set_step(iteration)
            except Exception as error:  # noqa: BLE001 - never into the user's training
                self._faults.report("set_step", error)

    def annotate(self, work: dict[str, float]) -> None:
        """Add to the step's amounts of work."""
        if self.recorder.enabled:
            try:
                self.instrumentation.annotate(work)
            except Exception as error:  # noqa: BLE001
                self._faults.report("annotate", error)

    def add_user_span(self, span: Any) -> None:  # noqa: ANN401
        """Queue a span of the user's; also starts the worker, since there is something to send."""
        if self.recorder.enabled and os.getpid() == self._pid:
            try:
                self.worker.add_user_span(span)
                self.recorder.start()
            except Exception as error:  # noqa: BLE001 - it would come out of the user's span.end()
                self._faults.report("user_span", error)

    def flush(self, timeout_s: float) -> bool:
        """Send what is there; nothing in a process that is (or was forked from) no rank."""
        return not self.recorder.enabled or self.worker.flush(timeout_s)

    def disable(self) -> None:
        """Take the hooks off, send what is there, stop."""
        self.recorder.enabled = False
        with contextlib.suppress(Exception):
            self.instrumentation.remove()
        self.worker.flush(self._settings.flush_timeout_s)
        self.worker.stop()
        self._sigterm.undo()
        bounded.dismiss()
        self._step_span.follow_none()
        active.put(None)

    # -- life of the process ------------------------------------------------------------------

    def _arm_exits(self) -> None:
        """Called on the training thread when there is something to flush at the end.

        Again where the worker's thread could not be started the first time.
        """
        self._pid = os.getpid()
        if self._armed_pid != self._pid:
            self._armed_pid = self._pid
            self._register_flush_at_exit()
        try:
            bounded.prepare()
            self._sigterm.install()
        except (ValueError, OSError, RuntimeError) as error:
            self._sigterm.undo()  # without its thread it would only keep the process alive
            self._faults.report("sigterm_hook", error)

    def _register_flush_at_exit(self) -> None:
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            # Its children end by os._exit where they were forked: atexit does not run.
            from multiprocessing.util import Finalize

            Finalize(None, self._flush_at_exit, exitpriority=0)
        else:
            atexit.register(self._flush_at_exit)

    def _flush_at_exit(self) -> None:
        if os.getpid() == self._pid and self.recorder.enabled:
            with contextlib.suppress(Exception):
                self.instrumentation.steps.end_at_exit()
            bound_s = self._settings.flush_timeout_s
            # A resolver may hang for longer than any time-out of ours.
            bounded.run_bounded(lambda: self._flush_bounded(bound_s), bound_s)
            if self.worker.steps_seen == 0 and self.instrumentation.collectives.hooked:
                logger.warning(
                    "argus: no steps seen: no optimizer stepped and set_step() was not called"
                )

    def _flush_bounded(self, bound_s: float) -> None:
        self.worker.flush(bound_s)

    def _after_fork(self) -> None:
        """In a child: a DataLoader worker, or a rank that will say so by init_process_group."""
        self.worker.reset_after_fork()
        self.instrumentation.steps.forget_thread()
        self._dormant = True

    def _wake(self) -> None:
        """``init_process_group`` was called in a process that was asleep: it is a rank."""
        if not self._dormant:
            return
        self._dormant = False
        self._pid = os.getpid()
        self.recorder.enabled = True
        if trace.get_tracer_provider().__class__.__module__.startswith("opentelemetry.trace"):
            ArgusDistro().configure()
            with contextlib.suppress(Exception):
                _OTelSDKConfigurator().configure(  # type: ignore[no-untyped-call]
                    export_span_processor=_export_processor,
                    resource_attributes=_user_resource_attributes(os.environ),
                )
        self.instrumentation.install()

    # -- the step's trace context -------------------------------------------------------------

    def _enter_step(self, ordinal: int) -> None:
        """Make the step that begins the parent of what the user's code starts on this thread."""
        self._step_span.follow(self.recorder.identity, ordinal)
        # Inside a span of the user's own, theirs stays the parent.
        current = trace.get_current_span()
        if current is not self._step_span and not current.get_span_context().is_valid:
            otel_context.attach(trace.set_span_in_context(self._step_span))


def _user_samples(trace_id: int) -> bool:
    """Whether the user's own spans in this step are to be recorded.

    A parent-based sampler asks the parent, which is our step: so the step asks the sampler, as
    if it were a root. Ratios go by the trace id, and all ranks agree. Argus's own spans are not
    concerned: the Collector samples those.
    """
    if not os.environ.get("OTEL_TRACES_SAMPLER"):
        return True
    sampler = getattr(trace.get_tracer_provider(), "sampler", None)
    if sampler is None:
        return True
    root = otel_context.Context()  # None would mean the current one, and that is the step itself
    return bool(sampler.should_sample(root, trace_id, "rank.step").decision.is_sampled())


class _StepSpan(trace.NonRecordingSpan):
    """Stands for whichever step is under way, wherever it is the current span.

    One object for all steps, so that it need not be replaced at a boundary: a loop whose own
    span wraps ``optimizer.step()`` comes back to this one and finds it in the next step.
    """

    def __init__(self, faults: FaultLog) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self._faults = faults
        self._step: tuple[Identity, int] | None = None
        self._known: tuple[tuple[Identity, int] | None, trace.SpanContext] = (
            None,
            trace.INVALID_SPAN_CONTEXT,
        )

    def follow(self, identity: Identity, ordinal: int) -> None:
        """Be this step from here on. What its ids are is worked out when somebody asks."""
        self._step = (identity, ordinal)

    def follow_none(self) -> None:
        """Be no step: what starts now has no parent of ours."""
        self._step = None

    @override
    def get_span_context(self) -> trace.SpanContext:
        step = self._step
        known_step, context = self._known  # one read: other threads ask too
        if known_step is not step:
            context = trace.INVALID_SPAN_CONTEXT
            try:
                if step is not None:
                    context = _step_context(*step)
            except Exception as error:  # noqa: BLE001 - the user's sampler, inside user's code
                self._faults.report("step_context", error)
            self._known = (step, context)
        return context

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_span_context()!r})"


def _step_context(identity: Identity, ordinal: int) -> trace.SpanContext:
    trace_id = ids.step_trace_id(
        identity.nonce, identity.attempt, ordinal, ids.shard_of(identity.rank)
    )
    number = int.from_bytes(trace_id, "big")
    flags = trace.TraceFlags.SAMPLED if _user_samples(number) else trace.TraceFlags.DEFAULT
    return trace.SpanContext(
        trace_id=number,
        span_id=int.from_bytes(ids.span_id(trace_id, ids.RANK_STEP, identity.rank), "big"),
        is_remote=False,
        trace_flags=trace.TraceFlags(flags),
    )


def _first_identity(settings: Settings, environ: Mapping[str, str]) -> Identity:
    """Who this process is before ``init_process_group``, or without one."""
    return Identity(
        nonce=os.urandom(8),
        nonce_local=False,  # alone, and nobody to share it with
        run_id=settings.run_id or _scheduler_run_id(environ),
        attempt=_whole(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        role=settings.role,
        rank=_whole(environ.get("RANK", "0")),
        world_size=1,
        local_rank=_whole(environ.get("LOCAL_RANK", "0")),
    )


def _scheduler_run_id(environ: Mapping[str, str]) -> str:
    for name in _SCHEDULER_RUN_IDS:
        value = environ.get(name, "")
        # torchrun's own default is the word "none", or with --standalone a random UUID, which
        # no person would search by.
        if value and value.lower() != "none" and not _UUID.fullmatch(value):
            return value
    started = time.strftime("run-%Y%m%d-%H%M%S", time.gmtime(_job_start_s(environ)))
    # Two jobs may start in one second; their ranks meet at different places.
    port = environ.get("MASTER_PORT")
    place = f"{environ.get('MASTER_ADDR', '')}:{port}" if port else f"parent {os.getppid()}"
    return f"{started}-{hashlib.blake2b(place.encode(), digest_size=2).hexdigest()}"


def _job_start_s(environ: Mapping[str, str]) -> float:
    """When the job started: the launcher's mark, so that all ranks of a host say the same."""
    with contextlib.suppress(ValueError):
        return float(environ.get("ARGUS_LAUNCHED", ""))
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The parent (torchrun's agent) is common to all ranks of a host.
        boot_ticks = int(
            Path(f"/proc/{os.getppid()}/stat").read_text("ascii").rpartition(")")[2].split()[19]
        )
        uptime_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
        return time.time() - uptime_s + boot_ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0


def _metric_interval_s(environ: Mapping[str, str]) -> float | None:
    exporters = {
        name.strip() for name in (environ.get("OTEL_METRICS_EXPORTER") or "otlp").split(",")
    }
    if not exporters & {"otlp", "otlp_proto_http"}:
        return None
    return _whole(environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000 or (
        DEFAULT_METRIC_INTERVAL_MS / 1000
    )


def _resource_attributes() -> dict[str, Any]:
    """The resource as OpenTelemetry detects it, plus the host."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    try:
        resource = Resource.create()
    except RuntimeError:  # at the interpreter's end it can start no threads for its detectors
        resource = Resource(OTELResourceDetector().detect().attributes)
    attributes = dict(resource.attributes)
    if str(attributes.get("service.name") or "unknown_service").startswith("unknown_service"):
        attributes["service.name"] = DEFAULT_SERVICE_NAME
    return _process_attributes() | attributes


def _user_resource_attributes(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the resource of the user's own spans has beside what OpenTelemetry detects.

    Only what the user has not set: the SDK lets these win.
    """
    attributes = _process_attributes()
    if environ.get("RANK", "").isdecimal():
        attributes[names.DL_RANK] = int(environ["RANK"])
    if not environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = DEFAULT_SERVICE_NAME
    pairs = environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    for given in {pair.partition("=")[0].strip() for pair in pairs}:
        attributes.pop(given, None)
    return attributes


def _process_attributes() -> dict[str, Any]:
    host = socket.gethostname()
    return {
        # Jaeger's clock-skew adjuster moves spans of hosts that it cannot tell apart.
        "host.name": host,
        "host.id": _machine_id() or host,
        "process.pid": os.getpid(),
    }


def _machine_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            if text := Path(path).read_text("ascii").strip():
                return text
    return ""
