"""What happened to each token of a sample? Lines of samples.jsonl, as tables.

    python -m nanorl.monitor --sample RUN STEP          the samples of a step, a line each
    python -m nanorl.monitor --sample RUN STEP ROW      one of them, a line a token

No torch where the run has a checkpoint, for its tokenizer.json tells what the ids mean.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanorl.config import Refused
from nanorl.curves import contents, json_object, table

TITLES = ("position", "id", "text", "mask", "logp_behave", "logp_prox", "ratio", "version", "reward", "adv")
LEGEND = """\
mask         1 where the policy sampled the token
logp_behave  its log-prob by the engine, while sampling;  version: of the weights that did
logp_prox    by the trainer at the start of the step; – where it made no forward pass, or did not measure it
ratio        exp(logp_prox − logp_behave), 1 if engine and trainer agree and the sample is fresh
reward       where it was earned;  adv: what the update made of it, – in a run of before it was written"""
MISSING = "\ntext         – because neither a checkpoint nor the start model is there, whose tokenizer would tell"
BEGINS = re.compile(rb'\{"step": (\d+),')


def shown(run: str, step: str, row: str | None = None) -> str:
    """The samples of a step as a table, or one of them token by token. Raises Refused."""
    for word in (step, *([] if row is None else [row])):
        if not word.isdecimal():
            raise Refused(f"--sample {run} {step}{'' if row is None else ' ' + row}: {word} is no number; "
                          "--sample RUN STEP [ROW]")  # fmt: skip
    path = Path(run) / "samples.jsonl"
    samples = of_step(path, int(step))
    if row is not None and int(row) >= len(samples):
        raise Refused(f"--sample {run} {step} {row}: no such row; that step has 0 to {len(samples) - 1}")
    try:
        return rows(samples) if row is None else tokens(samples[int(row)], decoder(Path(run)), int(row))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path}: samples of another version ({error!r}); use the one that wrote them") from None


def of_step(path: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step, in the order of the file, whose last line may be half a killed run's. Raises Refused."""
    found, first, last = [], None, None
    try:
        with open(path, "rb") as file:
            for i, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                begins = BEGINS.match(line)  # so that a file of gigabytes is read, not parsed
                if begins is None:
                    raise Refused(f"{path}, line {i}: not a sample of a run, or of another version")
                last = int(begins[1])
                first = last if first is None else first
                if last == step:
                    found.append(json_object(line, f"{path}, line {i}"))
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}); name the folder of a run") from None
    if not found:
        there = "no sample yet" if first is None else f"steps {first} to {last}"
        raise Refused(f"--sample {path.parent} {step}: no such step; {path} has {there}")
    return found


def rows(samples: Sequence[dict[str, Any]]) -> str:
    """A line for each sample: its row, prompt number, reward, finish, sampled tokens, and how it begins."""
    lines = [[str(i), str(s["prompt"]), str(s["reward"]), s["finish"], str(sum(s["mask"])), repr(s["text"][:60])[1:-1]]
             for i, s in enumerate(samples)]  # fmt: skip
    return table([("row", "prompt", "reward", "finish", "tokens", "begins"), *lines], left=(5,))


def tokens(sample: dict[str, Any], decode: Callable[[Sequence[int]], str] | None, row: int) -> str:
    """A line for each token of the sample, under a line on the whole, above the legend."""
    notes = "".join(f", {name} {value}" for name, value in sample["notes"])
    text = "a sample that is not trained on, " if not sample["train"] else ""
    whole = (f"step {sample['step']}, row {row}: {text}prompt {sample['prompt']}, reward {sample['reward']}, "
             f"finish {sample['finish']}, {sum(sample['mask'])} tokens sampled{notes}")  # fmt: skip
    columns = table([TITLES, *map(cells, of_tokens(sample, decode))], left=(2,))
    return f"{whole}\n\n{columns}\n\n{LEGEND}{'' if decode else MISSING}"


def of_tokens(sample: dict[str, Any], decode: Callable[[Sequence[int]], str] | None) -> list[dict[str, Any]]:
    """The columns of each token by their titles, as the file has them; None where there is nothing to know."""
    n, rewards = len(sample["ids"]), {}
    for position, value in sample["rewards"]:
        rewards[position] = rewards.get(position, 0.0) + (math.nan if value is None else value)
    texts = [None] * n if decode is None else pieces(decode, sample["ids"])
    lists = [sample[name] for name in ("ids", "mask", "logp_behave", "version")]
    lists += [sample.get(name) or [None] * n for name in ("logp_prox", "adv")]
    found = []
    for i, (token, text, columns) in enumerate(zip(lists[0], texts, zip(*lists[1:], strict=True), strict=True)):
        mask, behave, version, prox, adv = columns if columns[0] else (0, *[None] * 4)
        ratio = None if prox is None or behave is None else math.exp(min(700.0, prox - behave))
        found.append({"position": i, "id": token, "text": text, "mask": mask, "logp_behave": behave, "logp_prox": prox,
                      "ratio": ratio, "version": version, "reward": rewards.get(i), "adv": adv})  # fmt: skip
    return found


def cells(token: dict[str, Any]) -> list[str]:
    """A token's columns as text, blank where nobody sampled; nine digits tell any two float32 apart."""
    forms = {"text": repr, "logp_behave": "{:.9g}".format, "logp_prox": "{:.9g}".format, "ratio": "{:.7g}".format,
             "adv": "{:.9g}".format}  # fmt: skip
    unknown = {"text": "–", "reward": ""}
    return [forms.get(name, str)(token[name]) if token[name] is not None else
            unknown.get(name, "–" if token["mask"] else "") for name in TITLES]  # fmt: skip


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text that each id adds to those before it; of a character in several tokens all but the last show �.

    >>> pieces(lambda ids: bytes(ids).decode(errors="replace"), [0x61, 0xC3, 0xA9])
    ['a', '�', 'é']
    """
    found = []
    for i in range(len(ids)):
        before, now = decode(ids[max(0, i - 8) : i]), decode(ids[max(0, i - 8) : i + 1])
        found.append(now[len(os.path.commonprefix([before, now])) :])
    return found


def decoder(run: Path) -> Callable[[Sequence[int]], str] | None:
    """What turns ids into text, special tokens too: a checkpoint's tokenizer, else the start model's; None without."""
    file = next(run.glob("checkpoints/step-*/tokenizer.json"), None)
    if file is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    job = json_object(contents(run / "config.json"), str(run / "config.json")).get("config", {})
    from nanorl import tiny  # seconds, for torch

    if job.get("model") is None:
        return tiny.tokenizer().decode
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(job["model"]).decode
    except (OSError, ValueError):  # the folder is gone, or the hub away
        return None
