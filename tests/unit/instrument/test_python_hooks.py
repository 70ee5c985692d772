"""What the Python layer sees: data loading, garbage collection, exceptions; phases and work."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

from argus_otel.instrument.framework.phases import user_phase
from argus_otel.instrument.python import gc_pauses
from argus_otel.wire import events


def train(model, optimizer, batch=None):
    optimizer.zero_grad()
    model(torch.ones(4, 8) if batch is None else batch).sum().backward()
    optimizer.step()


@pytest.fixture
def optimizer(traced, model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_wait_for_a_batch_is_a_phase_of_the_step(traced, model, optimizer, names_of):
    """For every batch; the end of the data is none."""
    for batch in torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=4):
        train(model, optimizer, batch)

    digests = traced.digests()

    assert [names_of(digest)[-4] for digest in digests] == ["data.wait"] * 3
    assert all(digest.data_wait_s > 0 for digest in digests)


def test_an_exception_of_the_data_set_passes_through(traced, model, optimizer):
    """Unchanged, and as no batch."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            message = "no such file"
            raise OSError(message)

    with pytest.raises(OSError, match="no such file"):
        next(iter(torch.utils.data.DataLoader(Broken())))

    assert not traced.recorder.ring.drain().of_kind(events.DATA)


def test_a_garbage_collection_in_a_step_is_counted(traced, model, optimizer):
    """A hundred thousand cycles take long enough to be one of those that are recorded."""
    gc.collect()
    for _ in range(100_000):
        cycle = []
        cycle.append(cycle)
    model(torch.ones(4, 8)).sum().backward()
    gc.collect()
    optimizer.step()

    digest = traced.digests()[0]

    assert digest.gc_count >= 1
    assert 0 < digest.gc_s < digest.step_s


def test_an_uncaught_exception_is_noted_by_type_and_place(traced, capsys):
    """And reported by whoever reported it before; its message stays out."""
    try:
        {}["secret"]
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)

    (noted,) = traced.recorder.exceptions
    assert noted.type_name == "KeyError"
    assert noted.message is None
    assert noted.frames[0].endswith("test_an_uncaught_exception_is_noted_by_type_and_place")
    assert "KeyError: 'secret'" in capsys.readouterr().err


def test_an_exception_that_ends_a_thread_is_noted_too(traced, monkeypatch):
    """With the module of a type that is not built in."""
    handled = []
    traced.instrumentation.patches.undo()
    monkeypatch.setattr(threading, "excepthook", handled.append)
    from argus_otel.instrument.python.exceptions import instrument_exceptions

    instrument_exceptions(traced.instrumentation.patches, traced.recorder, with_message=True)

    def fail():
        message = "no gradient"
        raise torch.OutOfMemoryError(message)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()

    (noted,) = traced.recorder.exceptions
    assert noted.type_name == "torch.OutOfMemoryError"
    assert noted.message == "no gradient"
    assert [args.exc_type for args in handled] == [torch.OutOfMemoryError]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_fault(traced, error, capsys):
    """Somebody pressed a key."""
    sys.excepthook(error, error(), None)

    assert traced.recorder.exceptions == []


def test_a_phase_of_the_users_own_is_in_the_digest(traced, model, optimizer, names_of):
    """Under its name, also where the block raises."""
    with user_phase(traced.recorder, "rollout"):
        pass
    with pytest.raises(ValueError), user_phase(traced.recorder, "reward"):
        raise ValueError
    train(model, optimizer)

    names = [name for name in names_of(traced.digests()[0]) if name[0] == "r"]

    assert names == ["rollout", "reward"]


def test_amounts_of_work_add_up_within_a_step(traced, model, optimizer):
    """Two micro-batches; the next step starts from nothing."""
    traced.instrumentation.annotate({"tokens": 100, "samples": 2})
    traced.instrumentation.annotate({"tokens": 28.0, "sum_len2": 50.0})
    train(model, optimizer)
    train(model, optimizer)

    first, second = traced.digests()

    assert (first.tokens, first.samples, first.sum_len2) == (128, 2, 50)
    assert (second.tokens, second.samples, second.sum_len2) == (None, None, None)


def test_the_step_knows_its_threads_cpu_time_and_run_delay(traced, model, optimizer):
    """Run delay where the kernel tells it."""
    for _ in range(3):
        train(model, optimizer)

    digest = traced.digests()[2]

    assert 0 < digest.cpu_s <= digest.step_s * 1.05 + 1e-4
    assert digest.run_delay_s is None or digest.run_delay_s >= 0


@pytest.mark.parametrize(("least_ns", "told"), [(0, 1), (1 << 60, 0)])
def test_a_collection_of_garbage_is_told_where_it_lasts(traced, monkeypatch, least_ns, told):
    """Young ones come by the hundred and take microseconds."""
    monkeypatch.setattr(gc_pauses, "MIN_PAUSE_NS", least_ns)
    gc.disable()
    try:
        traced.recorder.ring.drain()
        gc.collect()
        collections = traced.recorder.ring.drain().of_kind(events.GC)
    finally:
        gc.enable()

    assert [event[3] for event in collections] == [2] * told
