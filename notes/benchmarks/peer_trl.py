"""A GRPO run in TRL, for peer.py: the same checkpoint, prompts in the same order, reward, batch and optimizer.

    python -m venv trl && trl/bin/pip install torch==2.13.0 "transformers>=5.16.1,<5.20" trl==1.16.0

is its environment; peer.py calls this file with that python. It takes nothing from nanorl but the reward function, which
needs only Python, and writes a JSON line a step: step, seconds since training began, mean reward of the step's batch.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanorl.reward import exact

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--prompts", required=True, help="JSON lines with prompt and answer, in the order of training")
parser.add_argument("--out", required=True, help="the file of the curve")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--group", type=int, required=True, help="samples of a prompt")
parser.add_argument("--batch", type=int, required=True, help="samples of a step")
parser.add_argument("--max-new-tokens", type=int, required=True)
parser.add_argument("--micro", type=int, default=128, help="rows of a forward pass")
parser.add_argument("--until", type=float, default=float("inf"), help="stop at this mean reward of --window steps")
parser.add_argument("--window", type=int, default=20)
args = parser.parse_args()


def reward(prompts: list[str], completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for the right sum after the working, if there is any: nanorl's own verifier, as its task calls it."""
    return [exact(p, c, (), (), a, after=")") for p, c, a in zip(prompts, completions, answer)]


class Curve(TrainerCallback):
    """Writes the curve and ends the run at its goal."""

    def __init__(self) -> None:
        self.file, self.last, self.began = open(args.out, "w"), deque(maxlen=args.window), 0.0

    def on_train_begin(self, *_, **__) -> None:
        """The clock starts where the first step does."""
        self.began = time.perf_counter()

    def on_log(self, how, state, control, logs=None, **_) -> None:
        """After every step; the summary at the end has no reward."""
        if logs and "reward" in logs:
            self.last.append(float(logs["reward"]))
            row = {"step": state.global_step, "seconds": time.perf_counter() - self.began, "reward": self.last[-1]}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            if len(self.last) == args.window and sum(self.last) / args.window >= args.until:
                control.should_training_stop = True  # and otherwise as it is: the last step has set it too


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [json.loads(line) for line in open(args.prompts)]
    micros = args.batch // args.micro
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1, max_steps=args.steps, shuffle_dataset=False, per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=micros, steps_per_generation=micros, num_generations=args.group, num_iterations=1,
        max_completion_length=args.max_new_tokens, temperature=1.0, beta=0.0, loss_type="dapo", scale_rewards="group",
        learning_rate=args.lr, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        gradient_checkpointing=False,
    )  # fmt: skip
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model), reward_funcs=reward, args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        callbacks=[Curve()],
    ).train()  # fmt: skip
