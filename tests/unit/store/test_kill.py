"""A writer that is killed at any moment leaves a readable store with all that it had answered."""

import signal
import subprocess
import sys

import httpx
import pytest

from argus_otel.store.parquet import ParquetStore
from argus_otel.store.receiver import Receiver
from argus_otel.store.writer import ParquetWriter
from argus_otel.testing.otlp import digest_request, example_digest, resource_of

pytestmark = pytest.mark.multiproc

# Kills itself at the n-th time that anything is made durable: in the middle of a batch, between
# its tables, between the data and the manifest, within a compaction.
WRITER = """
import os, signal, sys
from pathlib import Path
from argus_otel.store.receiver import Receiver
from argus_otel.store.writer import ParquetWriter

fsync, left = os.fsync, int(sys.argv[2])

def fsync_or_die(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

os.fsync = fsync_or_die
receiver = Receiver(ParquetWriter(Path(sys.argv[1]), files_per_size=3), gather_s=0).start()
print(receiver.endpoint, flush=True)
sys.stdin.read()
"""


def body(step, rank):
    digest = example_digest(step, rank)
    return digest_request([digest], resource_of(rank, world_size=2)).SerializeToString()


def send_until_it_dies(endpoint):
    """Post step after step; which were answered."""
    answered = []
    headers = {"Content-Type": "application/x-protobuf"}
    with httpx.Client(trust_env=False, timeout=60) as client:
        for step in range(100):
            for rank in range(2):
                try:
                    url = f"{endpoint}/v1/traces"
                    answer = client.post(url, content=body(step, rank), headers=headers)
                except httpx.TransportError:
                    return answered
                assert answer.status_code == 200
                answered.append((step, rank))
    return answered


@pytest.mark.parametrize("dies_at", [3, 12, 30, 47, 61])
def test_a_killed_writer_loses_only_what_it_had_not_answered(tmp_path, dies_at):
    """SIGKILL of a real process; then reading, retrying what was not answered, and going on."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(dies_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        answered = send_until_it_dies(process.stdout.readline().strip())
    assert process.returncode == -signal.SIGKILL

    stored = steps_in(tmp_path)
    with Receiver(ParquetWriter(tmp_path), gather_s=0) as receiver:  # the one lock is free again
        for step, rank in [*answered, (len(answered) // 2, len(answered) % 2)]:
            httpx.post(
                f"{receiver.endpoint}/v1/traces",
                content=body(step, rank),
                headers={"Content-Type": "application/x-protobuf"},
                trust_env=False,
                timeout=60,
            ).raise_for_status()

    assert set(answered) <= set(stored)
    assert len(stored) == len(set(stored)) <= len(answered) + 1
    assert len(steps_in(tmp_path)) == len(answered) + 1
    assert sorted(path.name for path in tmp_path.rglob("*.tmp")) == []
    assert len(list(tmp_path.glob("*/steps/*.parquet"))) == 1


def steps_in(folder):
    store = ParquetStore(folder)
    if not store.runs():
        return []
    tables = store.read(store.resolve("latest"))
    steps = zip(tables.steps["ordinal"].to_pylist(), tables.steps["rank"].to_pylist(), strict=True)
    # Three collectives to each step: tables of one batch are there together or not at all.
    assert tables.collectives.num_rows == 3 * tables.steps.num_rows
    return list(steps)
