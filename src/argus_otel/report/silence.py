"""What was not judged, and why, in as few words as that takes: it is not the same as sound.

Some twenty detectors look at a run, and most runs lack what a few of them need. A person who was
woken reads the verdict; the rest is one short paragraph, and only about causes that a job like this
one can have: a plain data-parallel job on CPUs has no stages and no GPU clocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from argus_otel.report.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from argus_otel.tables.findings import Abstention

WHOLE_RUN: Final = ("no_steps", "missing_ranks", "not_aligned")
"""Codes of reasons that leave next to nothing of a run to be judged."""

_ONLY_WITH: Final = {
    "pipeline_imbalance": "stages",
    "expert_imbalance": "experts",
    "gpu_throttled": "gpu",
    "gpu_fault": "gpu",
    "allocator_thrash": "gpu",
    "slow_link": "peers of groups",
}
"""Detector → what a job must have for it to apply; see ``view.RunView.traits``."""

_COUNT_FIRST: Final = re.compile(r"(\d+) steps\b(.*)")
_COLUMN: Final = re.compile(r"\b(\w+)_(?:bytes|s)\b")
_FEW_NAMES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """Detectors that abstained for one reason."""

    detectors: tuple[str, ...]
    missing: str
    code: str
    steps: tuple[int, int] | None

    @property
    def names(self) -> str:
        """``slow link, comm regression``."""
        return ", ".join(spoken(name) for name in self.detectors)

    @property
    def names_or_count(self) -> str:
        """Their names, or of many how many they are."""
        many = len(self.detectors) > _FEW_NAMES
        return counted(len(self.detectors), "cause") if many else self.names


def spoken(name: str) -> str:
    """A detector or cause as people say it: ``GPU throttled``."""
    words = name.replace("_", " ")
    return re.sub(r"\b(gpu|cpu|gc|jit)\b", lambda match: match[1].upper(), words)


def without_verdict(abstentions: Sequence[Abstention], detectors: int) -> bool:
    """Whether most detectors say that too little of the run is there."""
    silent = {a.detector for a in abstentions if a.code in WHOLE_RUN}
    return bool(silent) and len(silent) * 2 >= detectors


def unjudged(
    abstentions: Sequence[Abstention], traits: Collection[str] | None = None
) -> list[Unjudged]:
    """Group abstentions by reason, the reason of most detectors first.

    Args:
        abstentions: Of all detectors.
        traits: What the job has; detectors that need something else are left out. None for all.
    """
    reasons: dict[str, list[Abstention]] = {}
    for abstention in abstentions:
        needs = _ONLY_WITH.get(abstention.detector)
        if traits is None or needs is None or needs in traits:
            # So many steps: one reason, however many each detector would like.
            alike = abstention.code == "too_few_steps" and traits is not None
            reasons.setdefault("" if alike else abstention.missing, []).append(abstention)
    found = [
        Unjudged(
            detectors=tuple(sorted({a.detector for a in some})),
            missing=min((a.missing for a in some), key=_steps_wanted),
            code=some[0].code,
            steps=some[0].steps,
        )
        for some in reasons.values()
    ]
    return sorted(found, key=lambda one: -len(one.detectors))


def _shortly(missing: str) -> str:
    """What is missing, without saying so twice: ``memory``."""
    return _COLUMN.sub(r"\1", missing.partition(", which no")[0]).replace("_", " ")


def _steps_wanted(missing: str) -> tuple[int, str]:
    match = _COUNT_FIRST.match(missing)
    return (int(match[1]) if match else 1 << 30, missing)


def paragraph(groups: Sequence[Unjudged], *, width: int, lines: int) -> str:
    """``Not judged: slow link (needs …); memory growth (needs …).`` in so many lines, or less of it.

    Args:
        groups: See ``unjudged``.
        width: Characters a line has.
        lines: How many there may be; reasons are left out where they do not fit, then names.
    """
    if not groups:
        return ""
    room = width * lines - lines * 8
    whole = "; ".join(f"{one.names} (needs {_shortly(one.missing)})" for one in groups)
    if len(whole) + 13 <= room:
        return f"Not judged: {whole}."
    names = ", ".join(one.names for one in groups)
    if len(names) + 28 <= room:
        return f"Not judged: {names} (-v says why)."
    causes = sum(len(one.detectors) for one in groups)
    return f"Not judged: {counted(causes, 'possible cause')} (-v says which and why)."
