"""Which processes argus stays out of, by their command lines."""

from __future__ import annotations

import pytest

from argus_otel._runtime.process_kind import ProcessKind, process_kind

SPAWN = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=9)"
SERVER = "from multiprocessing.forkserver import main; main(5, 7, ['__main__'], **{})"
TRACKER = "from multiprocessing.resource_tracker import main;main(4)"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py"],
        ["train.py", "--mode", "-m", "torch.distributed.run"],
        ["train.py", "torchrun"],
        ["-u", "train.py"],
        ["-X", "dev", "-W", "error", "train.py"],
        ["-m", "my_team.train", "--launcher", "torchrun"],
        ["-um", "my_team.train"],
        ["-c", "import torch.multiprocessing as mp; mp.spawn(print)"],
        ["/home/me/multiprocessing.spawn/train.py"],
        ["-"],
        [],
    ],
)
def test_a_program_of_the_users_gets_everything(arguments):
    """However it is started."""
    assert process_kind(["python3", *arguments]) is ProcessKind.MAIN


@pytest.mark.parametrize(
    "arguments",
    [
        ["/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"],
        ["/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "my_team.train"],
        ["-m", "torch.distributed.run", "train.py"],
        ["-um", "torch.distributed.run", "train.py"],
        ["-X", "dev", "/venv/bin/torchrun", "train.py"],
        ["/venv/bin/accelerate", "launch", "train.py"],
        ["-u", "-m", "deepspeed.launcher.launch", "train.py"],
        ["/venv/bin/argus", "run", "--", "torchrun", "train.py"],
        ["-c", TRACKER],
        ["-s", "-c", TRACKER],
        ["/venv/lib/torch/_inductor/compile_worker/__main__.py", "--workers=4"],
    ],
)
def test_launchers_and_helpers_get_nothing(arguments):
    """They never train."""
    assert process_kind(["python3", *arguments]) is ProcessKind.INERT


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", SPAWN, "--multiprocessing-fork"],
        ["-B", "-c", SERVER],
        ["-c", "from joblib.externals.loky import main", "--multiprocessing-fork"],
    ],
)
def test_children_of_multiprocessing_sleep_until_they_turn_out_to_be_ranks(arguments):
    """``mp.spawn`` starts ranks the same way as a DataLoader its workers."""
    assert process_kind(["python3", *arguments]) is ProcessKind.DORMANT
