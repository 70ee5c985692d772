"""What the spans of a process say of where they come from."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from argus_otel.semconv import names

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_SERVICE_NAME: Final = "pytorch-training"


def resource_attributes() -> dict[str, Any]:
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


def user_resource_attributes(environ: Mapping[str, str]) -> dict[str, Any]:
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
