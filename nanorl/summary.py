"""What did the run reach? Its last lines on the console, and summary.json."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from nanorl import checkpoint, cli
from nanorl.config import Config

if TYPE_CHECKING:
    from nanorl.run import Run


def finish(run: Run, results: dict[str, float]) -> None:
    """Say what the run reached (results: its last evaluation), where everything lies, what to try; write summary.json."""
    cfg, axes, before, ended = run.cfg, run.axes, run.before, run.buffer.ended
    summary = {"steps": run.step, "seconds": time.monotonic() - run.began, "before": before, "after": results,
               "groups": {"trained": run.step * cfg.prompts_per_step, **ended},
               "command": cli.command(run.script, run.name, cfg, axes)}  # fmt: skip
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    last = checkpoint.latest(run.folder)
    asked = ("task", "digits", "data", "eval_data", "system_prompt", "prompt_suffix", "stop", "reward", "scoring",
             "dtype", "seed", "max_new_tokens", "temperature", "eval_problems", "eval_samples")  # fmt: skip
    again = Config(**{f: getattr(cfg, f) for f in asked}, model=str(last), eval_only=True)
    print(f"\ndone: step {run.step}, {summary['seconds']:.0f} s since this start")
    for key, value in results.items():
        was = f"{before[key]:.3f} → " if key in before else ""
        print(f"  {key.removeprefix('eval/'):12} {was}{value:.3f}")
    if any(ended.values()):
        left = f" ({ended['left out']:,} of them without contrast, left out)" if ended["left out"] else ""
        others = "".join(f", {ended[how]:,} {how}" for how in ("filtered", "failed") if ended[how])
        print(f"  groups       {summary['groups']['trained']:,} trained{left}{others}")
    print(f"the run       {run.folder} (metrics.jsonl, samples.jsonl, trace.json, summary.json)\n"
          f"weights       {last} (AutoModelForCausalLM.from_pretrained opens it)\n"
          f"curves        python -m nanorl.monitor {run.folder}   (or tensorboard --logdir {run.folder.parent})\n"
          f"samples       python -m nanorl.monitor --sample {run.folder} {run.step}\n"
          f"timeline      python -m nanorl.monitor --timeline {run.folder}\n"
          f"go on         python {run.script} --resume {run.folder} --steps {2 * cfg.steps}\n"
          f"ask it        python -m nanorl.rollout {run.folder} PROMPT\n"
          f"evaluate      {cli.command(run.script, run.name, again, axes)}")  # fmt: skip
    if cfg.task == "arithmetic":
        print(f"harder        python {run.script} {run.name} --digits {min(12, max(6, cfg.digits + 1))}\n"
              f"another way   python train_grpo.py {'dr_grpo' if run.name != 'dr_grpo' else 'rloo'}")  # fmt: skip
