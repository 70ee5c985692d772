"""Which files, ports and variables a stack is started with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from argus_otel._runtime.bundled import bundled_path
from argus_otel.stack.errors import StartFailedError
from argus_otel.stack.parts import Part, Stack
from argus_otel.stack.ports import COLLECTOR_PORTS, HOST, JAEGER_PORTS, choose_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from argus_otel.stack.build import Binaries

_CONFIGS = {
    "gateway": ("gateway.yaml",),
    "local": ("gateway.yaml", "local.yaml"),
    "agent": ("agent.yaml",),
}
# Variables of the caller's shell that must not configure these two.
_FOREIGN = ("OTEL_", "ARGUS_", "JAEGER_")


def arrange(
    config: str | Path | Sequence[Path],
    decision_wait_s: float | None,
    jaeger: bool,
    env: Mapping[str, str] | None,
    directory: Path,
    binaries: Binaries,
    prefer_usual_ports: bool,
) -> Stack:
    """Choose ports and write down both commands."""
    files = config_files(config)
    usual = {**COLLECTOR_PORTS, **(JAEGER_PORTS if jaeger else {})}
    ports = choose_ports(usual, prefer_usual=prefer_usual_ports)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}

    def address(port_name: str) -> str:
        return f"{HOST}:{ports[port_name]}"

    collector_env = {
        "ARGUS_COLLECTOR_OTLP_GRPC_ENDPOINT": address("otlp_grpc"),
        "ARGUS_COLLECTOR_OTLP_HTTP_ENDPOINT": address("otlp_http"),
        "ARGUS_COLLECTOR_HEALTH_ENDPOINT": address("health"),
        "ARGUS_COLLECTOR_PROMETHEUS_ENDPOINT": address("prometheus"),
        "ARGUS_COLLECTOR_TELEMETRY_HOST": HOST,
        "ARGUS_COLLECTOR_TELEMETRY_PORT": str(ports["telemetry"]),
        "ARGUS_COLLECTOR_QUEUE_DIR": str(directory / "queue"),
    }
    jaeger_part = None
    if jaeger:
        collector_env["ARGUS_COLLECTOR_BACKEND_OTLP_HTTP"] = f"http://{address('jaeger_otlp_http')}"
        jaeger_env = {
            "OTEL_TRACES_SAMPLER": "always_off",  # else Jaeger's own traces are among the user's
            "ARGUS_JAEGER_OTLP_GRPC_ENDPOINT": address("jaeger_otlp_grpc"),
            "ARGUS_JAEGER_OTLP_HTTP_ENDPOINT": address("jaeger_otlp_http"),
            "ARGUS_JAEGER_QUERY_HTTP_ENDPOINT": address("jaeger_query_http"),
            "ARGUS_JAEGER_QUERY_GRPC_ENDPOINT": address("jaeger_query_grpc"),
            "ARGUS_JAEGER_HEALTH_ENDPOINT": address("jaeger_health"),
            "ARGUS_JAEGER_TELEMETRY_PORT": str(ports["jaeger_telemetry"]),
        }
        jaeger_part = Part(
            name="jaeger",
            argv=(
                str(binaries.jaeger),
                "--config",
                str(bundled_path("collector-config") / "jaeger.yaml"),
            ),
            env={**inherited, **jaeger_env, **(env or {})},
            log=directory / "jaeger.log",
            health_url=f"http://{address('jaeger_health')}/status",
        )
    if decision_wait_s is not None:
        collector_env["ARGUS_COLLECTOR_DECISION_WAIT"] = f"{round(decision_wait_s * 1000)}ms"
    options = [option for file in files for option in ("--config", str(file))]
    return Stack(
        config=config if isinstance(config, str) else ", ".join(map(str, files)),
        ports=ports,
        collector=Part(
            name="collector",
            argv=(str(binaries.collector), *options),
            env={**inherited, **collector_env, **(env or {})},
            log=directory / "collector.log",
            health_url=f"http://{address('health')}/",
        ),
        jaeger=jaeger_part,
    )


def config_files(config: str | Path | Sequence[Path]) -> tuple[Path, ...]:
    """Give the files behind a configuration's name.

    Raises:
        StartFailedError: No such name or file.
    """
    if isinstance(config, str) and config in _CONFIGS:
        return tuple(bundled_path("collector-config") / name for name in _CONFIGS[config])
    given = (config,) if isinstance(config, str | Path) else tuple(config)
    files = tuple(Path(file).absolute() for file in given)
    for file in files:
        if not file.is_file():
            raise StartFailedError(
                "the Collector configuration",
                got=str(config),
                expected=f"one of {', '.join(_CONFIGS)}, or a file",
                fix="Name one of these, or give the path of a YAML file.",
            )
    return files
