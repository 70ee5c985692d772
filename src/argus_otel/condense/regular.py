"""Steps that are like others before them, as most of a loop's are.

The steps of a loop differ in their times and in little else: the same events come in the same
order, so the same phases, folds and spans come out of them. What takes most of the work in the
general way (``condense_step``, ``Timeline``, ``make_digest``) is to find that out again. Here it is
found out once. A step that has come twice is taken as a *model*: for each time and count that the
general way has told about it, the place is noted where it lies among the step's events. Later
steps like it are then condensed together, as columns, for a third of the CPU time.

That is right wherever the general way would decide as it did for the model. It decides by the
numbers that ``_Kind.fixed`` names, by comparing times with one another, and by whether a gap
between two passes is long enough to be a phase. So a step follows a model if the first are equal,
if all its times are in the model's order with no two alike, and if its gaps are long where the
model's are. The general way is taken for all others: where garbage was collected, something was
compiled or an exception raised, where a callback told the end of an operation, where a reading is
missing that the model has, where passes lie within one another, where there are more than
``CHUNK`` events, and for a step that is kept. Where asynchronous work overlaps with what the host
does, so that the order of its times varies from step to step, few steps have the order of a model.

Shape legend: N = steps; W = words of a step's events; P = phases; C = collectives; K = spans of
the timeline.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.condense.operations import folded
from argus_otel.condense.steps import CHUNK, LEAST_GAP_NS, no_pause
from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.codes import PHASES
from argus_otel.wire.digest import VERSION, ChartedNumbers, RepeatedColumns
from argus_otel.wire.packed import MAX_ATTRIBUTE_CHARACTERS
from argus_otel.wire.spans import ShapedSpan, SpanShape, StepRows, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.condense.steps import StepRecord
    from argus_otel.wire.digest import StepDigest
    from argus_otel.wire.events import Events

    Words = NDArray[np.int64]
    Places = NDArray[np.intp]
    Part = tuple[int, int, int]
    """Of a duration: first and last place, and whether it is added (1) or subtracted (-1)."""

LEAST_STEPS: Final = 4
"""Fewer at once go the general way: a numpy call costs what twenty events do, and a loop that has
so few steps a second has time for them."""

_MAX_KINDS: Final = 16
_MAX_MODELS: Final = 4
"""Of a kind; where a gap is now long enough for a phase and now is not, there are two."""
_MAX_SEEN: Final = 2 * _MAX_MODELS
"""Steps of a kind that are remembered until they come again."""

_NUMBERS_AT_ONCE: Final = 1024
"""Times that are packed between two pauses: a tenth of a millisecond."""
_STEP_AS_NUMBERS: Final = 64
"""What else is packed of each step takes as long as so many."""

_ORDINARY: Final = bytes(
    (
        events.COLLECTIVE, events.WAIT, events.DATA, events.FORWARD, events.BACKWARD,
        events.OPTIMIZER, events.PHASE, events.WORK, events.STEP_END,
    )
)  # fmt: skip
_NOT_A_PHASE: Final = events.NESTED | events.NO_GRAD

# Words of an event.
_T0, _T1, _A, _B, _C, _D = range(2, 8)

# The number and the kind of a step's first event are no longer needed and make room for:
_BEFORE: Final = 0
"""The end of the step before."""
_NO_COUNT: Final = 1
"""A zero, for groups that have only point-to-point operations."""
_SPARE: Final = events.WORDS
"""The number of a second event: what is the same for all steps of a batch."""


@dataclass(slots=True)
class RegularSteps:
    """Some steps that follow one model; all arrays are of shape [N], in nanoseconds."""

    model: Model
    words: Words
    """Shape [N, W]."""
    texts: list[tuple[bytes, bytes]]
    """Packed phases and collectives of each."""

    def begins_and_ends(self) -> list[list[int]]:
        """Of each step, on the events' clock."""
        return self.words.take(self.model.times[:2], axis=1).tolist()  # type: ignore[no-any-return]

    def only(self, rows: Sequence[int]) -> RegularSteps:
        """Some of them."""
        if len(rows) == len(self.words):
            return self
        some = list(rows)
        return RegularSteps(self.model, self.words[some], [self.texts[row] for row in some])

    def spans(
        self,
        trace_ids: Sequence[bytes],
        step_ids: Sequence[bytes],
        *,
        rank: int,
        self_cpu_s: float,
        memory_bytes: int | None,
        wall_offset_ns: int,
        pause: Callable[[], None],
    ) -> tuple[StepRows, list[ChartedNumbers], float]:
        """What the general way makes of steps that are not kept.

        Args:
            trace_ids: Of each step.
            step_ids: Of each step, the rank's own span.
            rank: Whose steps they are.
            self_cpu_s: Argus's own CPU time, of each.
            memory_bytes: The process's size, if it is known.
            wall_offset_ns: Unix time minus the events' clock.
            pause: Gives the GIL away.

        Returns:
            Their spans, what metrics want of each, and the seconds that all have waited.
        """
        model, words = self.model, self.words
        seconds = np.maximum(words.take(model.readings, axis=1) @ model.sums, 0) * 1e-9
        seconds[:, _SELF_CPU] = self_cpu_s
        for column, places in model.works.items():
            amounts = words.take(places, axis=1).astype(np.float64)
            # One by one, and so rounded as by the general way; no sum of numpy's is.
            seconds[:, column] = np.add.accumulate(amounts, axis=1)[:, -1]
        if memory_bytes is not None:
            words[:, _SPARE] = memory_bytes
        shape = model.shapes[memory_bytes is not None]
        ints = [*model.ints, *[_SPARE] * (memory_bytes is not None), *model.ints_below]
        pause()
        root_ids = [ids.span_id(trace_id, ids.ROOT, 0) for trace_id in trace_ids]
        pause()
        ids_below = [
            ids.span_ids(trace_id, ids.TIMELINE, rank, len(shape.below)) for trace_id in trace_ids
        ]
        pause()
        rows = StepRows(
            shape=shape,
            trace_ids=trace_ids,
            own_ids=step_ids,
            root_ids=root_ids,
            ids_below=ids_below,
            times_ns=words.take(model.times, axis=1) + wall_offset_ns,
            ints=words.take(ints, axis=1),
            doubles=seconds[:, :-1],
            texts=self.texts,
        )
        pause()
        charted = [
            ChartedNumbers(
                row[_DURATION], row[_BUSY] if model.busy_is_known else None, row[_DATA_WAIT], 0.0,
                None if model.tokens is None else row[model.tokens], self_cpu_s,
            )
            for row in seconds.tolist()
        ]  # fmt: skip
        return rows, charted, float(seconds[:, -1].sum())


class Models:
    """The models of one identity's steps.

    Args:
        rank: Whose steps they are.
        root: Shape of the steps' own spans, if it is this rank that writes them.
    """

    def __init__(self, rank: int, root: SpanShape | None) -> None:
        self._rank = rank
        self._root = root
        self._is_worth_it = True
        """Whether as many steps have come as a model is used for; to learn takes time, too."""
        self._kinds: dict[bytes, _Kind | None] = {}
        """None where they have come once, which may be all: a kind is dear to make."""

    def match(
        self,
        steps: Sequence[tuple[Events, int]],
        ends: Mapping[int, int],
        pause: Callable[[], None],
    ) -> list[tuple[RegularSteps, list[int]]]:
        """Those of some steps that follow models, and for each which of them it is.

        Args:
            steps: Of each its events, of which the last is its STEP_END, and the end of the step
                before.
            ends: When operations ended of which that is known, by ``events.operation_key``.
            pause: Gives the GIL away.

        Cost:
            Background thread. 100 µs, and 7 µs a step with 20 collectives.
        """
        self._is_worth_it = len(steps) >= LEAST_STEPS
        by_kind: dict[bytes, list[int]] = {}
        for place, (batch, _) in enumerate(steps):
            by_kind.setdefault(batch.kinds, []).append(place)
        found = []
        for kinds, places in by_kind.items():
            kind = self._kinds.get(kinds)
            if kind is None or not kind.models or len(places) < LEAST_STEPS:
                continue
            some = [steps[place] for place in places]
            words = kind.words(b"".join([batch.raw for batch, _ in some]), [at for _, at in some])
            free = np.ones(len(places), dtype=bool)
            pause()
            if ends:
                free &= ~kind.have_ended(words, ends)
                pause()
            for model in kind.models:
                fits = free & model.fits(words, pause)
                rows = np.flatnonzero(fits).tolist()
                pause()
                if len(rows) < LEAST_STEPS:
                    continue
                free &= ~fits
                regular = model.follow(words if len(rows) == len(words) else words[rows], pause)
                short = [n for n, texts in enumerate(regular.texts) if _is_short(texts)]
                found.append((regular.only(short), [places[rows[n]] for n in short]))
        return found

    def learn(
        self,
        batch: Events,
        previous_end_ns: int,
        record: StepRecord,
        digest: StepDigest,
        timeline: Sequence[ShapedSpan],
        step_id: bytes,
        wall_offset_ns: int,
    ) -> None:
        """See what the general way has made of a step, and if it has come before, make a model.

        Args:
            batch: The step's events.
            previous_end_ns: The end of the step before.
            record: Its numbers.
            digest: Its digest.
            timeline: Its spans.
            step_id: The span that they hang below.
            wall_offset_ns: Unix time minus the events' clock.
        """
        kinds = batch.kinds
        if not self._is_worth_it or len(kinds) > CHUNK or kinds.translate(None, _ORDINARY):
            return
        if record.kernels or record.flags & events.ENDS_CAPTURED:
            return
        if kinds not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[kinds] = None
            return
        kind = self._kinds[kinds]
        if kind is None:
            kind = self._kinds[kinds] = _Kind(kinds)
        words = kind.words(batch.raw, [previous_end_ns])
        overs = kind.ends_by_waits(words, record)
        if overs is None:
            return
        if not any(model.fits(words, no_pause)[0] for model in kind.models) and kind.is_seen_again(
            words
        ):
            model = Model.of(
                kind,
                words,
                record,
                overs,
                digest,
                timeline,
                step_id,
                wall_offset_ns,
                self._own_span,
                self._root,
            )
            if model is not None:
                kind.models.appendleft(model)
                kind.forget()

    def _own_span(self, digest: StepDigest, *, with_memory: bool) -> SpanShape:
        """What the digests of steps like this one have in common; see ``wire.digest``."""
        ints = [names.ARGUS_STEP_ORDINAL]
        ints += [names.DL_ITERATION] * (digest.iteration is not None)
        ints += [names.ARGUS_MEMORY_RSS] * with_memory
        doubles = list(_DOUBLES)
        doubles += [names.ARGUS_STEP_BUSY] * (digest.busy_s is not None)
        doubles += [names.ARGUS_STEP_CPU] * (digest.cpu_s is not None)
        doubles += [names.ARGUS_STEP_RUN_DELAY] * (digest.run_delay_s is not None)
        doubles += [names.ARGUS_WORK_TOKENS] * (digest.tokens is not None)
        doubles += [names.ARGUS_WORK_SAMPLES] * (digest.samples is not None)
        doubles += [names.ARGUS_WORK_SUM_LEN2] * (digest.sum_len2 is not None)
        constants: dict[str, str | int | float | bool | tuple[str, ...]] = {
            names.ARGUS_DIGEST_VERSION: VERSION,
            names.DL_RANK: self._rank,
            names.ARGUS_STEP_END_RULE: digest.end_rule,
            names.ARGUS_GC_PAUSE: 0.0,
            names.ARGUS_GC_COUNT: 0,
        }
        if len(digest.phases.names) > len(PHASES):
            constants[names.ARGUS_PHASE_NAMES] = digest.phases.names[len(PHASES) :]
        return SpanShape(
            scopes.DIGEST, names.SPAN_RANK_STEP, constants, tuple(ints), tuple(doubles)
        )


class _Kind:
    """What follows from the kinds of a step's events: where its numbers lie. And the models."""

    def __init__(self, kinds: bytes) -> None:
        self.models: deque[Model] = deque(maxlen=_MAX_MODELS)
        self._seen: dict[bytes, bool] = {}
        """What was to be the same in the last few steps that had no model, and whether one has
        been tried. Several, because the steps of a loop may take turns."""
        self.collectives: list[int] = []
        """Where the event of each begins."""
        self.overs: dict[int, int] = {}
        """By number of the collective, where the end of the first wait after it lies, if that
        comes before the next collective; see ``steps.condense_step``."""
        self.passes: list[tuple[int, int]] = []
        """Kind, and where the event begins."""
        self.waits: list[int] = []
        self.works: list[int] = []
        phases: list[int] = []
        told = {
            events.COLLECTIVE: self.collectives,
            events.WAIT: self.waits,
            events.WORK: self.works,
            events.PHASE: phases,
        }
        for place, kind in enumerate(kinds[:-1]):
            at = place * events.WORDS
            if kind in told:
                told[kind].append(at)
                if kind == events.WAIT:
                    self.overs.setdefault(len(self.collectives) - 1, at + _T1)
            else:
                self.passes.append((kind, at))
        self.step_end = (len(kinds) - 1) * events.WORDS
        fixed = [at + word for at in self.collectives for word in (_A, _C)]
        fixed += [at + _C for kind, at in self.passes if kind != events.DATA]
        fixed += [at + _A for at in (*self.waits, *phases, *self.works)]
        self.fixed = _places([*fixed, self.step_end + _T1])
        """Operations and bytes of collectives, flags of passes, what ended the step, whose waits
        and phases these are, and what the amounts of work are of."""
        self.sides = [at + side for _, at in self.passes for side in (_T0, _T1)]
        """Begin and end of each pass."""
        arrivals = [at + _T0 for at in self.collectives]
        others = [at + side for at in (*self.waits, *phases) for side in (_T0, _T1)]
        self._times = [_BEFORE, *arrivals, *self.sides, *others, self.step_end + _T0]
        gaps = [
            (before + _T1, at + _T0)
            for (kind_before, before), (kind, at) in pairwise(self.passes)
            if kind == events.FORWARD or (kind_before, kind) == (events.FORWARD, events.BACKWARD)
        ]
        self.gap_begins = _places([begin for begin, _ in gaps])
        """Gaps that are phases if they are long: preparation of a batch, and the loss."""
        self.gap_ends = _places([end for _, end in gaps])
        self._operations = _places([at + _A for at in self.collectives])
        self._op_ids = _places([at + _D for at in self.collectives])

    def words(self, raw: bytes, previous_end_ns: Sequence[int]) -> Words:
        """The events of steps of this kind; shape [N, W]."""
        words = np.frombuffer(raw, dtype="<i8").reshape(len(previous_end_ns), -1).copy()
        words[:, _BEFORE] = previous_end_ns
        words[:, _NO_COUNT] = 0
        return words

    def long_gaps(self, words: Words) -> NDArray[np.bool_]:
        """Whether each gap between two passes that may be a phase is one."""
        long: NDArray[np.bool_] = (
            words.take(self.gap_ends, axis=1) - words.take(self.gap_begins, axis=1) > LEAST_GAP_NS
        )
        return long

    def is_seen_again(self, words: Words) -> bool:
        """Whether a step like this one has lately come without a model, so that one is worth it.

        It is tried once. Whether there can be one follows from what is compared here.
        """
        row = words[0]
        in_order = _places(self.in_order(row))
        if (np.diff(row[in_order]) == 0).any():
            return False  # two at the same time, by chance: no model, and no word on other steps
        now = b"".join(
            [part.tobytes() for part in (row[self.fixed], self.long_gaps(words), in_order)]
        )
        is_tried = self._seen.pop(now, None)
        if len(self._seen) >= _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[now] = is_tried is not None  # the last, now
        return is_tried is False

    def forget(self) -> None:
        """A model has come of what was seen last: it may be crowded out, and be wanted again."""
        self._seen.popitem()

    def in_order(self, row: Words) -> list[int]:
        """The places of all times of a step, earliest first."""
        return sorted(self._times, key=row.tolist().__getitem__)

    def ends_by_waits(self, words: Words, record: StepRecord) -> dict[int, int] | None:
        """By number of the collective, where its end lies, for those whose end is known.

        None where one is not the end of the wait that follows: then a callback has told it.
        """
        columns = record.collectives
        if columns is None or columns.end_ns is None:
            return {}
        row, is_async, overs = words[0].tolist(), columns.operations.is_async, self.overs
        known = [n for n, end_ns in enumerate(columns.end_ns) if end_ns != events.NONE]
        for n in known:
            if is_async[n] or n not in overs or row[overs[n]] != columns.end_ns[n]:
                return None
        return {n: overs[n] for n in known}

    def have_ended(self, words: Words, ends: Mapping[int, int]) -> NDArray[np.bool_]:
        """In which steps the end of an operation is known, for which models have no place."""
        groups = [
            [events.unpack_collective(packed)[0] for packed in row]
            for row in words[:, self._operations].tolist()
        ]
        op_ids = words[:, self._op_ids].tolist()
        keys = [map(events.operation_key, *of_step) for of_step in zip(groups, op_ids, strict=True)]
        return np.array([not ends.keys().isdisjoint(of_step) for of_step in keys])


@dataclass(slots=True, kw_only=True)
class Model:
    """Where to find what is told of a step: places among its words."""

    kind: _Kind
    fixed: Words
    """What must be the same."""
    long_gaps: NDArray[np.bool_]
    in_order: Places
    """All times, earliest first."""
    read_first: Places
    """Readings of counters, and of what may be missing."""
    read_last: Places
    """Those that are compared with them."""
    is_known: NDArray[np.bool_]
    """Whether the growth of each is."""
    groups: frozenset[int]
    """Those that it uses, as indices into the process's table."""
    readings: Places
    sums: Words
    """What is added (1) or subtracted (-1) of the readings, for each of the digest's doubles, for
    those of the spans below, and last for the time waited."""
    works: dict[int, Places]
    """By the double that they add up to, where the amounts of work lie."""
    tokens: int | None
    """Which of the doubles that is for tokens."""
    phases: int
    from_ns: Places
    """Begin of what the columns tell: start of each phase, duration of each, each arrival, and
    if any end is known, duration of each collective."""
    to_ns: Places
    """Its end."""
    plus: Words
    """What is added: 1 to durations of collectives where they are known."""
    busy_is_known: bool
    counts: Places
    columns: RepeatedColumns
    shapes: tuple[StepShape, StepShape]
    """Without the size of memory, and with it."""
    times: Places
    """Start and end of each span, those of the rank's own first."""
    ints: list[int]
    """Of the rank's own span, without the size of memory."""
    ints_below: list[int]

    @classmethod
    def of(
        cls,
        kind: _Kind,
        words: Words,
        record: StepRecord,
        overs: Mapping[int, int],
        digest: StepDigest,
        timeline: Sequence[ShapedSpan],
        step_id: bytes,
        wall_offset_ns: int,
        own_span: Callable[..., SpanShape],
        root: SpanShape | None,
    ) -> Model | None:
        """Find each time that the general way has told; None where one is not there."""
        row = words[0].tolist()
        in_order = kind.in_order(words[0])
        place_of = {row[place]: place for place in in_order}
        sides = set(kind.sides)
        if len(place_of) < len(in_order) or kind.sides != [n for n in in_order if n in sides]:
            return None  # two at the same time, or a pass within another
        if any(row[at + _C] & _NOT_A_PHASE for what, at in kind.passes if what != events.DATA):
            return None
        try:
            start, end = place_of[record.start_ns], place_of[record.end_ns]
            phases = [(place_of[begin], place_of[over]) for begin, over, _ in record.phases]
            tails = [(place_of[last], place_of[over]) for last, over in record.ddp_tails]
            times = [
                (place_of[span.start_ns - wall_offset_ns], place_of[span.end_ns - wall_offset_ns])
                for span in timeline
            ]
        except KeyError:
            return None
        arrivals = [at + _T0 for at in kind.collectives]
        if any(row[over] < row[arrivals[n]] for n, over in overs.items()):
            return None
        blocked: list[list[Part]] = []
        if record.collectives is not None:
            blocked = [
                [(arrivals[n], overs[n], 1) for n in mine if n in overs]
                for *_, mine in folded(record.collectives.operations, record.collectives.phase)
            ]
        below = _below(timeline, times, row, step_id, blocked)
        if below is None or start == _BEFORE or digest.phases.folded:
            return None
        shapes, parents, ints_below, doubles_below = below
        first_rows: list[int] = []
        groups: tuple[int, ...] = ()
        if record.collectives is not None:
            kinds = record.collectives.operations
            groups = kinds.groups
            first_rows = [*kinds.first_at, *[first for *_, first in kinds.channels]]
        # Waits for a batch that lie in the step.
        data = [
            at
            for what, at in kind.passes
            if what == events.DATA and row[at + _T0] >= record.start_ns
        ]
        read = [(kind.step_end + _B, kind.step_end + _B)]
        read += [(start - _T0 + _A, kind.step_end + _C), (start - _T0 + _B, kind.step_end + _D)]
        for at in data:
            read += [(at + _A, at + _C), (at + _B, at + _D)]
        read_first, read_last = (_places(side) for side in zip(*read))
        is_known = _are_known(words, read_first, read_last)[0]
        spent = [pair for pair, known in zip(read, is_known.tolist()) if known]
        waits = [
            (at + _T0, at + _T1, -1)
            for at in kind.waits
            if record.start_ns <= row[at + _T0] < row[at + _T1]
        ]
        waits += [(begin, over, -1) for begin, over in tails]
        durations = [
            [(start, end, 1)],
            [(_BEFORE, start, 1)],
            [(at + _T0, at + _T1, 1) for at in data],
            [],  # argus's own
        ]
        if digest.busy_s is not None:
            durations.append([(start, end, 1), *waits])
        for first in (1, 2):
            if is_known[first]:
                durations.append(
                    [
                        (*read[first], 1),
                        *[(*pair, -1) for pair in read[first + 2 :: 2] if pair in spent],
                    ]
                )
        works: dict[int, Places] = {}
        tokens = None
        for what, name in enumerate(events.WORK_KINDS):
            if name in record.work:
                if name == "tokens":
                    tokens = len(durations)
                mine = [at + _B for at in kind.works if row[at + _A] == what]
                works[len(durations)] = _places(mine)
                durations.append([])
        durations += doubles_below
        durations.append([(begin, over, 1) for begin, over, _ in waits])
        readings, sums = _product(durations)
        begins = [begin for begin, _ in phases]
        waited = list(enumerate(arrivals)) if overs else []
        return cls(
            kind=kind,
            fixed=words[0, kind.fixed],
            long_gaps=kind.long_gaps(words)[0],
            in_order=_places(in_order),
            read_first=read_first,
            read_last=read_last,
            is_known=is_known,
            groups=frozenset(groups),
            readings=readings,
            sums=sums,
            works=works,
            tokens=tokens,
            phases=len(phases),
            from_ns=_places(
                [*[start] * len(begins), *begins, *[start] * len(arrivals)]
                + [arrival for _, arrival in waited]
            ),
            to_ns=_places(
                [*begins, *[over for _, over in phases], *arrivals]
                + [overs.get(n, arrival) for n, arrival in waited]
            ),
            plus=np.array(
                [0] * (2 * len(begins) + len(arrivals)) + [int(n in overs) for n, _ in waited],
                dtype=np.int64,
            ),
            busy_is_known=digest.busy_s is not None,
            counts=_places([kind.collectives[n] + _B if n >= 0 else _NO_COUNT for n in first_rows]),
            columns=RepeatedColumns(digest.phases, digest.sync),
            shapes=(
                StepShape(own_span(digest, with_memory=False), _TEXTS, root, shapes, parents),
                StepShape(own_span(digest, with_memory=True), _TEXTS, root, shapes, parents),
            ),
            times=_places([place for pair in [(start, end), *times] for place in pair]),
            ints=[kind.step_end + _A, *[kind.step_end + _B] * (digest.iteration is not None)],
            ints_below=ints_below,
        )

    def fits(self, words: Words, pause: Callable[[], None]) -> NDArray[np.bool_]:
        """Which steps are like this one."""
        kind = self.kind
        fits: NDArray[np.bool_] = (words.take(kind.fixed, axis=1) == self.fixed).all(axis=1)
        pause()
        times_ns = words.take(self.in_order, axis=1)
        pause()
        fits &= (times_ns[:, 1:] > times_ns[:, :-1]).all(axis=1)
        pause()
        fits &= (kind.long_gaps(words) == self.long_gaps).all(axis=1)
        known = _are_known(words, self.read_first, self.read_last)
        fits &= (known == self.is_known).all(axis=1)
        return fits

    def follow(self, words: Words, pause: Callable[[], None]) -> RegularSteps:
        """Steps that fit."""
        n, pack = self.phases, self.columns.pack
        k = 2 * n + len(self.kind.collectives)
        counts = words.take(self.counts, axis=1)
        texts = []
        some = max(1, _NUMBERS_AT_ONCE // (_STEP_AS_NUMBERS + self.to_ns.size))
        for begin in range(0, len(words), some):
            pause()
            part = words[begin : begin + some]
            told_ns = part.take(self.to_ns, axis=1) - part.take(self.from_ns, axis=1)
            rounded_us = (told_ns + 500) // 1000 + self.plus
            texts += [
                pack(row[:n], row[n : 2 * n], row[2 * n : k], mine, row[k:])
                for row, mine in zip(
                    rounded_us.tolist(), counts[begin : begin + some].tolist(), strict=True
                )
            ]
        return RegularSteps(self, words, texts)


_TEXTS: Final = (names.ARGUS_DIGEST_PHASES, names.ARGUS_DIGEST_SYNC)
_DOUBLES: Final = (
    names.ARGUS_STEP_DURATION,
    names.ARGUS_STEP_BETWEEN,
    names.ARGUS_DATA_WAIT,
    names.ARGUS_SELF_CPU,
)
"""Those that every digest has; busy time comes next where it is known."""
_DURATION, _, _DATA_WAIT, _SELF_CPU, _BUSY = range(5)


def _product(durations: Sequence[Sequence[Part]]) -> tuple[Places, Words]:
    """Sums of differences of readings as a matrix, and the readings that it is for.

    Args:
        durations: Of each the first and the last place of the parts, and whether they are added
            (1) or subtracted (-1).
    """
    places = sorted({place for parts in durations for *pair, _ in parts for place in pair})
    at = {place: n for n, place in enumerate(places)}
    sums = np.zeros((len(places), len(durations)), dtype=np.int64)
    for column, parts in enumerate(durations):
        for first, last, sign in parts:
            sums[at[last], column] += sign
            sums[at[first], column] -= sign
    return _places(places), sums


def _below(
    timeline: Sequence[ShapedSpan],
    times: Sequence[tuple[int, int]],
    row: Sequence[int],
    top: bytes,
    blocked: Sequence[list[Part]],
) -> tuple[tuple[SpanShape, ...], tuple[int, ...], list[int], list[list[Part]]] | None:
    """Shapes and parents of the spans of a timeline, where their counts lie, and their doubles.

    Args:
        timeline: The spans.
        times: Where the start and the end of each lie.
        row: The words of the step.
        top: What they hang below.
        blocked: Of each fold of collectives, the times blocked, as of ``_product``.
    """
    number = {top: -1} | {span.span_id: n for n, span in enumerate(timeline)}
    shapes: list[SpanShape] = []
    ints: list[int] = []
    doubles: list[list[Part]] = []
    left = iter(blocked)
    for span, (start, _) in zip(timeline, times, strict=True):
        shape = span.shape
        if span.values:
            # Collectives: how many, their bytes, the first one's count, and the time blocked.
            *same, count, blocked_s = span.values
            parts = next(left, [])
            told_s = sum([row[over] - row[begin] for begin, over, _ in parts]) * 1e-9
            if len(same) != 2 or count != row[start - _T0 + _B] or blocked_s != told_s:
                return None
            constants = {**shape.constants, **dict(zip(shape.ints, same))}
            if parts:
                doubles.append(parts)
            else:
                constants[shape.doubles[0]] = 0.0
            shape = SpanShape(
                shape.scope, shape.name, constants, shape.ints[2:], shape.doubles if parts else ()
            )
            ints.append(start - _T0 + _B)
        shapes.append(shape)
    return tuple(shapes), tuple([number[span.parent_id] for span in timeline]), ints, doubles


def _is_short(texts: tuple[bytes, bytes]) -> bool:
    return max(map(len, texts)) <= MAX_ATTRIBUTE_CHARACTERS


def _are_known(words: Words, first: Places, last: Places) -> NDArray[np.bool_]:
    """Where a counter's growth is known; see ``steps.spent``."""
    read_first, read_last = words.take(first, axis=1), words.take(last, axis=1)
    known: NDArray[np.bool_] = read_last >= read_first
    known &= read_first != events.NONE
    known &= read_last != events.NONE
    return known


def _places(places: Sequence[int]) -> Places:
    return np.array(places, dtype=np.intp)
