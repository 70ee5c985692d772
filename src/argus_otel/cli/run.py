"""``argus run -- COMMAND``: run a training job traced, without knowing OpenTelemetry."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from argus_otel._runtime.errors import ArgusError, ConfigError
from argus_otel.cli.launching import become, find_command, run_and_wait, traced_environment
from argus_otel.report.wording import counted


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "run",
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(run)


def run(
    command: Annotated[
        list[str], typer.Argument(help="The command, after --: argus run -- torchrun train.py")
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="Where to send; default OTEL_EXPORTER_OTLP_ENDPOINT, else localhost."),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Service name; default OTEL_SERVICE_NAME.")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of this run, to search by.")] = None,
    local: Annotated[
        bool,
        typer.Option("--local", help="Receive the telemetry here and keep it in --store."),
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(help="With --local: the folder. Default: ARGUS_STORE, else ./argus-store."),
    ] = None,
) -> None:
    """Run a command with its training processes traced.

    Works like opentelemetry-instrument. With --local no Collector and no Jaeger is needed: the
    telemetry is received beside the job, and a finished store is left behind.
    """
    if local and endpoint:
        raise ConfigError(
            "argus run --local",
            got=f"given with --endpoint {endpoint}",
            expected="one of them: --local receives the telemetry here, --endpoint sends it there",
            fix="Drop one of them.",
        )
    environ = traced_environment(os.environ)
    if service:
        environ["OTEL_SERVICE_NAME"] = service
    if run_id:
        environ["ARGUS_RUN_ID"] = run_id
    if endpoint:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    found = find_command(command)
    if not local:
        if store is not None:
            raise ConfigError(
                "argus run --store",
                got=f"{store!r} without --local",
                expected="--local, which keeps the telemetry in that folder",
                fix="Add --local, or drop --store to send to a Collector.",
            )
        become(found, environ)
    raise typer.Exit(run_local(found, environ, store))


def run_local(
    command: list[str], environ: dict[str, str], store: str | None, *, quiet: bool = False
) -> int:
    """Run a command beside an embedded receiver; a finished store when it returns.

    Args:
        command: With its program's full path.
        environ: From ``traced_environment``; the endpoint is set here.
        store: Folder of the store; None for the one that `argus detect` reads by default.
        quiet: Do not say what arrived.

    Returns:
        The command's exit code.

    Raises:
        ArgusError: The packages of a store are not installed, or the store is no folder.
    """
    try:
        from argus_otel.store.opening import local_folder, named_store
        from argus_otel.store.receiver import Receiver
        from argus_otel.store.writer import ParquetWriter
    except ModuleNotFoundError as error:
        raise ArgusError(
            "argus run --local",
            got=f"called without the package {error.name!r}",
            expected="the packages of the embedded store",
            fix="Install them: pip install 'argus-otel[service]'",
        ) from error
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = local_folder(named_store(store))
    with ParquetWriter(folder) as writer, Receiver(writer, port=0) as receiver:
        for name in [name for name in environ if name.startswith("OTEL_EXPORTER_OTLP_")]:
            del environ[name]  # a stray header or protocol would keep the job from reaching us
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
        environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
        code = run_and_wait(command, environ)
        spans = receiver.counts["spans"]
    if quiet:
        return code
    console.print(f"argus: {counted(spans, 'span')} in {folder}", markup=False)
    if spans:
        console.print(f"argus: now  argus detect --store {folder}", markup=False)
    else:
        console.print(
            "argus: nothing arrived. Did the command train, with a Python that has argus-otel? "
            "`argus doctor` tells.",
            markup=False,
        )
    return code
