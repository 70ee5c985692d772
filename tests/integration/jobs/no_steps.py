"""Forms a process group of one and trains nothing."""

import tempfile
from pathlib import Path

import torch.distributed as dist

with tempfile.TemporaryDirectory() as folder:
    meeting = Path(folder) / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    dist.destroy_process_group()
