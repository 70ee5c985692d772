"""What chance makes of peers is worked out for those who are asked about, whoever else is."""

import numpy as np
import pytest

from argus_otel.detect.frame import build_frame
from argus_otel.detect.reference import compare
from argus_otel.detect.run import run_of
from argus_otel.detect.window import Window
from argus_otel.testing.cases import build_run


@pytest.mark.parametrize("cluster", ["ddp-2", "pipeline-32", "moe-64"])
def test_bars_do_not_depend_on_who_is_asked_about_first(cluster):
    """One stage is noisier than the others, so that a bar of another group would show."""
    simulate = {"cluster": cluster, "steps": 45, "seed": 3, "faults": ["compute:rank=1,factor=1.3"]}
    run = run_of(build_run({"simulate": simulate}))
    run.columns["busy_s"][:, -2:] *= np.random.default_rng(1).lognormal(0, 0.2, (45, 2))
    frame = build_frame(run)
    window = Window(frame=frame, start=10, stop=30)
    ranks = list(range(run.ranks_R.size))
    together = compare(window, "own_work_s")
    apart = compare(window, "own_work_s")
    names = ("bar", "recent_bar", "step_sigma")
    expected = {name: getattr(together, name)(ranks) for name in names}

    for rank in reversed(ranks):
        for name in names:
            assert getattr(apart, name)([rank])[0] == expected[name][rank], (name, rank)

    groups = len(frame.peers.buckets[0])
    assert len(set(expected["step_sigma"].tolist())) >= min(groups, 2)
