"""All of argus in one process: what is put together, and when it starts and ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace

from argus_otel._runtime import active, bounded
from argus_otel._runtime.faults import FaultLog
from argus_otel._runtime.termination import SigtermFlush
from argus_otel.process.first_identity import first_identity
from argus_otel.process.resource import resource_attributes
from argus_otel.process.step_span import StepSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from argus_otel.instrument.install import Instrumentation
    from argus_otel.settings import Settings
    from argus_otel.worker import Worker

logger = logging.getLogger("argus_otel")

_METRIC_INTERVAL_S: Final = 60.0
"""OTEL_METRIC_EXPORT_INTERVAL's default in the OpenTelemetry specification."""


class Tracer:
    """Everything of one process: hooks, worker, step context. See ``active.Tracer``."""

    def __init__(
        self,
        settings: Settings,
        *,
        dormant: bool,
        configure_sdk: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is hooked and no thread runs yet.

        Args:
            settings: Values in force.
            dormant: Whether to wait until this process turns out to be a rank.
            configure_sdk: Called when it does: the user's own spans are to be recorded from then on.

        Raises:
            ConfigError: An ``OTEL_EXPORTER_OTLP_*`` variable cannot be used.
        """
        from argus_otel.export import Sender, Signal, targets_from_environment
        from argus_otel.instrument.install import Instrumentation
        from argus_otel.worker import Worker

        self._settings = settings
        self._faults = FaultLog()
        self._dormant = dormant
        self._configure_sdk = configure_sdk
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
            resource=resource_attributes,
            metric_interval_s=metric_interval_s,
        )
        self.worker.on_start = self._arm_exits
        self._sigterm = SigtermFlush(self._flush_bounded)
        self.recorder = self.worker.recorder
        self.recorder.set_identity(first_identity(settings, os.environ))
        self.instrumentation: Instrumentation = Instrumentation.create(
            self.recorder,
            self._enter_step,
            exception_messages=settings.exception_messages,
            on_world=self._wake,
        )
        self._step_span = StepSpan(self._faults)
        self._step_context: otel_context.Context | None = None
        """The one that we have made, in which the step's span is the current one."""

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
        self._configure_sdk()
        self.instrumentation.install()

    # -- the step's trace context -------------------------------------------------------------

    def _enter_step(self, ordinal: int) -> None:
        """Make the step that begins the parent of what the user's code starts on this thread."""
        self._step_span.follow(self.recorder.identity, ordinal)
        context = otel_context.get_current()
        if context is self._step_context:
            return
        # Inside a span of the user's own, theirs stays the parent.
        current = trace.get_current_span(context)
        if current is not self._step_span and not current.get_span_context().is_valid:
            self._step_context = trace.set_span_in_context(self._step_span, context)
            otel_context.attach(self._step_context)


def _metric_interval_s(environ: Mapping[str, str]) -> float | None:
    exporters = {
        name.strip() for name in (environ.get("OTEL_METRICS_EXPORTER") or "otlp").split(",")
    }
    if not exporters & {"otlp", "otlp_proto_http"}:
        return None
    given_ms = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    return (int(given_ms) if given_ms.isdecimal() else 0) / 1000 or _METRIC_INTERVAL_S
