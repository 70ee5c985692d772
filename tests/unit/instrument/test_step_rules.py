"""Where a step ends, for every kind of loop that people write."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BATCH = torch.ones(4, 8)


def train(model, optimizer, *, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        optimizer.step()


def rules_of(digests):
    return [digest.end_rule for digest in digests]


def test_a_plain_loop_ends_a_step_at_each_optimizer_step(traced, model, names_of):
    """Its forward is what lies between the step's start and the backward."""
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)

    digests = traced.digests()

    assert [digest.ordinal for digest in digests] == [0, 1, 2]
    assert rules_of(digests) == ["optimizer"] * 3
    assert names_of(digests[1]) == ["forward", "backward", "optimizer.step"]
    assert traced.boundaries == [1, 2, 3]


def test_a_step_of_accumulated_gradients_holds_all_micro_batches(alone, model, names_of):
    """Three micro-batches without synchronisation, one with, then the optimizer."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    for _ in range(3):  # DDP rebuilds its buckets in the second
        with ddp.no_sync():
            for _ in range(3):
                ddp(BATCH).sum().backward()
        ddp(BATCH).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    digests = alone.digests()

    assert len(digests) == 3
    assert names_of(digests[2]).count("forward") == 4
    assert names_of(digests[2]).count("backward") == 4
    assert names_of(digests[2])[-1] == "optimizer.step"
    assert digests[2].busy_s is not None


def test_a_step_that_the_scaler_skips_is_a_step_all_the_same(traced, model):
    """No optimizer hook fires in it; GradScaler.update ends it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for loss_factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(BATCH).sum() * loss_factor).backward()
        scaler.step(optimizer)
        scaler.update()

    assert rules_of(traced.digests()) == ["optimizer", "scaler", "optimizer"]


def test_a_gan_has_one_step_an_iteration(traced, model, names_of):
    """The generator has more parameters; the critic's three steps are phases of its step."""
    generator = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for _ in range(3):
            train(model, of_critic)
        of_generator.zero_grad()
        model(generator(BATCH)).sum().backward()
        of_generator.step()

    digests = traced.digests()

    assert len(digests) == 2
    assert names_of(digests[1]).count("optimizer.step") == 4


def test_of_two_optimizers_with_equally_many_parameters_the_first_ends_steps(traced, model):
    """Twins would end two steps an iteration."""
    twin = copy.deepcopy(model)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        train(twin, second)
        train(model, first)

    assert len(traced.digests()) == 3


def test_when_the_primary_optimizer_is_gone_the_next_one_ends_steps(traced, model):
    """Fine-tuning after pre-training, in one process."""
    big = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(big.parameters(), lr=0.1)
    big(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    train(model, optimizer, steps=2)

    assert len(traced.digests()) == 3


def test_zero_nests_optimizers_and_ends_one_step(alone, model):
    """The outer and the inner optimizer both have hooks."""
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    train(ddp, optimizer, steps=2)

    digests = alone.digests()

    assert rules_of(digests) == ["optimizer", "optimizer"]


def test_a_subclass_that_calls_its_parents_step_ends_one_step(traced, model):
    """Both classes' ``step`` are hooked as soon as each has had an instance."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    train(model, Own(model.parameters(), lr=0.1), steps=3)

    assert len(traced.digests()) == 3


def test_optimizers_in_the_backward_end_the_step_with_the_backward(traced, model, names_of):
    """One optimizer for each parameter, stepping as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(3):
        model(BATCH).sum().backward()

    digests = traced.digests()

    assert rules_of(digests) == ["backward"] * 3
    assert names_of(digests[1]) == ["forward", "backward"]


def test_lbfgs_runs_several_backwards_in_one_step(traced, model, names_of):
    """Its closure's forwards and backwards are part of the optimizer's phase."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(BATCH).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)

    digests = traced.digests()

    assert rules_of(digests) == ["optimizer", "optimizer"]
    assert names_of(digests[1]) == ["optimizer.step"]


def test_evaluation_and_checkpoints_are_between_steps(alone, model, names_of, tmp_path):
    """The wait for the next training batch belongs to the step, that for evaluation does not."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4)
    for batch in batches:
        ddp(batch).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for held_out in batches:
                ddp(held_out)
        torch.save(ddp.module.state_dict(), tmp_path / "checkpoint")

    step = alone.digests()[1]

    assert names_of(step) == ["between", "data.wait", "forward", "backward", "optimizer.step"]
    assert step.between_s > 0
    assert step.data_wait_s == pytest.approx(int(step.phases.duration_us[1]) * 1e-6, abs=2e-6)


def test_set_step_once_only_numbers_the_steps(traced, model):
    """As a resumed run does: its first step is 12,000."""
    traced.instrumentation.steps.set_step(12_000)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)

    digests = traced.digests()

    assert [digest.iteration for digest in digests] == [12_000, 12_001, 12_002]
    assert [digest.ordinal for digest in digests] == [0, 1, 2]
    assert rules_of(digests) == ["optimizer"] * 3


@pytest.mark.parametrize("iteration", [1 << 62, -(1 << 80)])
def test_an_iteration_beyond_64_bits_is_refused_and_the_steps_go_on(traced, model, iteration):
    """The events hold none; they are packed long after the call that could be told so."""
    with pytest.raises(ValueError, match="62 bits"):
        traced.instrumentation.steps.set_step(iteration)
    with pytest.raises(ValueError, match="tokens"):
        traced.instrumentation.annotate({"tokens": 1 << 63})

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)

    assert [digest.ordinal for digest in traced.digests()] == [0, 1]
    assert traced.recorder.ring.lost == 0


def test_set_step_in_every_iteration_ends_the_steps(traced, model):
    """From its second call on; an optimizer that steps twice an iteration ends none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(100, 104):
        traced.instrumentation.steps.set_step(iteration)
        if iteration > 100:
            train(model, optimizer)
        train(model, optimizer)

    digests = traced.digests()

    assert rules_of(digests) == ["optimizer", "set_step", "set_step"]
    assert [digest.iteration for digest in digests] == [100, 101, 102]


def test_a_loop_without_an_optimizer_has_no_steps(traced, model):
    """Never wrong ones."""
    for _ in range(3):
        model(BATCH).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    assert traced.digests() == []
    assert traced.boundaries == []


def test_an_optimizer_that_raises_ends_no_step_and_spoils_no_later_one(traced, model, names_of):
    """Running out of memory in it, say; the loop skips the batch and goes on."""

    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            if self.fail:
                raise MemoryError
            return super().step(closure)

    optimizer = Failing(model.parameters(), lr=0.1)
    train(model, optimizer)
    optimizer.fail = True
    with pytest.raises(MemoryError):
        train(model, optimizer)
    optimizer.fail = False
    train(model, optimizer, steps=2)

    digests = traced.digests()

    assert len(digests) == 3
    assert names_of(digests[1]) == ["forward", "backward"] * 2 + ["optimizer.step"]
    assert names_of(digests[2]) == ["forward", "backward", "optimizer.step"]


def test_another_optimizer_goes_on_where_one_has_raised(traced, model):
    """What never ended must not be taken for the outer of two."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    small = Failing([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(MemoryError):
        small.step()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)

    assert len(traced.digests()) == 2


def test_a_backward_that_raises_ends_no_step(traced, model):
    """And the one after it is no reentrant one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            raise ValueError

    with pytest.raises(ValueError):
        Failing.apply(model(BATCH)).sum().backward()
    train(model, optimizer)

    assert traced.instrumentation.steps.backward_depth == 0
    assert rules_of(traced.digests()) == ["optimizer"]


def test_reentrant_checkpointing_is_one_backward(traced, model, names_of):
    """It runs a backward inside the backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        checkpoint(model, BATCH.clone().requires_grad_(), use_reentrant=True).sum().backward()
        optimizer.step()

    assert names_of(traced.digests()[1]) == ["forward", "backward", "optimizer.step"]


def test_a_learning_rate_schedule_changes_nothing(traced, model, recwarn):
    """It wraps the optimizer's step, and warns where it takes it for replaced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        train(model, optimizer)
        schedule.step()

    assert len(traced.digests()) == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
    assert [str(warning.message) for warning in recwarn] == []


def test_a_ddp_model_can_be_copied_and_pickled(alone, model):
    """Hooks must not hang on the instance."""
    ddp = DistributedDataParallel(model)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))

    copied = copy.deepcopy(ddp)
    loaded = pickle.loads(pickle.dumps(ddp))  # noqa: S301 - made on this line

    assert torch.equal(copied(BATCH), ddp(BATCH))
    assert torch.equal(loaded.module(BATCH), ddp.module(BATCH))


def test_a_second_world_counts_its_steps_from_zero(traced, model, tmp_path):
    """And has a nonce of its own, so that its traces are its own."""
    for world in ("first", "second"):
        store = dist.FileStore(str(tmp_path / world), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        dist.destroy_process_group()

    digests = traced.digests()

    nonces = [identity.nonce for identity in traced.recorder.identities]
    assert [digest.ordinal for digest in digests] == [0, 1, 0, 1]
    assert len(set(nonces)) == 3
    assert traced.boundaries == [0, 1, 2, 0, 1, 2]


def test_no_tensor_outlives_its_step_because_of_us(alone, model):
    """Activations, gradients and payloads are the user's to free."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    payload = torch.ones(16)
    output = ddp(BATCH)
    output.sum().backward()
    dist.all_reduce(payload)
    optimizer.step()
    gone = [weakref.ref(payload), weakref.ref(output)]
    del payload, output

    assert [reference() for reference in gone] == [None, None]


def test_hooks_that_were_taken_off_record_nothing_and_leave_torch_as_it_was(traced, model):
    """``disable()`` in the middle of a run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    before = len(traced.digests())

    traced.instrumentation.remove()
    train(model, optimizer)

    assert len(traced.digests()) == before
    patched = [
        torch.autograd.backward,
        torch.optim.Optimizer.__init__,
        torch.amp.GradScaler.step,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        DistributedDataParallel.forward,
        dist.Work.wait,
        dist.init_process_group,
        dist.new_group,
    ]
    assert [f for f in patched if "argus_otel" in str(getattr(f, "__code__", ""))] == []
