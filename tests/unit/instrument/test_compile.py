"""torch.compile beside the hooks: no warning, no recompilation, no graph break of ours."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, CompilationCallbackHandler
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from argus_otel.instrument.framework.compilation import instrument_compilation
from argus_otel.instrument.patches import Patches
from argus_otel.semconv import names
from argus_otel.wire import ids

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


def compilations_of(traced):
    """(step, function, reason, seconds) of each compilation's span."""
    ordinals = [digest.ordinal for digest in traced.digests()]
    spans = [span for part in traced.parts for shaped in part.shaped.values() for span in shaped]
    by_trace = {ids.step_trace_id(b"12345678", 0, ordinal, 0): ordinal for ordinal in ordinals}
    return [
        (
            by_trace[span.trace_id],
            span.shape.constants["code.function.name"],
            span.shape.constants.get(names.ARGUS_COMPILATION_REASON, ""),
            span.values[1],
        )
        for span in spans
        if span.shape.name == names.SPAN_COMPILATION
    ]


def test_a_recompilation_is_told_with_its_function_and_reason(traced, model):
    """In the step that it fell into; also after the user has reset Dynamo, which drops callbacks."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (4, 4, 5, 5):
        compiled(torch.ones(rows, 8)).sum().backward()
        optimizer.step()

    first, second = compilations_of(traced)

    assert (first[:3], second[:2]) == ((0, "Sequential.forward", ""), (2, "Sequential.forward"))
    assert "expected 4, actual 5" in second[2]
    assert 0 < second[3] < traced.digests()[2].step_s
    assert [digest.keep for digest in traced.digests()] == ["event", None, "event", None]


def test_what_another_thread_compiles_is_no_stall_of_the_training_thread(traced, model):
    """A thread that evaluates keeps nobody waiting."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, optimizer.step, steps=1)
    compiled = torch.compile(torch.nn.Linear(8, 8), backend="eager")
    thread = threading.Thread(target=lambda: compiled(BATCH))
    thread.start()
    thread.join()
    train(model, optimizer, optimizer.step, steps=1)

    assert compilations_of(traced) == []


def test_text_of_the_user_in_a_guard_is_not_told(traced):
    """A guard on a string says what the string was."""

    @torch.compile(backend="eager")
    def label(rows, name):
        return rows + (1 if name == "patient-7" else 2)

    weights = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    for name in ("patient-7", "patient-8"):
        label(BATCH, name)
        train(weights, optimizer, optimizer.step, steps=1)

    reasons = [reason for _, _, reason, _ in compilations_of(traced)]

    assert reasons[1]
    assert "patient" not in " ".join(reasons)


def test_torch_may_hand_its_argument_over_by_name(traced):
    """A hook must take whatever call the original takes: this is the user's compilation."""
    handler = CompilationCallbackHandler()
    told = []
    handler.register_start_callback(told.append)
    handler.register_end_callback(told.append)
    given = CallbackArgs(CallbackTrigger.DYNAMO, "9/0")

    handler.run_start_callbacks(args=given)
    handler.run_end_callbacks(args=given)

    assert told == [given, given]


class _TellsNothing:
    """The callbacks of a torch that does not number graphs."""

    def run_start_callbacks(self):
        pass

    def run_end_callbacks(self):
        pass


def test_a_graph_without_a_number_does_not_get_the_name_of_the_one_before():
    """A wrong function would send people to the wrong place."""
    recorded = []
    sink = SimpleNamespace(
        enabled=True, record_compilation=lambda compiled, *_: recorded.append(compiled.function)
    )
    module = SimpleNamespace(CompilationCallbackHandler=_TellsNothing)
    instrument_compilation(module, Patches(), sink, SimpleNamespace(is_here=True))
    handler = _TellsNothing()

    def _compile(code, closure, recompile_reason):
        handler.run_start_callbacks()
        handler.run_end_callbacks()

    _compile(train.__code__, None, None)
    handler.run_start_callbacks()
    handler.run_end_callbacks()

    assert recorded == ["train", "torch.compile"]
