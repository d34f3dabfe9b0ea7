"""A job of any size with nothing to fetch: random weights, random answers, and one whole training step of each.

Everything that computes is nanorl's own: the policy, the objective, the local engine, the optimizer. Only what would
come from data is drawn at random, so that sizes can be chosen one by one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from nanorl.algorithms import ALGORITHMS
from nanorl.config import Config
from nanorl.engine import Sampling
from nanorl.local import LocalEngine
from nanorl.objective import credit
from nanorl.optimize import adamw, clip_and_step
from nanorl.policy import Policy
from nanorl.sample import Batch, Group, Prompt, Sample, collate

ALGO = ALGORITHMS["grpo"].settled(stale=False)


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer with tied embeddings."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int

    def model(self, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
        """Qwen2's architecture in these sizes, fresh float32 weights made on the device."""
        config = Qwen2Config(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.key_value_heads,
            max_position_embeddings=32_768,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(seed)
        with torch.device(device):
            return Qwen2ForCausalLM(config).eval()

    def flops(self, weights: int, tokens: int, length: int, passes: int = 3) -> float:
        """Floating-point operations of `tokens` tokens in rows of `length`: 2 a weight a token a pass, and attention.

            passes · (2·weights + 2·layers·width·length) · tokens

        Scores and values cost 4·layers·width a token seen; a causal row sees half of its tokens in the mean. A training
        step has three passes (forward, and twice as much backward): 6·weights. What is computed twice counts once.
        """
        return passes * (2 * weights + 2 * self.layers * self.width * length) * tokens


def job(lr: float = 1e-6, tokens: int = 4096) -> Config:
    """The settings that a synthetic step looks at."""
    return Config(lr=lr, tokens_per_micro_batch=tokens)


def answers(rows: int, length: int, prompt: int, vocabulary: int, seed: int = 0) -> list[Group]:
    """Groups of 8 rows of `length` random tokens, all but the first `prompt` sampled; every second one is right."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (rows, length), generator=draw).tolist()
    sampled = length - prompt
    mask, version = (False,) * prompt + (True,) * sampled, (-1,) * prompt + (0,) * sampled
    logp = (0.0,) * prompt + (-1.0,) * sampled
    samples = [Sample(tuple(row), mask, logp, version, "length", ((length - 1, float(i % 2)),))
               for i, row in enumerate(ids)]  # fmt: skip
    return [Group(Prompt(i, tuple(ids[i][:prompt]), "", ""), tuple(samples[i : i + 8])) for i in range(0, rows, 8)]


def gradient(policy: Policy, update: Batch, tokens: int) -> torch.Tensor:
    """[B, T] log π_θ as trained; the gradient of the step's loss is in the weights afterwards."""
    trained = torch.zeros_like(update.logp_behave)
    for micro in update.split(tokens):
        out = policy(micro)
        (micro.weight * ALGO.loss(out, micro)).sum().backward()
        trained[micro.row, : micro.ids.shape[1]] = out.logp.detach()
    return trained


def credited(groups: list[Group], device: str) -> Batch:
    """The groups as one update, weighted."""
    batch = credit(collate(groups).to(device), ALGO)
    return batch.weighted(ALGO.axes.aggregation, batch.ids.shape[1])


class Trainer:
    """A policy and its optimizer; `step` is what train_grpo.py does between two samplings."""

    def __init__(self, policy: Policy, cfg: Config):
        self.policy, self.cfg, self.optimizer = policy, cfg, adamw(policy, cfg)

    def step(self, groups: list[Group]) -> None:
        """One whole step on these groups: credit, micro-batches, gradient, update."""
        gradient(self.policy, credited(groups, str(self.policy.model.device)), self.cfg.tokens_per_micro_batch)
        clip_and_step(self.policy, self.optimizer, self.cfg.lr, self.cfg.max_grad_norm)


def sample(policy: Policy, groups: list[Group], new: int) -> int:
    """Sample `new` tokens after the prompt of every row, by the local engine; returns how many tokens in all."""

    async def everyone() -> list:
        """All rows at once."""
        engine = LocalEngine(policy, None)
        return await asyncio.gather(*(engine.generate(group.prompt.ids, Sampling(new, key=(group.prompt.number, i)))
                                      for group in groups for i in range(len(group.samples))))  # fmt: skip

    return sum(len(completion.ids) for completion in asyncio.run(everyone()))


def settled(device: torch.device | str) -> float:
    """The time, once the device has done all it was asked."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object], repeats: int, device: torch.device | str = "cpu") -> list[float]:
    """Seconds of each of several runs, after one to warm up."""
    taken = []
    for _ in range(repeats + 1):
        start = settled(device)
        work()
        taken.append(settled(device) - start)
    return taken[1:]


def multiply_rate(device: torch.device | str = "cpu", size: int = 1024, dtype: torch.dtype = torch.float32) -> float:
    """Operations a second of a square matrix product: the arithmetic that the device has to give."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / min(seconds(lambda: a @ a, 10, device))
