"""Every setting once: name, type, unit, default, meaning.

Order: the environment, then the TOML file that ``ARGUS_CONFIG`` names, then the default. Read
once, at start; nothing reads the environment later. ``OTEL_*`` variables are honoured where
OpenTelemetry says what they mean and are not repeated here.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from argus_otel._runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "ARGUS_"


def _setting(
    default: Any,  # noqa: ANN401 - the default's own type is the setting's type
    meaning: str,
    *,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
) -> Any:  # noqa: ANN401
    from dataclasses import field

    return field(
        default=default, metadata={"meaning": meaning, "unit": unit, "least": least, "most": most}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user sets. The variable is ``ARGUS_`` and the field's name in capitals."""

    enabled: bool = _setting(True, "Trace this job. 0 makes every hook absent.")
    strict: bool = _setting(
        False, "Refuse to start on a bad setting. By default the job starts and a warning says so."
    )
    run_id: str = _setting(
        "", "The run's name, to search by. Default: the scheduler's id, else the start time."
    )
    role: str = _setting("trainer", "Which of a job's worlds this is (RL jobs have several).")
    baseline_ratio: float = _setting(
        0.02,
        "Share of steps whose timeline and detail are kept although nothing is odd.",
        unit="1",
        least=0,
        most=1,
    )
    overhead_budget: float = _setting(
        0.005,
        "Share of the training thread's time that optional recording (ends of asynchronous "
        "collectives) may cost; argus measures itself and records less when it would cost more.",
        unit="1",
        least=0,
        most=1,
    )
    detail_spans: int = _setting(
        900,
        "Detail spans of a rank and step, for steps that are kept.",
        unit="{span}",
        least=0,
        most=7000,
    )
    ring_events: int = _setting(
        65536,
        "Events held between two wake-ups of the background thread; about 270 bytes each.",
        unit="{event}",
        least=1024,
        most=3_000_000,
    )
    queue_bytes: int = _setting(
        32 << 20,
        "Bytes waiting to be sent; beyond that the oldest are dropped and counted.",
        unit="By",
        least=1 << 20,
        most=1 << 30,
    )
    interval_s: float = _setting(
        0.9,
        "How often the background thread condenses and sends.",
        unit="s",
        least=0.05,
        most=60,
    )
    flush_timeout_s: float = _setting(
        5.0, "Longest wait at exit for what is not sent yet.", unit="s", least=0, most=600
    )
    exception_messages: bool = _setting(
        False, "Put messages of uncaught exceptions into spans (they may hold private data)."
    )
    config: str = _setting("", "A TOML file of settings: `baseline_ratio = 0.1`.")
    store: str = _setting("", "Where `argus detect`, `runs` and `report` read by default.")
    cache_dir: str = _setting("", "Where `argus stack` keeps the built Collector and Jaeger.")


# Read by others under our prefix: the launcher's mark and values of the collector-config files.
OTHER_NAMES: Final = frozenset({"ARGUS_LAUNCHED"})
OTHER_PREFIXES: Final = ("ARGUS_COLLECTOR_", "ARGUS_JAEGER_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings with where each came from, and what was wrong with what was given."""

    settings: Settings
    origins: dict[str, str]
    """Field to ``environment``, the file's path, or ``default``."""
    problems: tuple[ConfigError, ...]
    """A value with a problem is not used; the default stands."""


def load(environ: Mapping[str, str]) -> Loaded:
    """Read the settings; never raises for what they hold.

    The caller decides what a problem means: a warning, or with ``ARGUS_STRICT=1`` the end.
    """
    problems: list[ConfigError] = []
    known = {field.name: field for field in fields(Settings)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    for name, value in _read_file(environ.get(PREFIX + "CONFIG", ""), problems).items():
        where = f"{name} ({environ[PREFIX + 'CONFIG']})"
        _take(name, value, where, environ[PREFIX + "CONFIG"], known, values, origins, problems)
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_NAMES:
            continue
        if variable.startswith(OTHER_PREFIXES) or text == "":
            continue
        name = variable.removeprefix(PREFIX).lower()
        where = f"{variable} (environment)"
        _take(name, text, where, "environment", known, values, origins, problems)
    return Loaded(settings=Settings(**values), origins=origins, problems=tuple(problems))


def _read_file(path: str, problems: list[ConfigError]) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        problems.append(
            ConfigError(
                "ARGUS_CONFIG (environment)",
                got=f"{path!r}, which cannot be read ({error})",
                expected="a TOML file of settings",
                fix="Correct the path or the file, or unset ARGUS_CONFIG.",
            )
        )
        return {}


def _take(
    name: str,
    value: Any,  # noqa: ANN401
    where: str,
    origin: str,
    known: Mapping[str, Any],
    values: dict[str, Any],
    origins: dict[str, str],
    problems: list[ConfigError],
) -> None:
    field = known.get(name)
    if field is None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {PREFIX}{near[0].upper()}? " if near else ""
        problems.append(
            ConfigError(
                where,
                got=f"set to {str(value)!r}, but there is no such setting",
                expected="a setting that `argus doctor` lists",
                fix=f"{hint}Rename or unset it.",
            )
        )
        return
    try:
        values[name] = _convert(value, field)
        origins[name] = origin
    except ValueError as error:
        problems.append(
            ConfigError(
                where,
                got=repr(str(value)),
                expected=str(error),
                fix=f"Correct it, or unset it for the default of {field.default!r}.",
            )
        )


def _convert(value: Any, field: Any) -> Any:  # noqa: ANN401
    kind, least, most = type(field.default), field.metadata["least"], field.metadata["most"]
    if kind is bool:
        text = str(value).strip().lower()
        if text in {"1", "true", "yes", "on"}:
            return True
        if text in {"0", "false", "no", "off"}:
            return False
        msg = "1 or 0 (or true, false, yes, no, on, off)"
        raise ValueError(msg)
    if kind is str:
        return str(value)
    noun = "a whole number" if kind is int else "a number"
    limits = "" if least is None else f", {least:.12g} or more"
    limits += "" if most is None else f", at most {most:.12g}"
    unit = f" (unit {field.metadata['unit']})" if field.metadata["unit"] else ""
    try:
        number = kind(value)
        if not isinstance(value, str) and number != value:
            number = None  # a fraction, in a TOML file, where a whole number is meant
    except (OverflowError, TypeError, ValueError):
        number = None
    if (
        number is None
        or number != number  # noqa: PLR0124 - NaN
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        msg = f"{noun}{limits}{unit}"
        raise ValueError(msg)
    return number


def render_page() -> str:
    """The settings reference as Markdown."""
    lines = [
        "# Settings",
        "",
        "Made from `src/argus_otel/settings.py`. Order: environment, then the TOML file that",
        "`ARGUS_CONFIG` names, then the default. `argus doctor` prints each with its origin.",
        "",
        "| variable | type | unit | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for field in fields(Settings):
        kind = type(field.default).__name__
        lines.append(
            f"| `{PREFIX}{field.name.upper()}` | {kind} | {field.metadata['unit']} "
            f"| `{field.default!r}` | {field.metadata['meaning']} |"
        )
    lines += [
        "",
        "OpenTelemetry's own variables hold as its specification says: `OTEL_SDK_DISABLED`,",
        "`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_EXPORTER`,",
        "`OTEL_METRICS_EXPORTER`, `OTEL_METRIC_EXPORT_INTERVAL`, and `OTEL_EXPORTER_OTLP_*`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(render_page())
