"""Only the thread that trains makes steps; a thread that fetches ahead is nobody's wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from argus_otel.instrument.thread_times import ThreadTimes

BATCH = torch.ones(4, 8)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        optimizer.step()


def test_a_thread_that_fetches_ahead_is_no_data_wait_and_opens_no_files(traced, model):
    """A prefetcher of one's own: it iterates the loader while the main thread trains."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=1)
    before = open_files()
    loader = DataLoader(TensorDataset(torch.zeros(64, 8)), batch_size=1)
    fetcher = threading.Thread(target=lambda: [None for _ in loader])

    fetcher.start()
    train(model, optimizer, steps=20)
    fetcher.join()

    digests = traced.digests()
    assert len(digests) == 21
    assert {digest.data_wait_s for digest in digests} == {0.0}
    assert all(digest.between_s >= 0 for digest in digests)
    assert open_files() <= before


def test_training_that_moves_to_another_thread_is_followed(traced, model):
    """A notebook that trains once in the main thread, then in a worker of Ray's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=2)
    mover = threading.Thread(target=train, args=(model, optimizer, 3))

    mover.start()
    mover.join()

    digests = traced.digests()
    assert [digest.ordinal for digest in digests] == [0, 1, 2, 3, 4]
    assert digests[2].cpu_s is None  # began on one thread, ended on another
    assert all(digest.cpu_s is None or digest.cpu_s <= digest.step_s * 1.5 for digest in digests)


def test_a_frozen_model_with_more_parameters_does_not_stop_the_steps(traced, model):
    """Its optimizer is kept, and never steps again."""
    larger = torch.optim.SGD(torch.nn.Linear(64, 64).parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    train(model, optimizer, steps=140)

    assert larger is not None
    assert len(traced.digests()) >= 10


def test_a_loop_of_set_step_ends_its_last_step_with_the_program(traced, model):
    """Nothing else would: the next call never comes."""
    steps = traced.instrumentation.steps
    for iteration in range(3):
        steps.set_step(iteration)
        model(BATCH).sum().backward()

    steps.end_at_exit()

    assert [digest.iteration for digest in traced.digests()] == [0, 1, 2]
    assert traced.digests()[-1].end_rule == "exit"


def test_run_delay_is_what_the_kernel_says_of_this_thread():
    """The second number of schedstat; the first is CPU time."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        pytest.skip("this kernel has no schedstat")
    times = ThreadTimes()
    times.adopt()

    before_ns = int(path.read_text().split()[1])
    cpu_ns, delay_ns = times.read()
    after_ns = int(path.read_text().split()[1])
    times.forget()

    assert before_ns <= delay_ns <= after_ns
    assert cpu_ns <= time.thread_time_ns()
