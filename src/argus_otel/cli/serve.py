"""``argus serve``: receive OTLP on this machine and keep it as Parquet."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from argus_otel.report.wording import counted
from argus_otel.store.opening import local_folder, named_store
from argus_otel.store.receiver import DEFAULT_PORT, Receiver
from argus_otel.store.writer import ParquetWriter

if TYPE_CHECKING:
    from types import FrameType

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    store: Annotated[
        str | None,
        typer.Option(help="Folder to write to. Default: ARGUS_STORE, else ./argus-store."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no authentication.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = DEFAULT_PORT,
) -> None:
    """Receive traces over OTLP/HTTP and store them as Parquet, until Ctrl-C.

    Needs no Collector and no Jaeger. Whatever has been answered is safe on disk; DuckDB and
    pandas read the files as they are.
    """
    folder = local_folder(named_store(store))
    console = Console(highlight=False, soft_wrap=True)
    ended = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ParquetWriter(folder) as writer, Receiver(writer, host=host, port=port) as receiver:
            console.print(f"Receiving OTLP/HTTP at {receiver.endpoint}", markup=False)
            if host not in _LOOPBACK:
                console.print("Whoever reaches this address can write to it.", markup=False)
            console.print(
                f"\nSend:  export OTEL_EXPORTER_OTLP_ENDPOINT={receiver.endpoint}\n"
                "       export OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf\n"
                "       opentelemetry-instrument torchrun … train.py\n"
                f"Read:  argus runs --store {folder}\n"
                f"       argus detect --store {folder}\n\n"
                "Ctrl-C stops it.",
                markup=False,
            )
            ended.wait()
            console.print("Stopping: storing what has arrived.", markup=False)
        spans = receiver.counts["spans"]
        console.print(f"Stored {counted(spans, 'span')} in {folder}", markup=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
