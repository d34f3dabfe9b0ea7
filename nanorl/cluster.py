"""What does a cluster take for what, and what did it do? Settings and results of the simulator, published clusters."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import numpy as np
import tyro

from nanorl import pace
from nanorl.config import Refused, dashed
from nanorl.pace import Pace
from nanorl.timeline import Span


@dataclass(frozen=True)
class Cluster:
    """Devices, what they take for what, and the job. Seconds and tokens."""

    engines: int = 3
    """Devices that generate, E. About three of four."""
    trainers: int = 1
    """Devices that train, T, in step with each other."""
    colocated: bool = False
    """All E + T devices generate, then all train: synchronous, so --max-lag 0."""
    interrupt: bool = True
    """--no-interrupt: an engine ends its answers before it takes new weights, and starts no others meanwhile."""
    rows: int = 256
    """Answers that an engine decodes at once. Memory for keys and values ÷ (their bytes a token × mean context)."""
    step_base: float = 0.008
    """Seconds of a token step whatever its rows: bytes of the weights ÷ memory bandwidth, and launching."""
    step_row: float = 5e-5
    """Seconds more for each row: keys and values of the mean context ÷ memory bandwidth."""
    prefill_token: float = 1e-5
    """Seconds to read a token of a prompt, or of an answer again under new weights. 2·N FLOP ÷ (peak × utilisation)."""
    distinct: float = 1.0
    """Share of the tokens so far of interrupted answers that is left to read where beginnings in common are read once."""
    train_base: float = 1.0
    """Seconds of an update whatever its tokens: optimizer, reduction."""
    train_token: float = 5e-5
    """Seconds for a sampled token on one device. 6·N FLOP ÷ (peak × utilisation), and the log-probs measured before."""
    overhead: float = 0.0
    """Seconds after an update until the trainer can begin another: logs, files."""
    sync: float = 1.0
    """Seconds from the end of an update until its weights are at the engines, which go on meanwhile."""
    load: float = 0.5
    """Seconds that an engine stands to take the weights in."""
    switch: float = 5.0
    """Seconds a step in which colocated devices change between generating and training, there and back."""

    prompts_per_step: int = 64
    """Prompts a step, P."""
    samples_per_prompt: int = 8
    """Answers to each, G."""
    prompt: int = 256
    """Tokens of a prompt. Answers that join an engine together share its reading."""
    lengths: Literal["constant", "geometric", "lognormal"] = "lognormal"
    """Distribution of the tokens of an answer. Reasoning is like lognormal; constant shows what unequal lengths cost."""
    mean: float = 2000.0
    """Mean tokens of an answer, before the cut."""
    sigma: float = 0.8
    """Standard deviation of the logarithm of a lognormal length. 0.5 to 1."""
    max_length: int = 8192
    """Longer answers are cut here."""
    measured: tyro.conf.Suppress[tuple[int, ...]] = ()
    """Lengths to draw from, all equally likely, instead of a distribution."""
    filtered: float = 0.0
    """Share of groups without contrast, for --dynamic-sampling."""
    failed: float = 0.0
    """Share of groups that fail, at their end, for --max-failed."""
    steps: int = 24
    """Steps to simulate. Rates are those of the second half, so take several times the lag."""
    seed: int = 0
    """Lengths and fates are drawn by (seed, prompt number): the same in every mode."""
    pace: Annotated[Pace, tyro.conf.arg(name="")] = field(default_factory=partial(Pace, 4))
    """how far sampling may run ahead of training"""

    def draw(self, number: int) -> tuple[list[int], bool, bool]:
        """Tokens of each answer to this prompt; whether its group fails; whether it has contrast."""
        rng = np.random.default_rng((self.seed, number))
        fail, same = rng.random(2) < (self.failed, self.filtered)
        if self.measured:
            kinds = len(self.measured)
            return [self.measured[i] for i in rng.integers(kinds, size=self.samples_per_prompt)], fail, not same
        match self.lengths:
            case "constant":
                lengths = np.full(self.samples_per_prompt, self.mean)
            case "geometric":
                lengths = rng.geometric(1 / self.mean, self.samples_per_prompt)
            case "lognormal":
                lengths = rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, self.samples_per_prompt)
        return lengths.round().clip(1, self.max_length).astype(int).tolist(), fail, not same


MOST = 10_000_000  # of whatever it is; more answers than that take minutes


def check(c: Cluster) -> None:
    """Raise Refused, in one line, for what cannot be simulated."""
    least = {"engines": 1, "trainers": int(not c.colocated), "mean": 1, "prompt": 0, "seed": 0}
    least |= dict.fromkeys(("rows", "prompts_per_step", "samples_per_prompt", "max_length", "steps"), 1)
    least |= dict.fromkeys(("step_base", "step_row", "prefill_token", "train_base", "train_token", "overhead", "sync",
                            "load", "switch", "sigma"), 0)  # fmt: skip
    for name, bound in least.items():
        if not bound <= getattr(c, name) <= MOST:
            raise Refused(f"{dashed(name)} {getattr(c, name)}: must be {bound} or more, and at most {MOST:,}")
    answers = c.prompts_per_step * c.samples_per_prompt * (c.steps + min(c.pace.bound, c.steps))
    if max(answers, c.engines) > MOST:
        raise Refused(f"--steps {c.steps}: {answers:,} answers or {c.engines:,} engines are more than is simulated here")
    if not 0 <= c.distinct <= 1:
        raise Refused(f"--distinct {c.distinct}: must be a share, from 0 to 1")
    for name in ("filtered", "failed"):
        if not 0 <= getattr(c, name) < 1:
            raise Refused(f"{dashed(name)} {getattr(c, name)}: must be a share, from 0 to less than 1")
    if c.step_base + c.step_row == 0:
        raise Refused("--step-base 0 --step-row 0: a token step takes time; raise one of them")
    if c.colocated and c.pace.max_lag != 0:
        raise Refused(f"--colocated --max-lag {c.pace.max_lag}: the same devices train, so nothing runs ahead; "
                      "add --max-lag 0, or give the trainers devices of their own")
    for name in ("delay", "deadline", "restart_engine", "engine_device"):
        if getattr(c.pace, name) != getattr(Pace, name):
            raise Refused(f"{dashed(name)}: it changes nothing on the virtual clock; leave it away")
    if (line := pace.wrong(c.pace, "worker", c.prompts_per_step)) is not None:
        raise Refused(line)


@dataclass(frozen=True)
class Step:
    """A training step that is over."""

    end: float
    tokens: int  # trained
    lags: Counter[int]  # samples by lag
    buffer: dict[str, float]  # Buffer.lap


@dataclass(frozen=True)
class Result:
    """What a simulated cluster did: generated = trained + wasted + unfinished tokens.

    Rates, lags and utilisation are those of the second half of the steps, when the start is forgotten.
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    generated: int
    wasted: int  # of groups that were filtered, left out, or failed
    unfinished: int  # of groups under way at the end
    recomputed: int  # read again because of new weights

    @property
    def half(self) -> tuple[float, tuple[Step, ...]]:
        """When the second half begins, and its steps."""
        n = len(self.steps) // 2
        return (self.steps[n - 1].end if n else 0.0), self.steps[n:]

    @property
    def trained(self) -> int:
        """Tokens trained on in all steps."""
        return sum(step.tokens for step in self.steps)

    @property
    def steps_per_second(self) -> float:
        """Training steps a second."""
        start, steps = self.half
        return len(steps) / (steps[-1].end - start)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second."""
        start, steps = self.half
        return sum(step.tokens for step in steps) / (steps[-1].end - start)

    @property
    def lags(self) -> Counter[int]:
        """Samples by lag."""
        return sum((step.lags for step in self.half[1]), Counter())

    @property
    def mean_lag(self) -> float:
        """Of a sample, in training steps."""
        return sum(lag * n for lag, n in self.lags.items()) / self.lags.total()

    @property
    def busy(self) -> dict[str, float]:
        """Utilisation of each lane: the share of the time in which it did not wait."""
        start, end = self.half[0], self.steps[-1].end
        busy = dict.fromkeys((span.lane for span in self.spans), 0.0)
        for span in self.spans:
            if span.name != "wait":
                busy[span.lane] += max(0.0, min(end, span.end) - max(start, span.start)) / (end - start)
        return busy


# AReaL's 1.5B line (arXiv 2505.24298, Table 1): 16 nodes of 8 H800, three quarters of them generate, 512 prompts × 16,
# at most 27,648 tokens, η = 8. It took 14.8 hours for 250 steps, and 41.0 synchronously. What is ours is derived, not
# tuned: 316 and 135 s a step, 2.35 times as fast. Published are 590 and 213 s, 2.77 times: real engines and trainers
# reach less than the 70 % of an H800's 3.35 TB/s and the 40 % of its 989 TFLOP/s (bfloat16) that are assumed here.
#   model          N = 1.54e9 weights that multiply, 28 layers of width 1536; 2 × 128 keys, as many values, 2 B each:
#                  28,672 B a token
#   lengths        128.7 k tokens/s × 590 s a step / 8,192 = 9,270 tokens; lognormal of mean 9,900 and σ 0.8 (assumed),
#                  cut, has mean 9,300. While an answer is made it holds E[L²]/2E[L] = 7,200 tokens on average
#   rows           0.9·80 GB − 3.1 GB of weights − working memory ≈ 2.2 million tokens; / 7,450 with the prompt ≈ 300
#   step_base      3.1 GB / 2.35 TB/s = 1.3 ms; 28 layers × 10 kernels, 10 µs each, = 2.8 ms; scheduler and sampler on
#                  the host, 3 ms (assumed)
#   step_row       7,450 tokens × 28,672 B / 2.35 TB/s = 91 µs; 2N/(396 TFLOP/s) = 8 µs, and the sampler's logits 1 µs
#   prefill_token  (2N + 4·28·1536·3,700) FLOP / 396 TFLOP/s = 9.4 µs
#   train_token    attention: 4·28·1536 FLOP × 7,200, the mean number of tokens before one: 1.24e9; a forward pass with
#                  it 4.3e9. Five of them (log-probs, forward, again for the checkpoints, backward as two): 55 µs
#   train_base     4 minibatches, each with an optimizer step and a reduction over the network: 1 s each (assumed)
#   load           3.1 GB in buckets through the network, engines standing: 3 s; sync: 1 s to gather them (assumed)
#   switch         engines give up and take back memory, optimizer states move: 10 s (assumed)
PRESETS = {
    "areal_1_5b": Cluster(
        engines=96, trainers=32, rows=256, step_base=7.1e-3, step_row=1e-4, prefill_token=9.4e-6, train_base=4.0,
        train_token=5.5e-5, sync=1.0, load=3.0, switch=10.0, prompts_per_step=512, samples_per_prompt=16, prompt=250,
        mean=9900.0, sigma=0.8, max_length=27_648, steps=18, pace=Pace(max_lag=8),
    ),
}  # fmt: skip
