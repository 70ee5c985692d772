"""The laws of a synchronous step hold in every simulated one."""

from dataclasses import replace

import numpy as np
import pytest

from argus_otel._runtime.errors import ConfigError
from argus_otel.simulate.cluster import PRESETS, Cluster
from argus_otel.simulate.faults import KINDS, parse_fault
from argus_otel.simulate.model import Model

SMALL = [name for name, cluster in PRESETS.items() if cluster.ranks <= 64]


def steps_of(cluster, *faults, count=12, seed=3):
    planted = [parse_fault(fault, cluster) for fault in faults]
    return list(Model(cluster, planted, seed).steps(count))


def busy(step):
    return step.end_R - step.start_R - step.wait_R


@pytest.mark.parametrize("name", SMALL)
def test_nobody_ends_a_collective_before_its_last_member_arrives(name):
    """And all members end together."""
    cluster = PRESETS[name]
    model = Model(cluster, [parse_fault("compute:rank=1,factor=2", cluster)], 0)
    *_, step = model.steps(5)
    n = cluster.ranks // cluster.pp

    for stage, slots in enumerate(model.slots):
        mine = slice(stage * n, (stage + 1) * n)
        for k, slot in enumerate(slots):
            arrival, end = step.arrival_RK[mine, k], step.end_RK[mine, k]
            assert (end >= arrival).all()
            if slot.peer_stages is not None or slot.axis == "world":
                continue
            group = cluster.group_of(slot.axis)[mine]
            for g in np.unique(group):
                assert np.ptp(end[group == g]) == 0
                assert end[group == g].min() > arrival[group == g].max()


@pytest.mark.parametrize("name", SMALL)
def test_phases_and_between_make_up_the_time_that_passes(name):
    """No second is lost or counted twice."""
    for step in steps_of(PRESETS[name], count=4):
        total = step.phase_PR.sum(0)
        assert total == pytest.approx(step.end_R - step.start_R + step.between_R)
        assert (busy(step) > 0).all()


def test_a_fault_leaves_the_healthy_part_of_a_run_as_it_was():
    """The same seed draws the same noise with and without it."""
    healthy = steps_of(PRESETS["ddp-8"])
    faulty = steps_of(PRESETS["ddp-8"], "compute:rank=3,factor=2,from=6")

    for a, b in zip(healthy[:6], faulty[:6], strict=True):
        assert (a.end_R == b.end_R).all()
    others = np.arange(8) != 3
    last_a, last_b = healthy[-1], faulty[-1]
    assert busy(last_b)[others] == pytest.approx(busy(last_a)[others])
    assert busy(last_b)[3] / busy(last_a)[3] == pytest.approx(2, abs=0.05)


def test_everybody_waits_for_a_slow_rank_and_it_waits_least():
    """Which is why collective time accuses the wrong ones."""
    step = steps_of(PRESETS["ddp-64"], "compute:rank=17,factor=1.5")[-1]

    assert step.wait_R.argmin() == 17
    assert step.wait_R[17] < 0.5 * np.median(step.wait_R)


def test_a_slow_link_under_enough_compute_leaves_the_step_time_flat():
    """ARGUS's second case: only the transfers tell."""
    cluster = replace(PRESETS["ddp-64"], buckets=2, bucket_s=0.001, clip_gradients=False)
    healthy, slow = steps_of(cluster)[-1], steps_of(cluster, "link:host=1,factor=3")[-1]

    assert np.nanmedian(slow.end_RK[:, 0] - slow.arrival_RK[:, 0]) > 1.3 * np.nanmedian(
        healthy.end_RK[:, 0] - healthy.arrival_RK[:, 0]
    )
    assert (slow.end_R - slow.start_R).max() < 1.05 * (healthy.end_R - healthy.start_R).max()


def test_one_late_micro_batch_costs_every_stage():
    """ARGUS's third case: the bubble is larger than the delay of any one rank."""
    cluster = PRESETS["pipeline-32"]
    healthy = steps_of(cluster)[-1]
    late = steps_of(cluster, "micro_batch:rank=24,extra_s=0.2,index=3")[-1]

    extra_wait = (late.wait_R - healthy.wait_R).sum()
    assert extra_wait > 5 * 0.2
    assert late.wait_R[24] < late.wait_R[[0, 8, 16]].min()


def test_the_launch_ahead_swallows_a_short_pause_and_not_a_long_one():
    """A GPU with queued work does not notice its host collecting for 8 ms."""
    cluster = replace(PRESETS["fsdp-64"], noise=0.0, common_noise=0.0, transfer_noise=0.0)

    def step_s(*faults):
        step = steps_of(cluster, *faults)[-1]
        return (step.end_R - step.start_R).max()

    assert step_s("gc:rank=5,pause_s=0.008,every=2,from=1") == pytest.approx(step_s())
    assert step_s("gc:rank=5,pause_s=0.100,every=2,from=1") > step_s() + 0.08


def test_a_rank_that_never_arrives_stops_the_job_and_everybody_says_where_it_is():
    """The culprit has entered no collective; the others are in the same one."""
    steps = steps_of(PRESETS["ddp-8"], "hang:rank=6,from=4")

    assert [step.ordinal for step in steps] == [0, 1, 2, 3, 4]
    assert not steps[-1].reported_R.any()
    entered = {beat["rank"]: beat["slot"] for beat in steps[-1].heartbeats}
    assert entered[6] is None
    assert len({entered[rank] for rank in range(8) if rank != 6}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_does_something(kind):
    """A fault without effect would be scored as missed."""
    cluster = replace(PRESETS["moe-64"], launch_ahead_s=0.0)
    place = "" if KINDS[kind].everywhere else ":rank=9"
    healthy, faulty = steps_of(cluster), steps_of(cluster, kind + place)

    def told(steps):
        return [
            (
                step.end_R.tolist(), step.memory_bytes_R.tolist(), step.reported_R.tolist(),
                len(step.events), len(step.heartbeats), step.run_delay_R.tolist(),
            )
            for step in steps
        ]  # fmt: skip

    assert told(healthy) != told(faulty)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("computer:rank=1", "compute"),
        ("compute", "rank="),
        ("compute:rank=99", "0 to 7"),
        ("compute:rank=x", "a number"),
        ("compute:rank=1,speed=2", "factor"),
        ("link:host=9", "0 to 0"),
        ("stage:stage=4", "0 to 0"),
        ("compute:rank=1,factor=nan", "a number for factor"),
        ("compute:rank=1,factor=inf", "a number for factor"),
        ("compute:rank=1,factor=0", "more than 0"),
        ("input:extra_s=-0.1", "0 or more"),
        ("compute:rank=1,every=0", "1 or more for every"),
        ("compute:rank=1,from=1.5", "whole number"),
        ("compute:rank=1,from=-1", "whole number"),
        ("compute:rank=1,from=9,to=9", "to above from"),
        ("compute:rank=1,offset=2", "from"),
        ("compute:rank=1,kernel=mpl", "attention, gemm, elementwise"),
        ("compute:ranks=5-3", "lower rank first"),
        ("compute:ranks=0-99999999999", "0 to 7"),
        ("compute:fraction=2", "up to 1"),
        ("link:axis=pp", "edp"),
        ("link:axis=dp,group=4", "0 to 0"),
        ("micro_batch:rank=0,index=1", "from 0 to 0"),
        ("expert:rank=0,index=4", "an expert from 0 to 3"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_with_what_could_be(text, says):
    """Nobody reads the source to plant a fault."""
    with pytest.raises(ConfigError, match=says):
        parse_fault(text, PRESETS["ddp-8"])


def test_a_refused_fault_comes_with_an_example_and_the_way_to_all_of_them():
    """Whatever was wrong with it."""
    with pytest.raises(ConfigError, match="compute:rank=3,factor=1.6,from=40\n.*simulate --list"):
        parse_fault("nothing", PRESETS["ddp-8"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"noise": -1.0}, "noise is -1.0"),
        ({"forward_s": float("nan")}, "forward_s is nan"),
        ({"bucket_s": -0.1}, "bucket_s is -0.1"),
        ({"lost_rows": 1.5}, "share of 0 to 1"),
        ({"ranks_per_host": 0}, "at least 1"),
        ({"sharding": "fdsp"}, "not one of ddp, fsdp"),
        ({"dp": 200_001}, "200,001 ranks; at most 200,000 are simulated, because"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_the_reason(changes, says):
    """Before anything of its size is made."""
    with pytest.raises(ValueError, match=says):
        Cluster(**{"name": "x", "dp": 8, **changes})


def test_axes_that_do_not_fit_are_refused():
    """Experts divide the data axis; interleaving needs whole rounds."""
    with pytest.raises(ValueError, match="ep divides dp"):
        Cluster(name="x", dp=6, ep=4)
    with pytest.raises(ValueError, match="multiple of pp"):
        Cluster(name="x", dp=1, pp=4, chunks=2, micro_batches=6)


@pytest.mark.parametrize("name", ["ddp-8", "ddp-64"])
def test_an_attempt_between_two_restarts_begins_late_and_ends_ragged(name):
    """Hosts are dealt anew, and only some of them have told of the last step."""
    usual, restarted = PRESETS[name], replace(PRESETS[name], restart_s=20.0)

    steps = steps_of(restarted, count=6)
    told = steps[-1].reported_R

    assert steps[0].between_R == pytest.approx(steps_of(usual, count=1)[0].between_R + 20)
    assert all(step.reported_R.all() for step in steps[:-1])
    assert 0 < told.sum() < restarted.ranks
    assert np.bincount(restarted.host).tolist() == np.bincount(usual.host).tolist()
    if restarted.hosts > 1:
        assert restarted.host.tolist() != usual.host.tolist()
        of_host = [set(told[restarted.host == host].tolist()) for host in range(restarted.hosts)]
        assert all(len(alike) == 1 for alike in of_host)
