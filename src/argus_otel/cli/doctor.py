"""``argus doctor``: what is here, what works, and what to do about what does not."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from argus_otel import settings
from argus_otel._runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGES: Final = (
    "argus-otel",
    "opentelemetry-sdk",
    "opentelemetry-instrumentation",
    "opentelemetry-proto",
    "numpy",
    "torch",
    "pyarrow",
    "cupti-python",
    "nvidia-ml-py",
)
_HOOKS_SINCE_TORCH: Final = (2, 14)
_MARK: Final = {"ok": "ok", "warn": "!!", "fail": "FAIL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that ``argus doctor`` found."""

    packages: dict[str, str | None] = field(default_factory=dict)
    settings: list[dict[str, str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not try to reach the endpoint.")
    ] = False,
) -> None:
    """Check this environment: versions, hooks, endpoint, settings.

    Exits with 1 when something fails; what only limits argus is a warning.
    """
    report = Report(packages={name: _version(name) for name in _PACKAGES})
    loaded = settings.load(os.environ)
    for each in fields(settings.Settings):
        report.settings.append(
            {
                "name": settings.PREFIX + each.name.upper(),
                "value": str(getattr(loaded.settings, each.name)),
                "origin": loaded.origins[each.name],
            }
        )
    report.checks += [
        Check(what="settings", state="fail", detail=str(problem), fix=problem.fix)
        for problem in loaded.problems
    ] or [Check(what="settings", state="ok", detail="all can be used")]
    report.checks += _check_off(loaded.settings)
    report.checks += _check_launcher()
    report.checks += _check_torch()
    if not offline:
        report.checks += _check_endpoint()
    if as_json:
        typer.echo(json.dumps({"schema": "argus.doctor/1", **asdict(report)}))
    else:
        _print(report)
    if any(check.state == "fail" for check in report.checks):
        raise typer.Exit(1)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_off(values: settings.Settings) -> Iterable[Check]:
    if not values.enabled:
        yield Check(
            what="switch",
            state="warn",
            detail="ARGUS_ENABLED is off: nothing is traced",
            fix="Unset ARGUS_ENABLED.",
        )
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Check(
            what="switch",
            state="warn",
            detail="OTEL_SDK_DISABLED is true: nothing is traced",
            fix="Unset OTEL_SDK_DISABLED.",
        )


def _check_launcher() -> Iterable[Check]:
    found = sorted({point.name for point in metadata.entry_points(group="opentelemetry_distro")})
    chosen = os.environ.get("OTEL_PYTHON_DISTRO")
    if "argus" not in found:
        yield Check(
            what="launcher",
            state="fail",
            detail="the entry point opentelemetry_distro has no argus",
            fix="Reinstall argus-otel in this environment.",
        )
    elif len(found) > 1 and chosen is None:
        others = ", ".join(name for name in found if name != "argus")
        yield Check(
            what="launcher",
            state="warn",
            detail=f"another OpenTelemetry distribution is installed ({others}); which of them "
            "opentelemetry-instrument takes is not defined. Training is traced either way",
            fix="Set OTEL_PYTHON_DISTRO=argus and OTEL_PYTHON_CONFIGURATOR=argus, or use argus run.",
        )
    else:
        yield Check(what="launcher", state="ok", detail="opentelemetry-instrument finds argus")


def _check_torch() -> Iterable[Check]:
    version = _version("torch")
    if version is None:
        yield Check(
            what="torch",
            state="warn",
            detail="not installed here: nothing to trace, but reading and detecting work",
            fix="Where it trains, install argus-otel in torch's own environment.",
        )
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < _HOOKS_SINCE_TORCH:
        yield Check(
            what="torch",
            state="warn",
            detail=f"{version} has no process-group hooks: steps and phases are traced, "
            "collectives are not",
            fix="Upgrade to torch 2.14 or newer for collectives.",
        )
    else:
        yield Check(what="torch", state="ok", detail=f"{version} has process-group hooks")
    yield from _check_hooks()


def _check_hooks() -> Iterable[Check]:
    """Put the hooks on torch in this process and say what each found."""
    from argus_otel.process.tracer import Tracer

    try:
        tracer = Tracer(settings.Settings(), dormant=False)
    except ConfigError as error:
        yield Check(what="exporter", state="fail", detail=str(error), fix=error.fix)
        return
    tracer.install()
    import importlib

    wanted = ("torch", "torch.distributed.fsdp", "torch.amp.grad_scaler", "torch._dynamo.callback")
    for module in wanted:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the user's torch may be broken in any way
            yield Check(
                what=f"import {module}",
                state="fail",
                detail=f"{type(error).__name__}: {error}",
                fix="Mend the torch installation; training would fail in the same way.",
            )
    for name, state in tracer.instrumentation.found.items():
        yield Check(
            what=f"hook {name}",
            state="ok" if state == "hooked" else "warn",
            detail=state,
            fix="" if state == "hooked" else "This layer will be missing from the traces.",
        )
    tracer.recorder.enabled = False
    tracer.instrumentation.remove()


def _check_endpoint() -> Iterable[Check]:
    """Send one real, empty-handed span and see whether it is accepted."""
    from argus_otel.encode import EncodedSpans, encode_resource, encode_span, encode_trace_requests
    from argus_otel.export import Sender, Signal, targets_from_environment

    try:
        targets = targets_from_environment(os.environ)
    except ConfigError as error:
        yield Check(what="endpoint", state="fail", detail=str(error), fix=error.fix)
        return
    url = targets[Signal.TRACES].url
    logging.getLogger("argus_otel").setLevel(logging.CRITICAL)  # the check itself says it
    sender = Sender(targets, first_post_jitter_s=0)
    now_ns = time.time_ns()
    span = encode_span(
        name="argus.doctor",
        trace_id=os.urandom(16),
        span_id=os.urandom(8),
        parent_span_id=None,
        start_ns=now_ns,
        end_ns=now_ns,
        attributes={"host.name": platform.node()},
    )
    resource = encode_resource({"service.name": "argus-doctor"})
    for body, count in encode_trace_requests(resource, {"argus_otel": [EncodedSpans(span, 1)]}):
        sender.submit(Signal.TRACES, body, count)
    sender.pump(min(5.0, targets[Signal.TRACES].timeout_s))
    stats = sender.stats
    sender.close()
    if stats.sent_records:
        yield Check(what="endpoint", state="ok", detail=f"{url} accepted a span")
    else:
        yield Check(
            what="endpoint",
            state="fail",
            detail=f"{url}: {stats.last_error or 'no answer'}",
            fix="Start a Collector (argus stack up), use argus run --local, or set "
            "OTEL_EXPORTER_OTLP_ENDPOINT. Training runs all the same.",
        )


def _print(report: Report) -> None:
    console = Console(highlight=False)
    python = f"Python {platform.python_version()} at {sys.executable}"
    console.print(python, markup=False, soft_wrap=True)
    versions = Table("package", "version", box=None, pad_edge=False)
    for name, version in report.packages.items():
        versions.add_row(name, version or "not installed")
    console.print(versions)
    console.print()
    values = Table("setting", "value", "from", box=None, pad_edge=False)
    for row in report.settings:
        values.add_row(row["name"], row["value"] or "(empty)", row["origin"])
    console.print(values)
    console.print()
    for check in report.checks:
        style: dict[str, Any] = {
            "ok": {"style": "green"},
            "warn": {"style": "yellow"},
            "fail": {"style": "red"},
        }[check.state]
        console.print(
            f"[{_MARK[check.state]}] {check.what}: {check.detail}",
            markup=False,
            soft_wrap=True,
            **style,
        )
        if check.fix and check.fix not in check.detail:
            console.print(f"     {check.fix}", markup=False, soft_wrap=True)
