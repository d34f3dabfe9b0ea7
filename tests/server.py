"""A real vLLM server for tests: a small model of every engine's liking, started by serve.py once for all tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanorl import tiny
from nanorl.policy import Policy, admit

ROOT = Path(__file__).parents[1]
ROOM = 4096


def spread(net, seed):
    """The model with weights of its own for each seed, so large that another past or another version shows."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=random) * 1.2 / p.shape[-1] ** 0.5)
    return net


def small(seed=0, temperature=1.0):
    """A policy around a small transformer with the tiny model's vocabulary and tied embeddings."""
    config = Qwen3Config(vocab_size=17, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=32, max_position_embeddings=ROOM, tie_word_embeddings=True,
                         pad_token_id=0, bos_token_id=None, eos_token_id=1)  # fmt: skip
    return Policy(spread(admit(Qwen3ForCausalLM(config), "small"), seed), temperature)


def free_port():
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as it:
        return it.getsockname()[1]


class RealServer:
    """nanorl.serve as a program of its own, with the small model; started, killed and started again by tests."""

    def __init__(self, folder):
        self.folder, self.port = Path(folder), free_port()
        self.url, self.log = f"http://127.0.0.1:{self.port}", self.folder / "serve.log"
        for part in (small().model, tiny.tokenizer()):
            part.save_pretrained(self.folder / "model")

    def start(self, *options):
        """Start it; back when it is ready. `said` is what it printed."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanorl.serve", "--model", self.folder / "model", "--port", str(self.port), "--log",
             self.log, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("ready"):
                return
        raise RuntimeError(f"no server: {self.log.read_text()[-3000:]}")

    def group(self):
        """The process that leads vLLM's group."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def kill(self):
        """Kill vLLM and all it has started, without a word; serve.py then ends by itself."""
        os.killpg(self.group(), signal.SIGKILL)
        self.process.wait(timeout=30)

    def close(self):
        """End it."""
        self.process.terminate()
        self.process.wait(timeout=60)


def members(group):
    """The processes of a group that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def gone(group, seconds=30.0):
    """No process of the group runs any more within so many seconds."""
    end = time.monotonic() + seconds
    while members(group) and time.monotonic() < end:
        time.sleep(0.1)
    return not members(group)
