"""What runs with nothing to fetch? A small character-level transformer and its supervised warm start.

The model is an ordinary `transformers` model (Qwen3's architecture, so that vLLM serves it too) of 0.8 million
weights. Its warm start shows it both ways to answer an addition, at once or with the working first:

    587+946=1533        587+946=(7613,8413,5915)1533

The working goes through the columns from the right: the two digits, then their sum with the carry from before. Half
of the examples show each way, so it comes out choosing by the toss of a coin: with working it is nearly always right,
without it hardly ever. That working pays is for reinforcement learning to find out. The warm start never sees a
sample of the policy, nor a problem that training or evaluation asks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nanorl import tasks
from nanorl.config import Refused
from nanorl.monitor import text_progress

PAD, END = "<pad>", "<end>"
CHARACTERS = "0123456789+=(),"


@dataclass(frozen=True)
class WarmStart:
    """Everything that the warm-started weights depend on; the name of the cached folder is its hash."""

    digits: int = 3
    seed: int = 0
    steps: int = 500
    rows: int = 64
    lr: float = 3e-3
    working: float = 0.5  # share of examples that show their working
    format: int = 1  # of this file: raise it when the examples or the model change


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: i for i, token in enumerate((PAD, END, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=PAD)


def model(seed: int) -> PreTrainedModel:
    """The small transformer with fresh weights: 4 layers, width 128, 4 heads, tied embeddings."""
    config = Qwen3Config(
        vocab_size=2 + len(CHARACTERS), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=True, rope_theta=10_000.0, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # initialisation is the one place that draws from torch's global generator
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def examples(step: int, how: WarmStart) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels [rows, T] of a step of the warm start; labels are −100 on the prompt and the padding."""
    encode = {token: i for i, token in enumerate((PAD, END, *CHARACTERS))}
    rng = np.random.default_rng((how.seed, step))
    rows = []
    for _ in range(how.rows):
        a, b = tasks.addition(rng, how.digits, "warm start")
        shown = tasks.worked(a, b) if rng.random() < how.working else str(a + b)
        prompt = f"{a}+{b}="
        rows.append(([encode[c] for c in prompt], [encode[c] for c in shown] + [encode[END]]))
    width = max(len(p) + len(c) for p, c in rows)
    ids = torch.tensor([p + c + [0] * (width - len(p) - len(c)) for p, c in rows])
    labels = torch.tensor([[-100] * len(p) + c + [-100] * (width - len(p) - len(c)) for p, c in rows])
    return ids, labels


def train(how: WarmStart) -> PreTrainedModel:
    """The small model after `how.steps` of supervised learning: AdamW, cosine from how.lr to 0."""
    net, started = model(how.seed), time.monotonic()
    optimizer = torch.optim.AdamW(net.parameters(), lr=how.lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(how.steps):
        ids, labels = examples(step, how)
        for group in optimizer.param_groups:
            group["lr"] = how.lr * min(1.0, (step + 1) / 20) * 0.5 * (1 + np.cos(np.pi * step / how.steps))
        logits = net(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        text_progress("warm start", step + 1, how.steps, started)
    return net.eval()


def warm_started(how: WarmStart) -> Path:
    """The folder of the warm-started model, made now or taken from the cache (NANORL_CACHE, else ~/.cache/nanorl).

    The folder appears under its name when it is whole, so a run that is killed here leaves nothing half-made.
    """
    key = json.dumps({**asdict(how), "torch": torch.__version__}, sort_keys=True)
    cache = Path(os.environ.get("NANORL_CACHE", Path.home() / ".cache" / "nanorl"))
    folder = cache / f"warm-{how.digits}digits-seed{how.seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not (folder / "config.json").is_file():
        try:  # before the work
            cache.mkdir(parents=True, exist_ok=True)
            making = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
        except OSError as error:
            raise Refused(f"NANORL_CACHE {cache}: cannot be written ({error}); name another folder") from None
        try:
            net = train(how)
        except BaseException:
            shutil.rmtree(making)
            raise
        net.save_pretrained(making)
        tokenizer().save_pretrained(making)
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(making)  # another run made it meanwhile: the same weights
    else:
        print(f"warm start: from the cache, {folder}", flush=True)
    return folder
