"""Hooks on module instances, as FSDP2 has them on every block: the outermost forward counts."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch._dynamo
from torch.distributed.fsdp import fully_shard

from argus_otel.instrument.framework.phases import ForwardHooks
from argus_otel.wire import events

BATCH = torch.ones(4, 8)


class Blocks(torch.nn.Module):
    """Calls its first block ``depth`` times through itself, and fails where it is told to."""

    def __init__(self, depth=0):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.depth = depth
        self.fails = False

    def forward(self, batch):
        batch = self.first(batch)
        if self.fails:
            msg = "out of memory"
            raise RuntimeError(msg)
        if self.depth:
            self.depth -= 1
            return self(batch)
        return self.second(batch)


@pytest.fixture
def attached(traced):
    """A model and its blocks with hooks, as ``fully_shard`` gets them: blocks first."""

    def make(**options):
        model = Blocks(**options)
        hooks = ForwardHooks(traced.recorder, traced.instrumentation.steps)
        for module in (model.first, model.second, model):
            hooks.attach(module)
        return model

    return make


def forwards(traced):
    return traced.recorder.ring.drain().of_kind(events.FORWARD)


def test_blocks_inside_a_sharded_model_are_no_phases_of_their_own(alone, names_of):
    """By the real ``fully_shard``, with a step around it."""
    model = Blocks()
    for block in (model.first, model.second):
        torch.distributed.fsdp.fully_shard(block)
    torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(BATCH).sum().backward()
        optimizer.step()

    digests = alone.digests()

    assert fully_shard is not torch.distributed.fsdp.fully_shard
    assert [names_of(d).count("forward") for d in digests] == [1, 1, 1]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_model_that_calls_itself_is_one_forward(traced, attached, depth):
    """From its first entry to its last end."""
    attached(depth=depth)(BATCH)

    assert len(forwards(traced)) == 1


def test_a_block_called_alone_is_a_forward(traced, attached):
    """A frozen encoder, called beside the model."""
    model = attached()

    model.first(BATCH)
    model(BATCH)
    with torch.no_grad():
        model.second(BATCH)

    flags = [event[5] for event in forwards(traced)]
    assert flags == [0, 0, events.NO_GRAD]


def test_a_forward_that_raises_hides_none_after_it(traced, attached):
    """Its end is told where it raised."""
    model = attached()
    model.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        model(BATCH)
    model.fails = False

    model.first(BATCH)
    model(BATCH)

    assert len(forwards(traced)) == 3


def test_a_forward_under_way_when_argus_is_disabled_hides_none_either(traced, attached):
    """It may be enabled again: a process that sleeps until it is a rank."""
    model = attached()

    def disable(*_):
        traced.recorder.enabled = False

    handle = model.first.register_forward_hook(disable)
    model(BATCH)
    handle.remove()
    traced.recorder.enabled = True
    model.second(BATCH)

    assert len(forwards(traced)) == 1


def test_copies_of_a_model_share_the_hooks(traced, attached):
    """An exponential average of its weights."""
    model = copy.deepcopy(attached())
    model(BATCH)

    assert len(forwards(traced)) == 1


def test_a_compiled_model_holds_nothing_of_the_hooks(traced, attached):
    """One graph without a break, no recompilation, nothing recorded within it."""
    torch._dynamo.reset()
    compiled = torch.compile(attached(), backend="eager", fullgraph=True)
    compiled(BATCH)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(BATCH)

    assert forwards(traced) == []
    torch._dynamo.reset()


def test_an_interrupted_forward_hides_none_of_later_steps_and_holds_no_model(traced):
    """Ctrl-C in a notebook: torch calls no hook at the end of such a forward."""
    steps = traced.instrumentation.steps
    hooks = ForwardHooks(traced.recorder, steps)

    def make():
        model = Blocks()
        hooks.attach(model)
        return model

    def interrupt(*_):
        raise KeyboardInterrupt

    model = make()
    handle = model.second.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(BATCH)
    handle.remove()
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None

    other = make()
    for _ in range(3):
        other(BATCH)
        steps.end_from_integration()

    # The first of them lies in the step of the one that was interrupted.
    assert len(forwards(traced)) >= 2
