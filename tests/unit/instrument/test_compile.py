"""torch.compile beside the hooks: no warning, no recompilation, no graph break of ours."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

BATCH = torch.ones(4, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Graphs of other tests must not be found."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def train(model, optimizer, step, *, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        step()


def compile_and_train(model, *, backend, compile_step):
    """Graphs by Dynamo's own account; a recompilation is an error."""
    torch._dynamo.reset()
    counters.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend=backend) if compile_step else optimizer.step
    compiled = torch.compile(model, backend=backend)
    train(compiled, optimizer, step, steps=2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, optimizer, step, steps=12)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compile_step", [False, True], ids=["model", "model-and-optimizer"])
def test_compiling_gives_the_same_graphs_with_and_without_hooks(
    traced, model, backend, compile_step, caplog
):
    """And no recompilation, no warning; the steps still end where they do."""
    graphs = compile_and_train(model, backend=backend, compile_step=compile_step)
    digests = traced.digests()
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    traced.instrumentation.remove()
    bare_graphs = compile_and_train(model, backend=backend, compile_step=compile_step)

    assert graphs == bare_graphs
    assert [digest.end_rule for digest in digests] == ["optimizer"] * 14
    assert [text for text in warned if "argus" in text or "recompil" in text] == []


def test_a_compiled_ddp_model_keeps_its_forward_phase(alone, model, names_of):
    """The wrapper runs as it is; what it calls is compiled."""
    ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, optimizer.step, steps=3)

    assert names_of(alone.digests()[2])[-3:] == ["forward", "backward", "optimizer.step"]


def test_a_loop_compiled_as_a_whole_still_has_steps(traced, model):
    """``torch.compile(train_step)``, backward and optimizer inside."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train_step(batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    for _ in range(3):
        train_step(BATCH)

    assert len(traced.digests()) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, by Dynamo
def test_no_function_of_ours_is_ever_compiled(alone, model):
    """Also not after ``torch._dynamo.reset()``, which forgets what it was told about a code."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ours = []
    for _ in range(3):
        compiled = torch.compile(ddp, backend="eager")
        step = torch.compile(optimizer.step, backend="eager")

        @torch.compile(backend="eager")
        def train_step(batch, compiled=compiled, step=step):
            optimizer.zero_grad()
            compiled(batch).sum().backward()
            step()
            dist.all_reduce(torch.ones(3))

        for _ in range(3):
            for batch in DataLoader(BATCH, batch_size=2):
                train(compiled, optimizer, step, steps=1)
                train_step(batch)
        seen = [*convert_frame.input_codes.seen, *convert_frame.output_codes.seen]
        codes = [code for code in (reference() for reference in seen) if code is not None]
        ours += [code for code in codes if "argus_otel" in code.co_filename]
        torch._dynamo.reset()

    assert codes != []
    assert ours == []
