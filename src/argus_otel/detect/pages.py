"""One Markdown page for each cause, from the detectors' own files; run by ``make semconv``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from argus_otel.detect.definition import Detector

_PARTS = (
    ("means", "What it means"),
    ("recognised_by", "How it is recognised"),
    ("false_alarms", "What it must not be taken for"),
    ("do", "What to do"),
)


def render_page(detector: Detector) -> str:
    """The page of one detector."""
    lines = [f"# {detector.id.replace('_', ' ').capitalize()}", "", f"*{detector.title}.*", ""]
    for key, title in _PARTS:
        lines += [f"## {title}", "", " ".join(detector.runbook[key].split()), ""]
    lines += ["## Thresholds", "", "| name | value | why |", "|---|---|---|"]
    data = yaml.safe_load((detector.folder / "detector.yaml").read_text("utf-8"))
    lines += [
        f"| `{name}` | {entry['value']} | {_cell(entry['source'])} |"
        for name, entry in data["params"].items()
    ]
    lines += ["", "## Severity", ""]
    lines += [
        f"- **{level}** where {what.replace('_', ' ')} is {least:g} or more"
        for level, what, least in detector.params.rules
    ]
    lines += ["", *_asked(detector)]
    return "\n".join(lines).rstrip() + "\n"


def _asked(detector: Detector) -> Iterator[str]:
    yield "## When it is asked"
    yield ""
    if detector.scope == "run":
        yield f"Once about the whole run, from {detector.least_steps} steps on."
    else:
        yield (
            f"About every window of {detector.window_steps} settled steps (after the first ten, "
            "without compilation)."
        )
    if detector.needs:
        yield ""
        columns = ", ".join(f"`{name}`" for name in detector.needs)
        yield f"It needs {columns}, and abstains where no rank could measure that."
    if detector.explains:
        yield ""
        causes = ", ".join(cause.replace("_", " ") for cause in detector.explains)
        yield f"On the same ranks and steps it accounts for: {causes}."


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def pages() -> dict[str, str]:
    """File name → page, with the index."""
    detectors = load_detectors(bundled_path("detectors"))
    found = {f"{detector.id}.md": render_page(detector) for detector in detectors}
    index = [
        "# Causes",
        "",
        "What `argus detect` can say, a page each. Made from `detectors/*/detector.yaml`.",
        "",
        "| detector | says | cause |",
        "|---|---|---|",
    ]
    index += [
        f"| [{detector.id}]({detector.id}.md) | {_cell(detector.title)} | `{detector.cause}` |"
        for detector in detectors
    ]
    found["index.md"] = "\n".join(index) + "\n"
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")
