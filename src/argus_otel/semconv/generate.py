"""Makes names.py and the telemetry reference page from registry.yaml.

Run by ``make semconv``; a test holds the results against the registry.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).parent


def render_names(registry: dict[str, Any]) -> str:
    """The constants module."""
    lines = [
        '"""Names of spans and attributes. Generated from registry.yaml by `make semconv`."""',
        "",
        "from typing import Final",
        "",
        f'SCHEMA_URL: Final = "{registry["schema_url"]}"',
        "",
    ]
    lines += [f'SPAN_{_constant(name)}: Final = "{name}"' for name in registry["spans"]]
    lines.append("")
    lines += [f'{_constant(name)}: Final = "{name}"' for name in registry["attributes"]]
    lines.append("")
    lines += [f'METRIC_{_constant(name)}: Final = "{name}"' for name in registry["metrics"]]
    of_metrics = {name for m in registry["metrics"].values() for name in m.get("attributes", ())}
    lines.append("")
    lines += [
        f'METRIC_ATTRIBUTE_{_constant(name)}: Final = "{name}"' for name in sorted(of_metrics)
    ]
    return "\n".join(lines) + "\n"


def render_page(registry: dict[str, Any]) -> str:
    """The reference page for people who search, chart or parse the telemetry."""
    lines = [
        "# Telemetry",
        "",
        "Made from `src/argus_otel/semconv/registry.yaml`. Schema URL:",
        f"`{registry['schema_url']}`.",
        "",
        "## Instrumentation scopes",
        "",
        "| scope | volume | kept | what |",
        "|---|---|---|---|",
    ]
    for name, entry in registry["scopes"].items():
        lines.append(f"| `{name}` | {entry['volume']} | {entry['kept']} | {entry['meaning']} |")
    lines += ["", "## Spans", "", "| name | scope | what |", "|---|---|---|"]
    for name, entry in registry["spans"].items():
        lines.append(f"| `{name}` | `{entry['scope']}` | {entry['meaning']} |")
    lines += [
        "",
        "Spans of collectives carry the operation's name (`all_reduce`, `all_gather`, …); user",
        "phases carry the name given to `argus_otel.phase()`.",
        "",
        "## Attributes",
        "",
        "| name | type | unit | on | what | example |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in registry["attributes"].items():
        example = str(entry["example"]).replace("|", "\\|")
        lines.append(
            f"| `{name}` | {entry['type']} | {entry['unit']} | {entry['where']} "
            f"| {entry['meaning'].replace('|', chr(92) + '|')} | `{example}` |"
        )
    lines += ["", "## Metrics", ""]
    lines += ["| name | instrument | unit | what | attributes |", "|---|---|---|---|---|"]
    for name, entry in registry["metrics"].items():
        attributes = "; ".join(
            f"`{attribute}` ({of['type']}): {of['meaning']}, such as `{of['example']}`"
            for attribute, of in entry.get("attributes", {}).items()
        )
        lines.append(
            f"| `{name}` | {entry['instrument']} | {entry['unit']} | {entry['meaning']} "
            f"| {attributes} |"
        )
    return "\n".join(lines) + "\n"


def _constant(name: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", name.upper())


def load_registry() -> dict[str, Any]:
    """The registry as plain data."""
    registry: dict[str, Any] = yaml.safe_load((_HERE / "registry.yaml").read_text("utf-8"))
    return registry


if __name__ == "__main__":
    _registry = load_registry()
    (_HERE / "names.py").write_text(render_names(_registry), "utf-8")
    Path(sys.argv[1]).write_text(render_page(_registry), "utf-8")
