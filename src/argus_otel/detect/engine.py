"""Runs every detector over the sliding windows of a run and puts together what they say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.frame import WARM_UP_STEPS, build_frame
from argus_otel.detect.run import run_of
from argus_otel.detect.tracks import follow, settle, suppress, with_cost
from argus_otel.detect.whatif import weigh, weigh_together
from argus_otel.detect.window import Window
from argus_otel.tables.findings import Abstention, Diagnosis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.detect.definition import Detector
    from argus_otel.detect.frame import Frame
    from argus_otel.detect.run import Run
    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunTables

PARTIAL: Final = "some_"
"""Prefix of abstention codes that concern a part of the ranks only."""

_SETTLED_STEPS: Final = 20
"""Below so many, a detector of runs that is silent has not judged anything: most faults need as many
to show, and a run of five steps is not known to be well."""


_WORKERS: Final = 2
"""Detectors that judge a large run side by side: NumPy leaves the interpreter's lock, and each more
holds its own intermediate arrays."""

_COMPLETED: Final = 10
"""Findings, the heaviest first, that are looked into more closely: each is a read of the store, which
takes a quarter of a second for 12,960 ranks."""

_ONE_THREAD: Final = 200_000
"""Up to so many digests one after another: arrays are too small for threads to gain anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the detectors say of a run, and what they had to go by."""

    diagnosis: Diagnosis
    frame: Frame
    judged: dict[str, int]
    """Windows that each detector could judge."""

    @property
    def all_abstained(self) -> bool:
        """Whether no detector could judge anything."""
        return not any(self.judged.values())


def diagnose(tables: RunTables, detectors: Sequence[Detector]) -> Verdict:
    """Say what is wrong with a run that is at hand in one piece; see ``diagnose_run``."""
    return diagnose_run(run_of(tables), detectors)


def diagnose_run(run: Run, detectors: Sequence[Detector]) -> Verdict:
    """Say what is wrong with a run.

    Args:
        run: One run (one attempt, one role), from ``run.RunBuilder``.
        detectors: See ``definition.load_detectors``.

    Returns:
        Findings by cost, heaviest first; a detector that fails abstains as ``detector_error``.

    Cost:
        Five seconds of CPU for 12,960 ranks and 100 steps, on two cores side by side
        (bench/detect_scale).
    """
    frame = build_frame(run)
    findings: list[Finding] = []
    abstentions: list[Abstention] = []
    judged: dict[str, int] = {}
    weighed: list[Finding] = []
    for detector, answer in zip(detectors, _ask(frame, detectors), strict=True):
        findings += answer.findings
        weighed += answer.weighed
        abstentions += answer.abstentions
        judged[detector.id] = answer.windows
    explains = {detector.id: detector.explains for detector in detectors}
    sure = {detector.id: detector.confidence for detector in detectors}
    said = [
        replace(finding, confidence=sure.get(finding.detector, {}).get(finding.severity))
        for finding in suppress(weigh_together(findings, weighed, frame), explains)
    ]
    return Verdict(
        diagnosis=Diagnosis(
            findings=tuple(_complete(said, run, detectors)), abstentions=tuple(abstentions)
        ),
        frame=frame,
        judged=judged,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one detector says."""

    findings: list[Finding]
    weighed: list[Finding]
    """The same by what their healing alone gains."""
    abstentions: list[Abstention]
    windows: int
    """That could be judged."""


def _ask(frame: Frame, detectors: Sequence[Detector]) -> list[_Answer]:
    """The answers of all detectors, in their order."""
    workers = _WORKERS if frame.whole.present_AR.size > _ONE_THREAD else 1
    # Those asked about every window take longest, and what they find is replayed: begun last, one of
    # them would keep one core busy while the other has nothing left to do.
    order = sorted(range(len(detectors)), key=lambda at: detectors[at].scope == "run")
    with ThreadPoolExecutor(workers, thread_name_prefix="argus-detect") as pool:
        answers = dict(zip(order, pool.map(lambda at: _answer(frame, detectors[at]), order),
                           strict=True))  # fmt: skip
    return [answers[at] for at in range(len(detectors))]


def _answer(frame: Frame, detector: Detector) -> _Answer:
    """Ask, and weigh at once: while other detectors are still asked."""
    findings, abstentions, windows = _judge(frame, detector)
    return _Answer(
        findings=findings,
        weighed=[weigh(finding, frame) for finding in findings],
        abstentions=abstentions,
        windows=windows,
    )


def _complete(
    findings: Sequence[Finding], run: Run, detectors: Sequence[Detector]
) -> list[Finding]:
    """Let detectors look closer at the heaviest of their findings."""
    looks = {detector.id: detector for detector in detectors if detector.complete is not None}
    named = frozenset(rank for finding in findings for rank in finding.ranks)
    done = list(findings)
    for place, finding in enumerate(findings[:_COMPLETED]):
        detector = looks.get(finding.detector)
        if detector is None or detector.complete is None:
            continue
        try:
            done[place] = detector.complete(finding, run, detector.params, named)
        except Exception as error:  # noqa: BLE001 - what was found holds without it
            missing = f"{type(error).__name__}: {error}"
            done[place] = replace(finding, evidence={**finding.evidence, "incomplete": missing})
    return done


def _judge(frame: Frame, detector: Detector) -> tuple[list[Finding], list[Abstention], int]:
    """Findings, abstentions, and the windows that could be judged."""
    reason = _cannot_start(frame, detector)
    if reason is not None:
        return [], [reason], 0
    judge = _whole if detector.scope == "run" else _slide
    return judge(frame, detector)


def _cannot_start(frame: Frame, detector: Detector) -> Abstention | None:
    """Why a detector has nothing to work on in the whole run, if so."""
    of_run = detector.scope == "run"
    settled = frame.steps_seen if of_run else frame.ordinals_S.size
    ordinals = frame.whole.ordinals_A if of_run else frame.ordinals_S
    steps = (int(ordinals[0]), int(ordinals[-1])) if settled else None
    seen = frame.ranks_R.size

    def because(code: str, missing: str) -> Abstention:
        return Abstention(detector=detector.id, code=code, steps=steps, missing=missing)

    stuck_at_once = of_run and not detector.least_steps and frame.whole.heartbeats.num_rows
    if frame.steps_seen == 0 and not stuck_at_once:
        return because("no_steps", "any step at all; the run has sent none")
    if settled < detector.least_steps and of_run:
        return because("too_few_steps", f"{detector.least_steps} steps; {settled} were seen")
    if settled < detector.least_steps:
        return because(
            "too_few_steps",
            f"{detector.least_steps} steps after the first {WARM_UP_STEPS} and without "
            f"compilation; there are {settled} of {frame.steps_seen} seen",
        )
    if seen < detector.ranks_present * frame.world_size:
        return because(
            "missing_ranks",
            f"data of at least {detector.ranks_present:.0%} of {frame.world_size} ranks; only {seen} sent any",
        )
    if frame.unaligned * 2 > settled * seen:
        return because("not_aligned", "a common step count over the ranks")
    for name in detector.needs:
        column = frame.whole.columns[name] if of_run else frame.column(name)
        if np.isnan(column).all():
            return because("missing_data", f"{name}, which no rank of this run could measure")
    if detector.needs_peers and not frame.peers.buckets:
        if frame.world_size == 1:
            missing = "a second rank; this run has one, and nobody to compare it with"
        elif frame.peers.source is None:
            missing = "topology, or collectives to tell which ranks do the same work"
        else:
            missing = "two ranks that do the same work (same stage, tensor and expert position)"
        return because("too_few_peers", missing)
    return None


def _whole(frame: Frame, detector: Detector) -> tuple[list[Finding], list[Abstention], int]:
    """Ask a detector of runs."""
    try:
        diagnosis = detector.detect(frame.whole, detector.params)
    except Exception as error:  # noqa: BLE001 - a detector may be anybody's code
        ordinals = frame.whole.ordinals_A
        steps = (int(ordinals[0]), int(ordinals[-1])) if ordinals.size else None
        return [], [_failed(steps, detector, error)], 0
    said = diagnosis.abstentions
    judged = frame.ordinals_S.size >= _SETTLED_STEPS
    judged &= all(abstention.code.startswith(PARTIAL) for abstention in said)
    findings = [with_cost(finding, frame) for finding in diagnosis.findings]
    return findings, list(said), int(judged or bool(findings))


def _slide(frame: Frame, detector: Detector) -> tuple[list[Finding], list[Abstention], int]:
    width = min(detector.window_steps, frame.ordinals_S.size)
    count = frame.ordinals_S.size - width + 1
    seen: list[tuple[int, Finding]] = []
    silent: dict[str, Abstention] = {}
    judged = 0
    for start in range(count):
        window = Window(frame=frame, start=start, stop=start + width)
        try:
            diagnosis = detector.detect(window, detector.params)
            seen += [(start, finding) for finding in diagnosis.findings]
            said = diagnosis.abstentions
        except Exception as error:  # noqa: BLE001 - a detector may be anybody's code
            steps = (int(window.ordinals_S[0]), int(window.ordinals_S[-1]))
            said = (_failed(steps, detector, error),)
        judged += all(abstention.code.startswith(PARTIAL) for abstention in said)
        for abstention in said:
            silent[abstention.code] = _longer(silent.get(abstention.code), abstention)
    tracks = follow(seen)
    findings = settle(tracks, frame, window_steps=width, last_window=count - 1)
    return findings, list(silent.values()), judged


def _failed(steps: tuple[int, int] | None, detector: Detector, error: Exception) -> Abstention:
    return Abstention(
        detector=detector.id,
        code="detector_error",
        steps=steps,
        missing=f"a detector that works: {type(error).__name__}: {error}",
    )


def _longer(before: Abstention | None, now: Abstention) -> Abstention:
    """One abstention for windows in a row, over all their steps."""
    if before is None or before.steps is None or now.steps is None:
        return now
    return Abstention(
        detector=now.detector,
        code=now.code,
        steps=(min(before.steps[0], now.steps[0]), max(before.steps[1], now.steps[1])),
        missing=now.missing,
    )
