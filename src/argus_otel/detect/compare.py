"""What became slower between two runs, or two stretches of one: where, by how much, how surely.

Both are cut into the same parts: the step, own work, input, garbage collection, what lies between
steps, each phase, each kind of collective (group, operation, phase) with its transfer and its wait
apart, and each kernel by name. A part is compared over all ranks or groups, and place by place: one slow rank of sixty-four moves
no median over ranks. The intervals come from resampling whole blocks of steps, because neighbouring
steps are alike.

Source:
    Künsch (1989), The Jackknife and the Bootstrap for General Stationary Observations: blocks.

Shape legend: A = steps of a run, S = settled steps compared, P = places (ranks, groups, pairs of
ranks), L = lanes of collectives, B = resamples.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow.compute as pc

from argus_otel.detect.api import join_numbers
from argus_otel.detect.frame import WARM_UP_STEPS, build_frame
from argus_otel.detect.kernel_times import kernel_seconds, ranks_to_read
from argus_otel.detect.statistics import median_over

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

SCHEMA: Final = "argus.compare/1"
THRESHOLD: Final = 0.05
"""Slower by so much, with the whole interval, is worth an exit code: 5 % is what detectors call
information (DESIGN, detection)."""
LEAST_STEPS: Final = 10
"""Settled steps on each side: with fewer, blocks of steps are no sample."""
CONFIDENCE: Final = 0.95
_WORTH: Final = 0.005
"""Of the step: what grew by less is not worth a line, however surely it grew."""
_RESAMPLES: Final = 1000
_PLACES: Final = 24
"""Places of one part that are looked at closely, those that grew most first."""

State = Literal["slower", "faster", "same", "unsure"]
Kind = Literal["step", "own", "transfer", "kernel", "wait", "phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run, or some steps of it."""

    label: str
    run: Run
    phases: Mapping[str, Floats] = field(default_factory=dict)
    """Name → seconds of the host [A, R], NaN unknown; see ``PhaseBuilder``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A time before and after, in seconds, and the ratio with its interval."""

    before_s: float
    after_s: float
    ratio: float
    """NaN where it took no time before."""
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank, a group or a pair of ranks that became slower than the others did."""

    name: str
    ranks: tuple[int, ...]
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One part of the step, compared."""

    part: str
    kind: Kind
    """``wait`` and ``phase`` hold what others cause; the other kinds do not."""
    state: State
    change: Change
    """Over all ranks or groups that both have."""
    places: tuple[Place, ...] = ()
    """Those that stand out, worst first."""
    more_places: int = 0

    @property
    def grew_s(self) -> float:
        """Seconds by which it grew, where it grew most."""
        changes = [place.change for place in self.places] or [self.change]
        return max(change.after_s - change.before_s for change in changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What became slower, and what could not be compared."""

    before: str
    after: str
    steps: tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]
    """Of each side: first and last step, and how many of them count."""
    threshold: float
    lines: tuple[Line, ...] = ()
    """The step first, then causes, then what they may cause, each by how much it grew."""
    missing: tuple[str, ...] = ()
    """Why nothing, or not all, was compared."""

    @property
    def slower(self) -> tuple[Line, ...]:
        """Lines that are slower beyond the threshold, with the whole interval."""
        return tuple(line for line in self.lines if line.state == "slower")


@dataclass(slots=True)
class PhaseBuilder:
    """Takes the steps table of a run in blocks and gives the time of each phase, by step and rank."""

    _blocks: list[tuple[Ints, Ints, dict[str, Floats]]] = field(default_factory=list)

    def add(self, steps: pa.Table) -> None:
        """Take some whole steps, with their ``phases``; there may be none."""
        if not steps.num_rows:
            return
        phases = steps["phases"].combine_chunks()
        rows = pc.list_parent_indices(phases).to_numpy()
        inside = pc.list_flatten(phases)
        names = inside.field("name").dictionary_encode()
        known = names.dictionary.to_pylist()
        code, host_s = names.indices.to_numpy(), inside.field("host_s").to_numpy()
        cell = rows * max(len(known), 1) + code
        shape = (steps.num_rows, max(len(known), 1))
        total = np.bincount(cell, weights=host_s, minlength=shape[0] * shape[1]).reshape(shape)
        total = total.astype(np.float64)  # NumPy counts in integers where no step has a phase
        there = np.bincount(cell, minlength=total.size).reshape(shape) > 0
        total[~there] = np.nan
        self._blocks.append(
            (
                steps["ordinal"].to_numpy(),
                steps["rank"].to_numpy().astype(np.int64),
                {name: total[:, at] for at, name in enumerate(known)},
            )
        )

    def build(self, run: Run) -> dict[str, Floats]:
        """Laid out as the run's columns are."""
        shape = (run.ordinals_A.size, run.ranks_R.size)
        found: dict[str, Floats] = {}
        for ordinal, rank, phases in self._blocks:
            at = (np.searchsorted(run.ordinals_A, ordinal), np.searchsorted(run.ranks_R, rank))
            for name, values in phases.items():
                found.setdefault(name, np.full(shape, np.nan))[at] = values
        return found


# -- what is compared ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One quantity of one side."""

    kind: Kind
    values_SP: Floats
    places: tuple[Hashable, ...]
    rare: bool = False
    """Whether it comes in some steps only: means are compared then, medians would be 0."""


def _parts(side: Side) -> dict[str, _Part]:
    frame = build_frame(side.run)
    ranks = tuple(side.run.ranks_R.tolist())
    columns = {
        "own work": ("own_work_s", False),
        "data wait": ("data_wait_s", False),
        "garbage collection": ("gc_s", True),
        "between steps": ("between_s", True),
    }
    found = {
        "step": _Part(kind="step", values_SP=frame.job_step_s[:, None], places=("job",)),
    }
    for name, (column, rare) in columns.items():
        values = frame.column(column)
        if not np.isnan(values).all():
            found[name] = _Part(kind="own", values_SP=values, places=ranks, rare=rare)
    for name, values in side.phases.items():
        if name not in ("between", "data.wait"):
            found[f"phase {name}"] = _Part(
                kind="phase", values_SP=values[frame.index_S], places=ranks
            )
    found.update(_collectives(side.run, frame.index_S))
    return found


def _collectives(run: Run, index_S: Ints) -> dict[str, _Part]:
    """Transfers and waits, by kind of collective: what each group spends in one step."""
    operations = run.operations
    if not operations.lanes or np.isnan(operations.transfer_AL[index_S]).all():
        return {}
    lanes_of: dict[str, dict[Hashable, list[int]]] = {}
    for lane in range(operations.lanes):
        group = int(operations.group_L[lane])
        place: Hashable
        if group >= 0:
            name, place = run.groups[group].description, run.groups[group].key
        else:
            ends = (int(operations.source_L[lane]), int(operations.target_L[lane]))
            if min(ends) < 0:
                continue
            name, place = "pairs of ranks", tuple(int(run.ranks_R[end]) for end in ends)
        phase = operations.phase_L[lane]
        part = f"{operations.op_L[lane]} of {name}" + (f" in {phase}" if phase else "")
        lanes_of.setdefault(part, {}).setdefault(place, []).append(lane)
    found: dict[str, _Part] = {}
    for part, by_place in lanes_of.items():
        order = np.concatenate([np.array(lanes) for lanes in by_place.values()])
        cuts = np.cumsum([0, *(len(lanes) for lanes in by_place.values())])[:-1]
        transfer = operations.transfer_AL[np.ix_(index_S, order)].astype(np.float64)
        longest = operations.longest_AL[np.ix_(index_S, order)].astype(np.float64)
        places = tuple(by_place)
        found[f"{part}: transfer"] = _Part(
            kind="transfer", values_SP=np.add.reduceat(transfer, cuts, axis=1), places=places
        )
        found[f"{part}: wait"] = _Part(
            kind="wait", values_SP=np.add.reduceat(longest - transfer, cuts, axis=1), places=places
        )
    return found


def _kernels(run: Run, lines: Sequence[Line]) -> dict[str, _Part]:
    """Each kernel by name, of ranks that stand out and of others: of thousands not all are read."""
    suspects = [
        rank
        for line in lines
        if line.kind in ("own", "phase")
        for place in line.places
        for rank in place.ranks
    ]
    ranks = ranks_to_read(run.ranks_R.tolist(), suspects)
    seconds = kernel_seconds(run, build_frame(run).index_S, ranks)
    return {
        f"kernel {name}": _Part(kind="kernel", values_SP=values, places=tuple(ranks))
        for name, values in seconds.items()
    }


def _one_sided(
    label: str, ours: Mapping[str, _Part], theirs: Mapping[str, _Part], least_s: float
) -> tuple[str, ...]:
    """Kernels that only one side has: another library, or a slow path taken."""
    usual = {part: _usual(ours[part].values_SP) for part in ours if part not in theirs}
    return tuple(
        f"{part} on both sides; only {label} has it ({took_s * 1e3:.3g} ms a step)"
        for part, took_s in sorted(usual.items(), key=lambda item: -item[1])
        if took_s >= least_s
    )


# -- comparing -----------------------------------------------------------------------------------


def compare(before: Side, after: Side, *, threshold: float = THRESHOLD) -> Comparison:
    """Say what became slower.

    Args:
        before: What to compare with.
        after: What is compared.
        threshold: Growth that counts, as a share: 0.05.

    Returns:
        Without lines, and with a reason, where too little is there or nothing is in common.
    """
    spans = (_span(before), _span(after))
    missing = [
        f"{LEAST_STEPS} steps of {side.label} after the first {WARM_UP_STEPS} and without "
        f"compilation; there {'is' if count == 1 else 'are'} {count}"
        for side, count in zip((before, after), (s[2] if s else 0 for s in spans), strict=True)
        if count < LEAST_STEPS
    ]
    about: dict[str, Any] = {
        "before": before.label,
        "after": after.label,
        "steps": spans,
        "threshold": threshold,
    }
    if missing:
        return Comparison(**about, missing=tuple(missing))
    ours, theirs = _parts(before), _parts(after)
    step_s = float(np.nanmedian(ours["step"].values_SP))
    if not np.isfinite(step_s):
        return Comparison(**about, missing=("step times that both sides could measure",))
    names = _Names(before.run, after.run)
    random = np.random.default_rng(0)
    lines = _lines(ours, theirs, names, random, step_s, threshold)
    of_before, of_after = _kernels(before.run, lines), _kernels(after.run, lines)
    lines += _lines(of_before, of_after, names, random, step_s, threshold)
    notes = _notes(before, after, ours, theirs)
    if of_before and of_after:
        notes += _one_sided(before.label, of_before, of_after, _WORTH * step_s)
        notes += _one_sided(after.label, of_after, of_before, _WORTH * step_s)
    return Comparison(**about, lines=tuple(sorted(lines, key=_order)), missing=notes)


def _span(side: Side) -> tuple[int, int, int] | None:
    ordinals = build_frame(side.run).ordinals_S
    return (int(ordinals[0]), int(ordinals[-1]), int(ordinals.size)) if ordinals.size else None


def _order(line: Line) -> tuple[int, float]:
    rank = {"step": 0, "own": 1, "transfer": 1, "kernel": 1, "phase": 2, "wait": 2}[line.kind]
    return rank, -line.grew_s


def _notes(
    before: Side, after: Side, ours: Mapping[str, _Part], theirs: Mapping[str, _Part]
) -> tuple[str, ...]:
    notes = []
    sizes = (before.run.world_size, after.run.world_size)
    if sizes[0] != sizes[1]:
        notes.append(f"the same number of ranks; there are {sizes[0]} and {sizes[1]}")
    tokens = [_usual(side.run.columns["tokens"]) for side in (before, after)]
    if all(tokens) and abs(tokens[1] / tokens[0] - 1) > 0.02:
        notes.append(
            f"the same work; tokens a rank and step are {tokens[0]:.4g} and {tokens[1]:.4g}"
        )
    kinds = [{part.kind for part in parts.values()} for parts in (ours, theirs)]
    if not all("transfer" in kind for kind in kinds):
        notes.append("ends of collectives on both sides: transfers and waits are not told apart")
    elif not any(ours[part].kind == "transfer" for part in ours if part in theirs):
        notes.append("a kind of collective that both sides have")
    if "own work" not in ours or "own work" not in theirs:
        notes.append("busy time of both sides: own work is not known")
    return tuple(notes)


def _usual(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else 0.0


def _lines(
    ours: Mapping[str, _Part], theirs: Mapping[str, _Part], names: _Names,
    random: np.random.Generator, step_s: float, threshold: float,
) -> list[Line]:  # fmt: skip
    """Of the parts that both sides have."""
    found = (
        _line(part, ours[part], theirs[part], names, random, step_s, threshold)
        for part in ours
        if part in theirs
    )
    return [line for line in found if line is not None]


def _line(
    part: str, ours: _Part, theirs: _Part, names: _Names, random: np.random.Generator,
    step_s: float, threshold: float,
) -> Line | None:  # fmt: skip
    index = {place: at for at, place in enumerate(theirs.places)}
    common = [(at, index[place]) for at, place in enumerate(ours.places) if place in index]
    whole = len(common) * 2 < max(len(ours.places), len(theirs.places))
    # Places that only one side has would shift the middle; where most differ, all are taken.
    before = ours.values_SP if whole else ours.values_SP[:, [a for a, _ in common]]
    after = theirs.values_SP if whole else theirs.values_SP[:, [b for _, b in common]]
    rare = ours.rare
    change = _change(_middle(before, rare), _middle(after, rare), rare, random)
    if change is None:
        return None
    least_s = 0.0 if ours.kind == "step" else _WORTH * step_s
    places: tuple[Place, ...] = ()
    more = 0
    if len(ours.places) > 1 and not whole:
        chosen = [ours.places[a] for a, _ in common]
        places, more = _outstanding(
            before, after, chosen, change, names, random,
            least_s=least_s, threshold=threshold, rare=rare, kind=ours.kind,
        )  # fmt: skip
    state = _state(change, threshold, least_s, step_s)
    if places:
        state = "slower"
    return Line(
        part=part, kind=ours.kind, state=state, change=change, places=places, more_places=more
    )


def _middle(values_SP: Floats, rare: bool) -> Floats:
    """One value a step: the median over places, or their mean; steps without any are left out."""
    if rare:
        known = ~np.isnan(values_SP)
        count = np.count_nonzero(known, axis=1)
        mean: Floats = np.where(known, values_SP, 0.0).sum(axis=1) / np.maximum(count, 1)
        middle: Floats = mean[count > 0]
        return middle
    series = median_over(values_SP, axis=1)
    return series[~np.isnan(series)]


def _change(
    before: Floats, after: Floats, rare: bool, random: np.random.Generator
) -> Change | None:
    """Ratio with the percentile interval of its resamples."""
    if before.size < LEAST_STEPS or after.size < LEAST_STEPS:
        return None
    middle = np.mean if rare else np.median
    a_B, b_B = (_resampled(series, rare, random) for series in (before, after))
    a, b = float(middle(before)), float(middle(after))
    tail = (1 - CONFIDENCE) / 2
    if a <= 0 or (a_B <= 0).any():
        return Change(before_s=a, after_s=b, ratio=b / a if a > 0 else np.nan,
                      low=np.nan, high=np.nan)  # fmt: skip
    low, high = np.quantile(b_B / a_B, [tail, 1 - tail])
    return Change(before_s=a, after_s=b, ratio=b / a, low=float(low), high=float(high))


def _resampled(series: Floats, rare: bool, random: np.random.Generator) -> Floats:
    """Medians (means where rare) of resamples made of blocks of consecutive steps [B]."""
    size = series.size
    long = int(np.clip(size // 5, 2, 10))
    count = -(-size // long)
    starts = random.integers(0, size - long + 1, (_RESAMPLES, count))
    at = (starts[:, :, None] + np.arange(long)).reshape(_RESAMPLES, -1)[:, :size]
    values = series[at]
    found: Floats = values.mean(axis=1) if rare else np.median(values, axis=1)
    return found


def _state(change: Change, threshold: float, least_s: float, step_s: float) -> State:
    grew_s = change.after_s - change.before_s
    if abs(grew_s) < least_s:
        return "same"
    if np.isnan(change.low):
        # It took no time before: what it takes now is held against the step.
        return "slower" if grew_s > threshold * step_s else "unsure"
    if change.low > 1 + threshold:
        return "slower"
    if change.high < 1 / (1 + threshold):
        return "faster"
    within = change.low >= 1 / (1 + threshold) and change.high <= 1 + threshold
    return "same" if within else "unsure"


def _outstanding(
    before_SP: Floats, after_SP: Floats, places: Sequence[Hashable], whole: Change, names: _Names,
    random: np.random.Generator, *, least_s: float, threshold: float, rare: bool, kind: str,
) -> tuple[tuple[Place, ...], int]:  # fmt: skip
    """Places that became slower, and more so than the middle one did.

    The interval of a place is as much wider as there are places to choose from (Bonferroni).
    """
    if rare:
        a_P, b_P = (np.nan_to_num(values).mean(axis=0) for values in (before_SP, after_SP))
    else:
        a_P, b_P = (median_over(values, axis=0) for values in (before_SP, after_SP))
    usual = whole.ratio if np.isfinite(whole.ratio) else 1.0
    bar = max(1 + threshold, usual * (1 + threshold))
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.flatnonzero((b_P > bar * a_P) & (b_P - a_P >= least_s) & (a_P > 0))
    order = over[np.argsort(-(b_P - a_P)[over], kind="stable")]
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / len(places))
    found = []
    for at in order[:_PLACES].tolist():
        series = [values[:, at][~np.isnan(values[:, at])] for values in (before_SP, after_SP)]
        if min(part.size for part in series) < LEAST_STEPS:
            continue
        a_B, b_B = (np.maximum(_resampled(part, rare, random), 1e-9) for part in series)
        centre, spread = float(np.log(b_P[at] / a_P[at])), float(np.std(np.log(b_B / a_B)))
        change = Change(
            before_s=float(a_P[at]), after_s=float(b_P[at]), ratio=float(np.exp(centre)),
            low=float(np.exp(centre - z * spread)), high=float(np.exp(centre + z * spread)),
        )  # fmt: skip
        if change.low > bar:
            name, ranks = names.of(kind, places[at])
            found.append(Place(name=name, ranks=ranks, change=change))
    return tuple(found), max(order.size - _PLACES, 0) if len(found) == _PLACES else 0


class _Names:
    """What places are called."""

    def __init__(self, *runs: Run) -> None:
        self._groups = {
            group.key: (group.description, tuple(run.ranks_R[group.members].tolist()))
            for run in runs
            for group in run.groups
        }

    def of(self, kind: str, place: Hashable) -> tuple[str, tuple[int, ...]]:
        """Name and ranks of a place."""
        if isinstance(place, tuple):
            return f"rank {place[0]} to {place[1]}", tuple(int(rank) for rank in place)
        if kind in ("transfer", "wait") and place in self._groups:
            description, ranks = self._groups[place]
            return f"{description} ({join_numbers(ranks)})", ranks
        return f"rank {place}", (int(str(place)),)


# -- for programs --------------------------------------------------------------------------------


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The JSON document that ``argus compare --json`` prints; null where a number is not known."""

    def of(change: Change) -> dict[str, float | None]:
        values = {
            "before_s": change.before_s,
            "after_s": change.after_s,
            "ratio": change.ratio,
            "low": change.low,
            "high": change.high,
        }
        return {k: round(v, 9) if np.isfinite(v) else None for k, v in values.items()}

    def side(label: str, span: tuple[int, int, int] | None) -> dict[str, Any]:
        first, last, count = span or (None, None, 0)
        return {"run": label, "first_step": first, "last_step": last, "steps": count}

    return {
        "schema": SCHEMA,
        "before": side(comparison.before, comparison.steps[0]),
        "after": side(comparison.after, comparison.steps[1]),
        "threshold": comparison.threshold,
        "confidence": CONFIDENCE,
        "slower": [line.part for line in comparison.slower],
        "parts": [
            {
                "part": line.part,
                "kind": line.kind,
                "state": line.state,
                **of(line.change),
                "places": [
                    {"name": place.name, "ranks": list(place.ranks), **of(place.change)}
                    for place in line.places
                ],
                "more_places": line.more_places,
            }
            for line in comparison.lines
        ],
        "missing": list(comparison.missing),
    }
