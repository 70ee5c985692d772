"""detector.yaml: what a detector is called, needs, and where each of its thresholds comes from."""

from __future__ import annotations

import importlib.util
import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import yaml

from argus_otel._runtime.errors import ConfigError
from argus_otel.detect.run import COLUMNS
from argus_otel.tables.findings import CAUSES, Diagnosis, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from argus_otel.detect.run import Run
    from argus_otel.tables.findings import Finding

_KEYS: Final = {
    "id",
    "scope",
    "title",
    "cause",
    "needs",
    "peers",
    "ranks_present",
    "window",
    "params",
    "severity",
    "explains",
    "runbook",
}
_REQUIRED: Final = _KEYS - {"scope", "peers", "explains", "ranks_present"}
_SCOPES: Final = ("window", "run")
_RUNBOOK: Final = {"means", "recognised_by", "false_alarms", "do"}
PRESENT: Final = 0.9
"""Share of the job's ranks that must have sent something (DESIGN, detection)."""
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C, where PyYAML has it, reads all detectors in a tenth of the time: 7 ms."""
_LEVELS: Final = ("info", "warning", "critical")
CONFIDENCE_FILE: Final = "confidence.json"
"""Beside detector.yaml, made by ``bench/accuracy --calibrate``: of how many findings of each severity how
many were right."""
_LEAST_FINDINGS: Final = 30
"""Of fewer, a share says little: no confidence then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """A detector's thresholds by name, as its detector.yaml gives them."""

    detector: str
    values: Mapping[str, float]
    rules: tuple[tuple[Severity, str, float], ...]
    """(level, number, at least), first match holds."""
    do: str
    """The runbook's first aid."""

    def __getitem__(self, name: str) -> float:
        """A threshold."""
        return self.values[name]

    def severity(self, **numbers: float) -> Severity | None:
        """The level of a finding with these numbers; None below the lowest rule."""
        for level, name, at_least in self.rules:
            if numbers.get(name, 0.0) >= at_least:
                return level
        return None


class Detect(Protocol):
    """The one function of a detector: pure, the same answer for the same window (or run)."""

    def __call__(self, seen: Any, params: Params) -> Diagnosis:  # noqa: ANN401 - Window or Run
        """Say what the window, or the run, shows."""
        ...


class Complete(Protocol):
    """What a detector may have beside ``detect``: evidence that is dear to read, for a finding.

    Asked once for each of the heaviest findings of a run, when they are settled.
    """

    def __call__(
        self, finding: Finding, run: Run, params: Params, named: frozenset[int]
    ) -> Finding:
        """The finding with more evidence; ``named`` are the ranks of all findings."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """A detector as loaded from its folder."""

    id: str
    title: str
    cause: str
    needs: tuple[str, ...]
    """Columns of the steps table; without any value in one of them the detector abstains."""
    needs_peers: bool
    scope: Literal["window", "run"]
    """Whether it is asked about each window of settled steps, or once about the run, first steps and
    compiling steps included."""
    ranks_present: float
    """Share of the job's ranks that must have sent something; 0 for one that looks for the silent."""
    window_steps: int
    least_steps: int
    params: Params
    explains: tuple[str, ...]
    """Causes that a finding of this one may produce as symptoms on the same ranks."""
    runbook: Mapping[str, str]
    folder: Path
    detect: Detect
    complete: Complete | None = None
    """Looks closer at what was found; see ``Complete``."""
    confidence: Mapping[str, float] = field(default_factory=dict)
    """How often a finding of each severity was right on the scoreboard, 0 to 1; not there where it had
    too few."""


def load_detectors(*folders: Path) -> list[Detector]:
    """Load each sub-folder that holds a detector.yaml, in order of name; a later id replaces.

    Raises:
        ConfigError: A folder has no detector, a file is damaged, or a key is missing or unknown.
    """
    found: dict[str, Detector] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"the detectors folder {folder}",
                got="not a folder",
                expected="a folder with one sub-folder per detector",
                fix="Check the path given with --detectors.",
            )
        places = [folder] if (folder / "detector.yaml").is_file() else sorted(folder.iterdir())
        loaded = [_load(place) for place in places if (place / "detector.yaml").is_file()]
        if not loaded:
            raise ConfigError(
                f"the detectors folder {folder}",
                got="without a detector: no detector.yaml in it or in a folder of it",
                expected="a folder with one sub-folder per detector, or the folder of one",
                fix="Check the path; `argus detectors new NAME` starts a detector.",
            )
        found |= {detector.id: detector for detector in loaded}
    return list(found.values())


def _load(folder: Path) -> Detector:
    path = folder / "detector.yaml"
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)  # noqa: S506 - a safe one
    except yaml.YAMLError as error:
        raise _bad(path, f"damaged ({error})", "YAML") from error
    if not isinstance(data, dict):
        raise _bad(path, "not a mapping", f"the keys {sorted(_REQUIRED)}")
    if unknown := sorted(set(data) - _KEYS):
        raise _bad(path, f"using the unknown keys {unknown}", f"only {sorted(_KEYS)}")
    if missing := sorted(_REQUIRED - set(data)):
        raise _bad(path, f"without {missing}", f"the keys {sorted(_REQUIRED)}")
    if data["cause"] not in CAUSES:
        raise _bad(path, f"naming the cause {data['cause']!r}", f"one of {CAUSES}")
    if data.get("scope", "window") not in _SCOPES:
        raise _bad(path, f"giving the scope {data['scope']!r}", f"one of {_SCOPES}")
    if strange := sorted(set(data["needs"]) - set(COLUMNS)):
        raise _bad(path, f"asking for {strange}", f"columns among {COLUMNS}")
    if lacking := sorted(_RUNBOOK - set(data["runbook"])):
        raise _bad(path, f"without runbook entries {lacking}", f"{sorted(_RUNBOOK)}")
    window = data["window"]
    module = _module(folder, str(data["id"]))
    return Detector(
        id=str(data["id"]),
        title=str(data["title"]),
        cause=str(data["cause"]),
        needs=tuple(data["needs"]),
        needs_peers=bool(data.get("peers", False)),
        scope=data.get("scope", "window"),
        ranks_present=float(data.get("ranks_present", PRESENT)),
        window_steps=int(window["steps"]),
        least_steps=int(window.get("least_steps", window["steps"])),
        params=Params(
            detector=str(data["id"]),
            values=dict(_thresholds(path, data["params"])),
            rules=tuple(_rules(path, data["severity"])),
            do=" ".join(str(data["runbook"]["do"]).split()),
        ),
        explains=tuple(data.get("explains", ())),
        runbook={key: str(text) for key, text in data["runbook"].items()},
        folder=folder,
        detect=cast("Detect", module.detect),
        complete=cast("Complete | None", getattr(module, "complete", None)),
        confidence=dict(_confidences(folder / CONFIDENCE_FILE)),
    )


def _thresholds(path: Path, params: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, entry in params.items():
        if not isinstance(entry, dict) or not {"value", "source"} <= set(entry):
            raise _bad(path, f"giving {name} as {entry!r}", "a value and its source")
        yield name, float(entry["value"])


def _confidences(path: Path) -> Iterator[tuple[str, float]]:
    """Severity, and the mean of what its share may be after what was seen, from a flat prior."""
    if not path.is_file():
        return
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        counts = [(level, int(of["right"]), int(of["of"])) for level, of in table.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected = 'severity to counts: {"warning": {"right": 40, "of": 41}}'
        raise _bad(path, f"damaged ({type(error).__name__}: {error})", expected) from error
    for level, right, of in counts:
        if of >= _LEAST_FINDINGS:
            yield level, (right + 1) / (of + 2)


def _rules(path: Path, rules: list[dict[str, Any]]) -> Iterator[tuple[Severity, str, float]]:
    for rule in rules:
        if set(rule) != {"level", "when", "at_least"} or rule["level"] not in _LEVELS:
            raise _bad(path, f"giving the severity rule {rule!r}", "level, when, at_least")
        yield cast("Severity", rule["level"]), str(rule["when"]), float(rule["at_least"])


def _module(folder: Path, name: str) -> Any:  # noqa: ANN401 - a detector's own
    path = folder / "detector.py"
    spec = importlib.util.spec_from_file_location(f"argus_detectors.{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _bad(path, "absent", "a module with detect(window, params)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.detect  # noqa: B018 - there, or the error below says that it is not
    except SyntaxError as error:
        where = f"{error.filename or path}:{error.lineno or 1}"
        raise _bad(Path(where), f"not Python: {error.msg}", "detect(window, params)") from error
    except Exception as error:
        lines = [
            at.lineno
            for at in traceback.extract_tb(error.__traceback__)
            if at.filename == str(path)
        ]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        what = f"failing to load: {type(error).__name__}: {error}"
        raise _bad(Path(where), what, "detect(window, params)") from error
    return module


def _bad(path: Path, got: str, expected: str) -> ConfigError:
    return ConfigError(str(path), got=got, expected=expected, fix="Correct that file.")
