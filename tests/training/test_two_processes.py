"""Data-parallel training: two processes end in the weights of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
from stages.algorithms.contract import LossTerms
from stages.params import Resources
from stages.training.loop import Learner, make_accelerator
from stages.training.optimiser import make_optimiser, warmup_constant

torch.manual_seed(0)
module = nn.Linear(3, 2)
accelerator = make_accelerator(Resources())
assert accelerator.num_processes == int(sys.argv[2])
learner = Learner(module, make_optimiser(module, 1e-2, 0.0), warmup_constant(1e-2, 0), 0.1, accelerator)
inputs = torch.randn(6, 3)

def loss(rows):
    share = module(inputs[rows]).square().sum() / 6
    yield LossTerms(share, {"loss": share.detach(), "max_input": inputs[rows].max()})

for _ in range(3):
    sums = learner.update([[0, 1], [2], [3, 4, 5]], loss)
if accelerator.is_main_process:
    torch.save([module.weight.detach(), module.bias.detach(), torch.tensor([sums[name] for name in sorted(sums)])], sys.argv[1])
accelerator.end_training()
"""


def start(script: Path, out: Path, rank: int, processes: int, port: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    if processes > 1:
        environment |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"},
        }
    return subprocess.Popen([sys.executable, str(script), str(out), str(processes)], env=environment)


def test_two_processes_train_as_one_does(tmp_path):
    """Contract: gradients, gradient norm and statistics are summed over processes, whichever micro-batches each had."""
    import torch

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [start(script, tmp_path / "two.pt", rank, 2, port) for rank in range(2)]
    running.append(start(script, tmp_path / "one.pt", 0, 1, port))
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    for single, double in zip(one, two, strict=True):
        torch.testing.assert_close(double, single, rtol=1e-5, atol=1e-6)
