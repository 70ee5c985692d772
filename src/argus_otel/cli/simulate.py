"""``argus simulate``: a training job with planted faults, into a store or through a Collector."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from argus_otel._runtime.errors import ArgusError, ConfigError
from argus_otel.encode import EncodedSpans, encode_resource, encode_span, encode_trace_requests
from argus_otel.export import Sender, Signal, targets_from_environment
from argus_otel.report.wording import counted
from argus_otel.semconv import names
from argus_otel.simulate.cluster import PRESETS, Cluster
from argus_otel.simulate.digests import digests_of
from argus_otel.simulate.faults import KINDS, Fault, parse_fault
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.store.bulk import write_run
from argus_otel.tables.schemas import RunSummary
from argus_otel.wire import ids, scopes
from argus_otel.wire.digest import encode_digests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from argus_otel.tables.schemas import RunTables
    from argus_otel.wire.digest import StepDigest

TRUTH_SCHEMA: Final = "argus.truth/1"
_ROWS_A_BLOCK: Final = 100_000
"""(Step, rank) pairs that are held at a time."""
_FLUSH_S: Final = 60.0
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
    seed: Annotated[int, typer.Option(help="Of all noise.")] = 0,
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

    The truth is written beside the tables, as truth.json.
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
    job = _changed(_preset(cluster), change or ())
    faults = [parse_fault(text, job) for text in fault or ()]
    name = RunName.of(run_id or f"{job.name}-{seed}", seed)
    maker = TableMaker(Model(job, faults, seed), name)
    block = max(1, _ROWS_A_BLOCK // job.ranks)
    blocks = _with_progress(maker.blocks(steps, block=block), steps, quiet=as_json)
    truth = _truth(job, faults, fault or (), steps=steps, seed=seed, name=name)
    if out is not None:
        summary = _summary(job, name)
        written = write_run(out, summary, blocks)
        folder = next(path for path in out.iterdir() if path.name.endswith(written.run[:8]))
        (folder / "truth.json").write_text(json.dumps(truth, indent=2) + "\n", "utf-8")
        said = f"{counted(written.steps, 'step')} of {counted(job.ranks, 'rank')} in {out}"
        then = f"argus detect --store {out}"
    else:
        assert otlp is not None  # noqa: S101 - one of the two is given
        sent = _send(otlp, name, blocks)
        said = f"{counted(sent, 'span')} of {counted(job.ranks, 'rank')} sent to {otlp}"
        then = f"argus detect --run {name.run_id} --store …"
    if as_json:
        typer.echo(json.dumps(truth))
    else:
        Console(highlight=False, soft_wrap=True).print(f"{said}. Next: {then}", markup=False)


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
                got=f"naming {key!r}, which no cluster has",
                expected=f"one of {', '.join(kinds)}",
                fix="Write --set name=value.",
            )
        try:
            kind = kinds[key]
            values[key] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
        except ValueError:
            raise ConfigError(
                f"--set {change}",
                got=f"giving {text!r}",
                expected=f"a value like {getattr(cluster, key)!r}",
                fix="Write --set name=value.",
            ) from None
    try:
        return replace(cluster, **values)
    except ValueError as error:
        raise ConfigError(
            "the changed cluster", got=f"impossible ({error})", expected="axes that fit",
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
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("simulating", total=steps)
        for block in blocks:
            yield block
            progress.update(task, completed=int(block.steps["ordinal"][-1].as_py()) + 1
                            if block.steps.num_rows else steps)  # fmt: skip


# -- over the wire -------------------------------------------------------------------------------


def _send(endpoint: str, name: RunName, blocks: Iterator[RunTables]) -> int:
    """Every rank's digests through the real encoder and sender; the number of spans sent."""
    targets = targets_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, [Signal.TRACES])
    with ExitStack() as stack:
        senders = [Sender(targets, first_post_jitter_s=0.0) for _ in range(_SENDERS)]
        for sender in senders:
            stack.callback(sender.close)
        return _send_blocks(endpoint, name, blocks, senders)


def _send_blocks(
    endpoint: str, name: RunName, blocks: Iterator[RunTables], senders: Sequence[Sender]
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
                senders[rank % _SENDERS].submit(Signal.TRACES, body, count)
                spans += count
        with ThreadPoolExecutor(_SENDERS) as threads:
            accepted = all(threads.map(lambda sender: sender.flush(_FLUSH_S), senders))
        if not accepted:
            drops = ", ".join(
                f"{cause}: {n}" for sender in senders for cause, n in sender.stats.drops.items()
            )
            raise ArgusError(
                f"the OTLP endpoint {endpoint}",
                got=f"not taking the run ({drops or 'no answer in time'})",
                expected="an OTLP/HTTP receiver",
                fix="Check the address (the HTTP port, usually 4318), or use --out.",
            )
    return spans


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
    console = Console()
    clusters = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("cluster", "ranks", "hosts", "dp", "pp", "tp", "ep", "sharding"):
        clusters.add_column(
            column, justify="left" if column in ("cluster", "sharding") else "right"
        )
    for name, c in PRESETS.items():
        numbers = (c.ranks, c.hosts, c.dp, c.pp, c.tp, c.ep)
        clusters.add_row(name, *map(str, numbers), c.sharding)
    console.print(clusters)
    console.print()
    kinds = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("fault", "what happens", "takes (default)", "cause to find"):
        kinds.add_column(column)
    for name, kind in KINDS.items():
        takes = {**kind.sizes, **{key: text or "…" for key, text in kind.texts.items()}}
        kinds.add_row(
            name, kind.meaning.replace("`", ""),
            " ".join(f"{key}={value:g}" if isinstance(value, float | int) else f"{key}={value}"
                     for key, value in takes.items()),
            kind.cause,
        )  # fmt: skip
    console.print(kinds)
    console.print(
        "\nPlace: rank=3, ranks=0-7+12, host=2, stage=1, fraction=0.25, or axis=edp,group=7. "
        "Time: from=40, to=60, every=5.",
        markup=False,
        highlight=False,
    )
