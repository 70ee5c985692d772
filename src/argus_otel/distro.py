"""Root of everything in the training process: OpenTelemetry's entry points put the parts together.

``opentelemetry-instrument`` loads the distro (which only sets defaults), then the configurator
(the SDK, for the user's own spans), then the instrumentor (our hooks). With another distro
installed only the instrumentor runs, and everything but the handling of the user's spans is the
same.

In helper processes nothing happens; in processes that may turn out to be ranks (``mp.spawn``),
nothing but a hook that wakes the rest on ``init_process_group``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.instrumentation.distro import BaseDistro  # type: ignore[attr-defined]
from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)
from opentelemetry.sdk._configuration import _OTelSDKConfigurator
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

from argus_otel._runtime import active
from argus_otel._runtime.errors import ConfigError
from argus_otel._runtime.process_kind import ProcessKind, process_kind
from argus_otel.process.resource import user_resource_attributes
from argus_otel.process.tracer import Tracer
from argus_otel.settings import load

if sys.version_info >= (3, 12):
    from typing import override
else:
    from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger("argus_otel")


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
        kwargs.setdefault("resource_attributes", user_resource_attributes(os.environ))
        super()._configure(**kwargs)  # type: ignore[no-untyped-call]


def _configure_sdk_late() -> None:
    """What distro and configurator would have done at the start of a process that proves a rank."""
    if not trace.get_tracer_provider().__class__.__module__.startswith("opentelemetry.trace"):
        return  # the user has configured it, or a configurator
    ArgusDistro().configure()
    with contextlib.suppress(Exception):
        _OTelSDKConfigurator().configure(  # type: ignore[no-untyped-call]
            export_span_processor=_export_processor,
            resource_attributes=user_resource_attributes(os.environ),
        )


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
            self._tracer = Tracer(
                loaded.settings,
                dormant=kind is ProcessKind.DORMANT,
                configure_sdk=_configure_sdk_late,
            )
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
