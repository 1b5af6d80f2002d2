"""What an exchange needs of memory beside the tensors, as Linux counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Replicas of 32 MiB, in threads that share the libraries' memory; prints their peak over the
#: tensors, as part of these. The second round follows a plan.
PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diloco_cloud.exchange.heaps import share_heaps

share_heaps()
import torch

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

torch.set_num_threads(1)
uri, codec, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
tensors = [torch.randn(8 * 2**20) for _ in range(count)]
ranks = [ObjectStoreAllReduce(uri, rank, count, codec=codec, timeout_s=60) for rank in range(count)]
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
with ThreadPoolExecutor(count) as pool:
    for _ in range(2):
        list(pool.map(lambda rank, tensor: rank.allreduce(tensor), ranks, tensors))
print((status("VmHWM") - before) / sum(tensor.nbytes for tensor in tensors))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("codec", "replicas", "most"),
    [
        ("fp32", 4, 0.55),
        ("fp32", 2, 1.0),
        ("bf16", 4, 0.6),
        ("e3m0", 4, 0.8),
        ("sparse", 4, 1.45),
    ],
)
def test_exchange_peak_memory_is_bounded(
    codec: str, replicas: int, most: float, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), codec, str(replicas)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert float(run.stdout) < most
