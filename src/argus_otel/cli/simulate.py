"""``argus simulate``: a training job with planted faults, into a store or through a Collector."""

from __future__ import annotations

import json
import logging
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from argus_otel._runtime.ahead import one_ahead
from argus_otel._runtime.errors import ArgusError, ConfigError
from argus_otel.encode import EncodedSpans, encode_resource, encode_span, encode_trace_requests
from argus_otel.export import Sender, Signal, targets_from_environment
from argus_otel.report.wording import counted
from argus_otel.semconv import names
from argus_otel.simulate.cluster import PRESETS, Cluster
from argus_otel.simulate.digests import digests_of
from argus_otel.simulate.faults import FAULT_HELP, KINDS, Fault, parse_fault
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.store.bulk import write_run
from argus_otel.tables.schemas import RunSummary
from argus_otel.wire import ids, scopes
from argus_otel.wire.digest import encode_digests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from argus_otel.export import Target
    from argus_otel.tables.schemas import RunTables
    from argus_otel.wire.digest import StepDigest

TRUTH_SCHEMA: Final = "argus.truth/1"
_ROWS_A_BLOCK: Final = 100_000
"""(Step, rank) pairs that are held at a time."""
_FLUSH_S: Final = 60.0
_FIRST_POST_S: Final = 10.0
_SENDERS: Final = 16
"""Connections at once: a receiver answers when it has stored, and stores what came together at once."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(simulate)


def simulate(
    cluster: Annotated[str, typer.Option(help="A preset; --list shows them.")] = "ddp-8",
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="kind:key=value,… such as compute:rank=3,factor=1.6,from=40; may be repeated."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of all noise.")] = 0,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change the preset: noise=0.04, dp=16; may be repeated."),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Default: the cluster and the seed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a store into this folder.")] = None,
    otlp: Annotated[
        str | None,
        typer.Option(help="Send it as the ranks would, to this OTLP/HTTP endpoint."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the presets and the kinds of faults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a training job of 2 to 12,960 ranks, with faults of known place and size.

    The run ends about now. The truth is written beside the tables, as truth.json. A run of the same
    id and seed that is in the folder already is replaced.

    Exit codes: 0 done, 2 wrong usage, 5 the endpoint of --otlp did not take the run.
    """
    if show:
        _list(as_json=as_json)
        return
    if (out is None) == (otlp is None):
        raise ConfigError(
            "argus simulate",
            got="called with both --out and --otlp" if out else "called without --out or --otlp",
            expected="one of them",
            fix="For example: argus simulate --cluster ddp-8 --out run/ && argus detect --store run/",
        )
    targets = None if otlp is None else _targets(otlp)
    job = _changed(_preset(cluster), change or ())
    faults = [parse_fault(text, job) for text in fault or ()]
    _check_in_time(fault or (), faults, steps)
    start_ns = time.time_ns() - _duration_ns(job, steps, seed)
    name = RunName.of(run_id or f"{job.name}-{seed}", seed)
    if targets is not None:  # what was sent cannot be replaced: another run each time
        name = RunName.of(name.run_id, start_ns)
    maker = _table_maker(Model(job, faults, seed), name, start_ns)
    block = max(1, _ROWS_A_BLOCK // job.ranks)
    made = one_ahead(maker.blocks(steps, block=block))
    blocks = _with_progress(made, steps, quiet=as_json)
    truth = _truth(job, faults, fault or (), steps=steps, seed=seed, name=name)
    if targets is None:
        assert out is not None  # noqa: S101 - one of the two is given
        replaced = _folder_of(out, name) is not None
        written = write_run(out, _summary(job, name), blocks)
        folder = _folder_of(out, name)
        assert folder is not None  # noqa: S101 - it has just been written
        (folder / "truth.json").write_text(json.dumps(truth, indent=2) + "\n", "utf-8")
        said = f"{counted(written.steps, 'step')} of {counted(job.ranks, 'rank')} in {out}"
        if replaced:
            said += f" (replaced the run {name.run_id} that was there)"
        then = f"argus detect --store {shlex.quote(str(out))} --run {shlex.quote(name.run_id)}"
    else:
        url = targets[Signal.TRACES].url  # without a password
        sent = _send(url, targets, name, blocks)
        said = f"{counted(sent, 'span')} of {counted(job.ranks, 'rank')} sent to {url}"
        then = f"argus detect --run {shlex.quote(name.run_id)}"
        then += ", from the store that the endpoint feeds (--store)"
    if as_json:
        typer.echo(json.dumps(truth))
    else:
        Console(highlight=False, soft_wrap=True).print(f"{said}. Next: {then}", markup=False)


def _check_in_time(texts: Sequence[str], faults: Sequence[Fault], steps: int) -> None:
    """Refuse a fault that begins after the last step: the run would be a healthy one."""
    for text, fault in zip(texts, faults, strict=True):
        if fault.first >= steps:
            raise ConfigError(
                f"the fault {text!r}",
                got=f"never acting: it begins at step {fault.first}, and the run has steps "
                f"0 to {steps - 1}",
                expected=f"a from below {steps}",
                fix=f"Give --steps {fault.first + 40}, or an earlier from.\n{FAULT_HELP}",
            )


def _duration_ns(cluster: Cluster, steps: int, seed: int) -> int:
    """About how long the run takes without faults, from its first steps."""
    few = min(steps, cluster.warm_up_steps + 1)
    *_, last = Model(cluster, (), seed).steps(few)
    settled_s = float(last.end_R.max() - last.start_R.min())
    return round((float(last.end_R.max()) + settled_s * (steps - few)) * 1e9)


def _table_maker(model: Model, name: RunName, start_ns: int) -> TableMaker:
    try:
        return TableMaker(model, name, start_ns)
    except ValueError as error:
        raise ConfigError(
            "the cluster", got=f"too large in a step ({error})",
            expected="a step that one digest holds",
            fix="Take fewer: --set micro_batches=2, or --set buckets=4.",
        ) from error  # fmt: skip


def _folder_of(store: Path, name: RunName) -> Path | None:
    """Where a store has the run."""
    mine = name.nonce.hex()[:8]
    folders = store.iterdir() if store.is_dir() else ()
    return next((path for path in folders if path.name.endswith(mine)), None)


def _preset(name: str) -> Cluster:
    if name not in PRESETS:
        raise ConfigError(
            f"--cluster {name}",
            got="unknown",
            expected=f"one of {', '.join(PRESETS)}",
            fix="`argus simulate --list` says what they are; --set changes one.",
        )
    return PRESETS[name]


def _changed(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    kinds = {field.name: type(getattr(cluster, field.name)) for field in fields(cluster)}
    values: dict[str, Any] = {}
    for change in changes:
        key, _, text = change.partition("=")
        if key not in kinds:
            raise ConfigError(
                f"--set {change}",
                got="for something that no cluster has",
                expected=f"one of {', '.join(kinds)}",
                fix="Write --set name=value.",
            )
        try:
            kind = kinds[key]
            values[key] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
        except ValueError:
            raise ConfigError(
                f"--set {change}",
                got="not a number",
                expected=f"a value such as {getattr(cluster, key)!r}",
                fix="Write --set name=value.",
            ) from None
    try:
        return replace(cluster, **values)
    except ValueError as error:
        raise ConfigError(
            "the changed cluster", got=f"impossible ({error})", expected="values that fit",
            fix="Change the --set options.",
        ) from error  # fmt: skip


def _summary(cluster: Cluster, name: RunName) -> RunSummary:
    return RunSummary(
        run=name.nonce.hex(), run_id=name.run_id, attempt=0, role="trainer", service="simulated",
        world_size=cluster.ranks, ranks_seen=0, first_ns=0, last_ns=0, steps=0,
    )  # fmt: skip


def _truth(
    cluster: Cluster,
    faults: Sequence[Fault],
    texts: Sequence[str],
    *,
    steps: int,
    seed: int,
    name: RunName,
) -> dict[str, Any]:
    return {
        "schema": TRUTH_SCHEMA,
        "run": name.nonce.hex(),
        "run_id": name.run_id,
        "seed": seed,
        "steps": steps,
        "cluster": asdict(cluster),
        "faults": [
            {"fault": text, "cause": fault.cause, "ranks": list(fault.ranks),
             "first_step": fault.first, "until_step": fault.until, "every": fault.every}
            for text, fault in zip(texts, faults, strict=True)
        ],
    }  # fmt: skip


def _with_progress(blocks: Iterator[RunTables], steps: int, *, quiet: bool) -> Iterator[RunTables]:
    console = Console(stderr=True)
    # A disabled bar of older versions of rich still ends with an empty line; a quiet console prints
    # nothing.
    console.quiet = quiet or not console.is_terminal
    with Progress(console=console, transient=True, disable=console.quiet) as progress:
        task = progress.add_task("simulating", total=steps)
        for block in blocks:
            yield block
            progress.update(task, completed=int(block.steps["ordinal"][-1].as_py()) + 1
                            if block.steps.num_rows else steps)  # fmt: skip


# -- over the wire -------------------------------------------------------------------------------


class _NotSentError(ArgusError):
    """The endpoint did not take the run."""

    exit_code = 5


def _targets(endpoint: str) -> Mapping[Signal, Target]:
    try:
        return targets_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, [Signal.TRACES])
    except ConfigError as error:
        raise ConfigError(
            "--otlp",
            got=error.got,
            expected=error.expected,
            fix="For example: --otlp http://localhost:4318, a Collector's OTLP/HTTP address.",
        ) from error


def _send(
    url: str, targets: Mapping[Signal, Target], name: RunName, blocks: Iterator[RunTables]
) -> int:
    """Every rank's digests through the real encoder and sender; the number of spans sent."""
    log = logging.getLogger("argus_otel")
    was, log.disabled = log.disabled, True  # the error says it, once
    try:
        with ExitStack() as stack:
            senders = [Sender(targets, first_post_jitter_s=0.0) for _ in range(_SENDERS)]
            for sender in senders:
                stack.callback(sender.close)
            return _send_blocks(url, name, blocks, senders)
    finally:
        log.disabled = was


def _send_blocks(
    url: str, name: RunName, blocks: Iterator[RunTables], senders: Sequence[Sender]
) -> int:
    resources: dict[int, bytes] = {}
    spans = 0
    for block in blocks:
        if not resources:
            resources = {row["rank"]: _resource(row, name) for row in block.ranks.to_pylist()}
        by_rank: dict[int, list[StepDigest]] = {}
        for digest in digests_of(block):
            by_rank.setdefault(digest.rank, []).append(digest)
        for rank, digests in by_rank.items():
            batch = _encode(digests, rank, name)
            for body, count in encode_trace_requests(resources[rank], {scopes.DIGEST: [batch]}):
                sender = senders[rank % _SENDERS]
                sender.submit(Signal.TRACES, body, count)
                if not spans:
                    _try_once(url, sender)
                spans += count
        with ThreadPoolExecutor(_SENDERS) as threads:
            done = list(threads.map(lambda sender: sender.flush(_FLUSH_S), senders))
        lost = any(sender.stats.drops for sender in senders)
        if lost or not all(done):
            raise _not_sent(url, senders)
    return spans


def _try_once(url: str, sender: Sender) -> None:
    """Post the first request: where nobody listens, that is known before the rest is made."""
    sender.pump(_FIRST_POST_S)
    stats = sender.stats
    # An endpoint that answers and asks for patience (429, 503) gets the retries of the rest.
    if stats.drops or (stats.last_error and not stats.last_error.startswith("HTTP ")):
        raise _not_sent(url, [sender])


def _not_sent(url: str, senders: Sequence[Sender]) -> _NotSentError:
    drops: dict[str, int] = {}
    reasons = {sender.stats.last_error: None for sender in senders if sender.stats.last_error}
    for sender in senders:
        for cause, count in sender.stats.drops.items():
            drops[cause] = drops.get(cause, 0) + count
    said = [*reasons, *(f"{counted(count, 'span')} {cause}" for cause, count in drops.items())]
    return _NotSentError(
        f"--otlp, {url},",
        got=f"not taking the run ({'; '.join(said) or 'no answer in time'})",
        expected="an OTLP/HTTP receiver that answers",
        fix="Check the address (the HTTP port, usually 4318) and that it runs (`argus serve`, "
        "`argus stack up`), or write a folder with --out.",
    )


_AXES: Final = {
    "dp": names.DL_DATA_PARALLEL_RANK,
    "tp": names.DL_TENSOR_PARALLEL_RANK,
    "pp": names.DL_PIPELINE_PARALLEL_RANK,
    "ep": names.DL_EXPERT_PARALLEL_RANK,
    "cp": names.DL_CONTEXT_PARALLEL_RANK,
}


def _resource(row: Mapping[str, Any], name: RunName) -> bytes:
    known = {attribute: row[axis] for axis, attribute in _AXES.items() if row[axis] is not None}
    if row["gpu"] is not None:
        known["hw.id"] = row["gpu"]
    return encode_resource(
        {
            **known,
            "service.name": "simulated",
            "service.instance.id": f"{name.run_id}-rank{row['rank']}",
            "host.name": row["host"],
            "process.pid": row["pid"],
            names.ARGUS_RUN_ID: name.run_id,
            names.ARGUS_RUN_NONCE: name.nonce.hex(),
            names.ARGUS_ATTEMPT: 0,
            names.ARGUS_ROLE: "trainer",
            names.DL_RANK: row["rank"],
            names.DL_WORLD_SIZE: row["world_size"],
            names.DL_LOCAL_RANK: row["local_rank"],
        }
    )


def _encode(digests: Sequence[StepDigest], rank: int, name: RunName) -> EncodedSpans:
    encoded = []
    for digest, attributes in zip(digests, encode_digests(digests), strict=True):
        shard = ids.shard_of(rank)
        trace_id = ids.step_trace_id(name.nonce, 0, digest.ordinal, shard)
        root = ids.span_id(trace_id, ids.ROOT, 0)
        times: dict[str, Any] = {"start_ns": digest.start_ns, "end_ns": digest.end_ns}
        if rank == shard * ids.RANKS_PER_SHARD:
            encoded.append(
                encode_span(
                    name=names.SPAN_TRAIN_STEP, trace_id=trace_id, span_id=root,
                    parent_span_id=None, attributes={names.ARGUS_STEP_ORDINAL: digest.ordinal},
                    **times,
                )
            )  # fmt: skip
        encoded.append(
            encode_span(
                name=names.SPAN_RANK_STEP, trace_id=trace_id,
                span_id=ids.span_id(trace_id, ids.RANK_STEP, rank), parent_span_id=root,
                attributes=attributes, **times,
            )
        )  # fmt: skip
    return EncodedSpans(b"".join(encoded), len(encoded))


# -- what there is -------------------------------------------------------------------------------


def _list(*, as_json: bool) -> None:
    if as_json:
        document = {
            "clusters": {name: asdict(cluster) for name, cluster in PRESETS.items()},
            "faults": {
                name: {"cause": kind.cause, "meaning": kind.meaning,
                       "defaults": {**kind.sizes, **kind.texts}}
                for name, kind in KINDS.items()
            },
        }  # fmt: skip
        typer.echo(json.dumps(document))
        return
    clusters = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("cluster", "ranks", "hosts", "dp", "pp", "tp", "ep", "sharding"):
        clusters.add_column(
            column, justify="left" if column in ("cluster", "sharding") else "right"
        )
    for name, c in PRESETS.items():
        numbers = (c.ranks, c.hosts, c.dp, c.pp, c.tp, c.ep)
        clusters.add_row(name, *map(str, numbers), c.sharding)
    meanings = Table(box=None, header_style="bold", pad_edge=False)
    meanings.add_column("fault", no_wrap=True)
    meanings.add_column("what happens")
    taken = Table(box=None, header_style="bold", pad_edge=False)
    taken.add_column("fault", no_wrap=True)
    taken.add_column("takes (default)")
    taken.add_column("cause to find", no_wrap=True)
    for name, kind in KINDS.items():
        meanings.add_row(name, kind.meaning.replace("`", ""))
        takes = {**kind.sizes, **{key: text or "…" for key, text in kind.texts.items()}}
        said = (f"{key}={value:g}" if isinstance(value, float | int) else f"{key}={value}"
                for key, value in takes.items())  # fmt: skip
        taken.add_row(name, " ".join(said), kind.cause)
    console = Console()
    for table in (clusters, meanings, taken):
        _print_trimmed(console, table)
    console.print(
        "Place: rank=3, ranks=0-7+12, host=2, stage=1, fraction=0.25; axis=edp,group=7\n"
        "Time: from=40, to=60, every=5",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(FAULT_HELP.partition("\n")[0], markup=False, highlight=False, soft_wrap=True)


def _print_trimmed(console: Console, table: Table) -> None:
    """A table and an empty line, without the blanks that rich fills the last column with."""
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.out(line.rstrip(), highlight=False)
    console.print()
