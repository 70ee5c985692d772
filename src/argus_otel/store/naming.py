"""Which run a person means by a name; the same for every store."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Final

from argus_otel._runtime.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.tables.schemas import RunSummary

LATEST: Final = "latest"
_NEAREST: Final = 3


def newest_first(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Runs by their newest span; a restart wins over the attempt before it."""
    return sorted(runs, key=lambda run: (run.last_ns, run.attempt, run.run), reverse=True)


def resolve(name: str, runs: Sequence[RunSummary], *, store: str) -> RunSummary:
    """Find a run by ``latest``, run id, or the start of its nonce.

    Schedulers reuse run ids, and a restart keeps its own: of several runs with one id the one
    with the newest span is meant. Worlds that ran side by side under one id (roles of a
    reinforcement-learning job) are told apart by nonce only.

    Raises:
        StoreError: No runs at all, none of that name, or several that it could be.
    """
    ordered = newest_first(runs)
    if not ordered:
        raise StoreError(
            f"the store {store}",
            got="empty: no run has sent anything",
            expected="at least one step of one rank",
            fix="See that the job's OTEL_EXPORTER_OTLP_ENDPOINT leads here; `argus doctor` checks.",
        )
    if name == LATEST:
        return ordered[0]
    named = [run for run in ordered if run.run_id == name]
    if named:
        return _newest(name, named, store)
    start = name.lower()
    of_nonce = [
        run for run in ordered if re.fullmatch("[0-9a-f]+", start) and run.run.startswith(start)
    ]
    if len(of_nonce) == 1:
        return of_nonce[0]
    if of_nonce:
        raise _ambiguous(name, of_nonce, store, "start with it")
    known = sorted({run.run_id for run in runs} | {run.run for run in runs})
    near = difflib.get_close_matches(name, known, n=_NEAREST, cutoff=0.4)
    shown = near or [run.run_id for run in ordered[:_NEAREST]]
    raise StoreError(
        f"the run {name!r} in {store}",
        got="not known",
        expected="latest, a run id, or the start of a nonce",
        fix=f"{'Nearest' if near else 'Newest'}: {', '.join(shown)}. `argus runs` lists all.",
    )


def _newest(name: str, named: Sequence[RunSummary], store: str) -> RunSummary:
    newest = named[0]
    beside = [
        run
        for run in named
        if run.role != newest.role
        and run.first_ns <= newest.last_ns
        and newest.first_ns <= run.last_ns
    ]
    if beside:
        raise _ambiguous(name, [newest, *beside], store, "ran side by side")
    return newest


def _ambiguous(name: str, runs: Sequence[RunSummary], store: str, why: str) -> StoreError:
    listed = ", ".join(f"{run.run} ({run.run_id}, {run.role})" for run in runs[:_NEAREST])
    return StoreError(
        f"the run {name!r} in {store}",
        got=f"ambiguous: {len(runs)} runs {why}",
        expected="a name that one run has",
        fix=f"Give more of the nonce: {listed}.",
    )
