"""What goes wrong around a job must not go wrong in it: endpoints, signals, exceptions, kills."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import time

import pytest

from argus_otel.testing import InMemoryReceiver

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

PATIENCE_S = 240
MARGIN_S = 2.0
"""What is promised: digests leave once in 0.9 seconds, and the rest is for a busy machine."""

# Trains until the file "stop" is there, and says when each step ended.
LOOP = """
    import torch
    log = (FOLDER / "ended").open("a", buffering=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(steps=10**9, after=lambda step: None, pause_s=0.02):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            log.write(f"{step} {time.time()}\\n")
            after(step)
            time.sleep(pause_s)
            if (FOLDER / "stop").exists():
                return
"""


def ended(job):
    """(ordinal, Unix time) of each step that the program has said it ended."""
    lines = (job.folder / "ended").read_text().splitlines()
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if " " in line]


def ordinals(receiver):
    return [span.attributes["argus.step.ordinal"] for span in receiver.spans(name="rank.step")]


def wait_until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def wait_for_a_step_after(receiver, ordinal):
    receiver.wait_for(lambda got: max(ordinals(got), default=-1) > ordinal, PATIENCE_S)


def last_step(job):
    return ended(job)[-1][0]


def certificate(folder):
    """Of an authority that nobody trusts."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, path = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return context


def test_a_job_outlives_every_trouble_of_its_endpoint_and_its_spans_resume(launch, receiver):
    """Absent at the start, there, gone, back, overloaded, refusing, silent, well again."""
    receiver.stop()
    script = (
        LOOP
        + """
    train()
    """
    )
    environment = receiver.environment | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    job = launch(script, env=environment)
    wait_until(lambda: "traces unreachable" in job.stderr)

    receiver.start()
    wait_for_a_step_after(receiver, last_step(job))
    assert 0 in ordinals(receiver), "what waited while the endpoint was absent came late, not never"

    receiver.stop()
    before = last_step(job)
    wait_until(lambda: last_step(job) > before + 20)
    receiver.start()
    wait_for_a_step_after(receiver, last_step(job))

    for fault in (
        lambda: receiver.respond(503, times=2),
        lambda: receiver.respond(429, {"Retry-After": "1"}),
        receiver.hang,
        receiver.close_connection,
    ):
        fault()
        wait_for_a_step_after(receiver, last_step(job))

    lost_nothing = max(ordinals(receiver))
    receiver.respond(400, body=b"not today")
    wait_for_a_step_after(receiver, last_step(job))
    (job.folder / "stop").touch()
    job.finish()

    got = ordinals(receiver)
    assert set(range(lost_nothing)) <= set(got)
    assert len(got) == len(set(got))
    assert max(got) == last_step(job)
    assert job.stderr.count("answered HTTP 400") == 1
    assert any(span.attributes.get("argus.drops") for span in receiver.spans(name="rank.step"))


@pytest.mark.parametrize("trouble", ["silent", "untrusted", "too large"])
def test_an_endpoint_that_never_takes_anything_costs_nothing_but_the_spans(
    launch, trouble, tmp_path
):
    """The job ends well, in bounded time, and says once what was wrong."""
    script = (
        LOOP
        + """
    train(30)
    report(weights=model.weight.tolist())
    """
    )
    tls = certificate(tmp_path) if trouble == "untrusted" else None
    with InMemoryReceiver(tls=tls) as receiver:
        if trouble == "silent":
            receiver.hang(times=float("inf"))
        elif trouble == "too large":
            receiver.respond(413, times=float("inf"))
        environment = receiver.environment | {"ARGUS_FLUSH_TIMEOUT_S": "2"}
        job = launch(script, env=environment).finish()

        assert ordinals(receiver) == []
        bare = launch.again(job.folder, instrument=False).finish()

    first, second = bare.results()
    assert first["weights"] == second["weights"]
    told = [line for line in job.stderr.splitlines() if "127.0.0.1" in line and "traces" in line]
    assert len(told) <= 2, told


@pytest.mark.parametrize("how", ["killed", "os._exit", "terminated"])
def test_every_step_that_ended_a_moment_ago_has_been_sent_when_a_rank_dies(launch, receiver, how):
    """Without a word, by its own hand, or by a scheduler."""
    script = (
        LOOP
        + """
    train(after=lambda step: (FOLDER / "die").exists() and os._exit(9))
    """
    )
    job = launch(script, env=receiver.environment)
    receiver.wait_for(lambda got: len(ordinals(got)) > 0, PATIENCE_S)
    start_s = ended(job)[-1][1]
    wait_until(lambda: ended(job)[-1][1] > start_s + MARGIN_S + 1)

    if how == "os._exit":
        (job.folder / "die").touch()
    else:
        job.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    code = job.wait()

    assert code == {"killed": -signal.SIGKILL, "os._exit": 9, "terminated": -signal.SIGTERM}[how]
    last_s = ended(job)[-1][1]
    margin_s = 0.1 if how == "terminated" else MARGIN_S
    must = {ordinal for ordinal, time_s in ended(job) if time_s < last_s - margin_s}
    time.sleep(0.5)  # for what lies in this process's socket
    assert must <= set(ordinals(receiver))


def test_a_rank_stuck_in_a_collective_dies_of_sigterm(launch, receiver):
    """Its peer never comes; no Python signal handler could run."""
    port = _free_port()
    script = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    (FOLDER / f"ready-{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        until("stop")
    """
    ranks = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in (0, 1)
    ]  # fmt: skip
    stuck = launch(script, env=receiver.environment | ranks[0])
    other = launch.again(stuck.folder, env=receiver.environment | ranks[1])
    wait_until((stuck.folder / "ready-0").exists)
    receiver.wait_for(lambda got: len(ordinals(got)) == 6, PATIENCE_S)

    stuck.process.send_signal(signal.SIGTERM)

    assert stuck.wait() == -signal.SIGTERM
    assert other.process.poll() is None


def test_a_forked_child_of_a_rank_dies_of_sigterm(launch, receiver):
    """At once, and its parent trains on."""
    script = (
        LOOP
        + """
    import signal
    train(2)
    child = os.fork()
    if child == 0:
        time.sleep(600)
    os.kill(child, signal.SIGTERM)
    report(signal=os.WTERMSIG(os.waitpid(child, 0)[1]))
    train(2)
    """
    )

    job = launch(script, env=receiver.environment).finish()

    assert [line["signal"] for line in job.results()] == [signal.SIGTERM]
    assert sorted(ordinals(receiver)) == [0, 1, 2, 3]


@pytest.mark.parametrize("messages", [False, True])
def test_an_exception_is_the_users_unchanged_and_in_the_trace(launch, receiver, messages):
    """Type and place; the message only for who asked for it."""
    script = (
        LOOP
        + """
    def explode(step):
        if step == 2:
            raise LookupError("patient 4711")
    train(after=explode)
    """
    )
    environment = receiver.environment | {"ARGUS_EXCEPTION_MESSAGES": str(int(messages))}

    job = launch(script, env=environment)

    assert job.wait() == 1
    assert job.stderr.rstrip().splitlines()[-1] == "LookupError: patient 4711"
    assert 'raise LookupError("patient 4711")' in job.stderr
    (span,) = receiver.spans(name="exception")
    assert span.attributes["error.type"] == "LookupError"
    assert "explode" in str(span.attributes["code.stacktrace"]).splitlines()[-1]
    assert span.status == "error"
    assert ("patient 4711" in str(span.attributes)) is messages
    assert sorted(ordinals(receiver)) == [0, 1, 2]


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_nothing_of_a_job_is_left_behind(launch, receiver):
    """No thread holds the process at its end, though the endpoint has gone."""
    script = (
        LOOP
        + """
    train(3)
    """
    )
    receiver.stop()
    job = launch(script, env=receiver.environment | {"ARGUS_FLUSH_TIMEOUT_S": "1"}).finish()

    with pytest.raises(ProcessLookupError):
        os.killpg(job.process.pid, 0)
