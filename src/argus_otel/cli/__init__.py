"""The ``argus`` command; one module per sub-command."""

from argus_otel.cli.main import main

__all__ = ["main"]
