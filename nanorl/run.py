"""What is a run? Its folder, its parts put together from the flags, its signals, its beginning and its end.

Everything that `train_grpo.py` needs beside the loop itself stands here, so that the loop fits on one page.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from nanorl import algorithms, checkpoint, config, engine, evaluate, optimize, policy, reward, rollout, tasks, tiny
from nanorl.buffer import Buffer, Stopped
from nanorl.axes import Axes
from nanorl.config import Config, Refused
from nanorl.critic import Critic
from nanorl.memory import dry_run
from nanorl.metrics import average, step_metrics
from nanorl.monitor import Monitor, text_progress
from nanorl.sample import Batch, Group, Prompt

TIMEOUT = 1800.0  # seconds without a single finished group, after which something is stuck


class Stop:
    """Ctrl-C and SIGTERM ask the run to stop where it can be saved; asked twice, it stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def handle(self, number: int, frame: object) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(f"\n{signal.Signals(number).name}: stopping after this step; once more stops at once", file=sys.stderr)


class Clock:
    """Seconds spent in each stage of a step: `with clock("train"): …`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """The stages since the last lap."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class Run:
    """The parts of a run and what it does around its steps: evaluate, save, finish."""

    def __init__(self, script: str, name: str, cfg: Config, axes: Axes):
        self.script, self.name, self.cfg = Path(script).name, name, cfg
        self.algo = algorithms.chosen(name, axes)
        self.needs = self.algo.needs(cfg)
        self.limit = self.algo.limit(cfg)
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
        self.folder = Path(cfg.resume) if cfg.resume else None
        self.rollout = self.monitor = self.lock = self.ref = self.critic = None  # opened last
        self.last = checkpoint.latest(self.folder) if cfg.resume else None
        self.value_norms: list[float] = []  # of the critic's gradient, one an update of the step
        self.step, self.not_finite, self.stop, self.clock = 0, 0, Stop(), Clock()
        self.evaluation: dict[str, float] = {}  # the last one's results
        self.before: dict[str, float] = {}  # those before training
        self.began = time.monotonic()

        checkpoint.refuse_used(cfg)
        self.task = tasks.load(cfg)
        start_is_ref = "logp_ref" in self.needs and axes.ref_model is None
        fresh = self.last is None or start_is_ref  # else the checkpoint has all that is needed
        self.start = cfg.model or (self.warm_start() if fresh else str(self.last))
        model, self.tokenizer = policy.load(str(self.last or self.start), self.device)
        self.policy = policy.Policy(model, cfg.temperature, getattr(torch, cfg.dtype))
        self.own_critic = self.algo.critic and axes.critic.trunk == "own"
        self.saved = (model,) * (1 + self.own_critic)  # whose sizes a checkpoint has; a critic's head is small
        if "logp_ref" in self.needs and not cfg.eval_only:  # the start weights, also after a resume
            self.ref = policy.frozen(axes.ref_model or str(self.start), self.policy, self.tokenizer)
        self.end = policy.end_tokens(model, self.tokenizer)
        rooms = [policy.room(scorer.model) for scorer in (self.policy, self.ref) if scorer is not None]
        tasks.check_lengths(self.task, self.tokenizer, cfg, min(rooms))
        if max(self.prompt(0).ids + tuple(self.end)) >= (known := model.get_input_embeddings().weight.shape[0]):
            raise Refused(f"--model {self.start}: the tokenizer has ids above the model's {known}; they do not fit")
        policy.check_scores(self.policy, torch.tensor([self.prompt(0).ids + (min(self.end),)], device=self.device))
        if not cfg.eval_only:
            checkpoint.refuse_full(cfg, *self.saved)
        self.engine = engine.LocalEngine(self.policy, self.tokenizer)
        self.score = partial(reward.score, self.task.reward)

    def warm_start(self) -> str:
        """The folder of the tiny model's warm start, made now if it is not cached."""
        return str(tiny.warm_started(tiny.WarmStart(digits=self.cfg.digits, seed=self.cfg.seed)))

    def prompt(self, number: int) -> Prompt:
        """Prompt `number` of the run."""
        return tasks.make_prompt(self.task.train(number), number, self.tokenizer, self.cfg, self.task)

    def sampling(self) -> engine.Sampling:
        """How training samples; evaluation too, but for its stream of random numbers."""
        key = (self.cfg.seed, rollout.TRAIN)
        return engine.Sampling(self.cfg.max_new_tokens, self.cfg.temperature, self.end, self.cfg.stop, key)

    def open(self) -> None:
        """Make or reopen the folder, restore the last checkpoint, start the thread that samples. Raises Refused."""
        cfg, axes = self.cfg, self.algo.axes
        self.optimizer = optimize.adamw(self.policy, cfg)
        parts = [checkpoint.Part(self.policy.model, self.optimizer)]
        if self.algo.critic:
            self.critic = Critic(self.policy, axes.critic.trunk)
            self.critic_optimizer = optimize.adamw(self.critic, cfg)
            parts.append(checkpoint.Part(self.critic, self.critic_optimizer, "critic."))
        self.parts = parts
        if self.folder is None:
            self.folder = checkpoint.new_folder(cfg, self.name)
        self.lock = checkpoint.locked(self.folder)
        if self.last is not None:
            state = checkpoint.restore(self.last, self.parts)
            self.step, self.evaluation, self.before = state["step"], state["evaluation"], state["before"]
            if state["problems"] != tasks.fingerprint(self.task):
                raise Refused(f"--data {cfg.data}: other problems than at the start; restore it, or start a new run")
            if self.step >= cfg.steps and (self.folder / "summary.json").exists():  # else only the end was cut short
                raise Refused(f"--resume {cfg.resume}: that run is done ({self.step} steps); add --steps {2 * self.step}")
        (self.folder / "summary.json").unlink(missing_ok=True)
        checkpoint.write_settings(self.folder, self.script, self.name, cfg, self.algo.axes)
        self.engine.version = self.step
        self.buffer = Buffer(cfg.prompts_per_step, version=self.step)
        self.monitor = Monitor(self.folder, self.step, cfg.steps)
        self.rollout = rollout.Rollout(self.buffer, self.make_group)

    async def make_group(self, number: int) -> Group:
        """G tries at prompt `number`."""
        return await rollout.group(self.engine, self.tokenizer, self.prompt(number), self.score, self.sampling(),
                                   self.cfg.samples_per_prompt)  # fmt: skip

    def take(self) -> list[Group]:
        """The groups of the next step: start what may start, wait for the oldest."""
        self.rollout.pump()
        try:
            groups = self.buffer.take(TIMEOUT, self.stop)
            self.algo.refuse_samples(groups, Refused)
            return groups
        except Stopped:
            raise Stopped(f"saved in {self.save()}; go on with --resume {self.folder}") from None
        except FloatingPointError:  # these weights are not worth it
            raise
        except BaseException as error:  # between two steps everything is consistent: whatever happened, lose nothing
            print(f"{type(error).__name__}: saved in {self.save()}", file=sys.stderr)
            raise

    def due(self, every: int) -> bool:
        """Something that happens every so many steps, and never for 0, happens now."""
        return every > 0 and self.step % every == 0

    def evaluate(self, samples: int = 1, within_step: bool = False) -> dict[str, float]:
        """Greedy accuracy, pass@k and the user's own numbers on held-out problems, by the weights of now.

        Within a step the first Ctrl-C waits for it, so that a resumed run has the same numbers.
        """
        prompts = [tasks.make_prompt(p, i, self.tokenizer, self.cfg, self.task) for i, p in enumerate(self.task.held_out)]
        total, started = len(prompts) * (samples + 1), time.monotonic()
        progress = partial(text_progress, "evaluate", total=total, started=started)
        question = evaluate.evaluate(self.engine, self.tokenizer, prompts, self.score, self.sampling(), samples,
                                     self.cfg.seed, lambda done: progress(done=done))  # fmt: skip
        results, groups = self.rollout.call(question, (lambda: False) if within_step else self.stop)
        own = average(note for g in groups for s in g.samples for note in s.notes)
        return results | {f"eval/{name}": value for name, value in own.items()}

    def record(self, groups: list[Group], batch: Batch, trained: torch.Tensor, norms: list[float],
               numbers: dict[str, float]) -> None:  # fmt: skip
        """After a step: publish its weights, measure, evaluate and save where that is due, admit the next groups.

        trained [B, T] holds the log-probs as they were when they were trained; norms are the gradient's, one an update;
        numbers are the loop's own, by the names of notes/metrics.md.
        Raises FloatingPointError after 5 steps without a finite gradient, and for weights that are not finite.
        """
        skipped = sum(not math.isfinite(norm) for norm in norms + self.value_norms)
        lost = any(of and not any(map(math.isfinite, of)) for of in (norms, self.value_norms))  # no update was made
        self.step += 1  # the version: completed training steps
        self.engine.pause()
        self.engine.update_weights(self.policy, version=self.step)
        self.engine.resume()
        metrics = step_metrics(groups, batch, trained, self.algo, len(norms))
        metrics |= {**numbers, "grad_norm": max(norms), "skipped": skipped}
        if self.value_norms:
            metrics["value/grad_norm"] = max(self.value_norms)
            self.value_norms = []
        if self.due(self.cfg.eval_every):
            with self.clock("evaluate"):
                self.evaluation = self.evaluate(within_step=True)
            metrics |= self.evaluation
        self.monitor.step(self.step, metrics, groups, self.clock.lap())
        if self.step == 1 and self.algo.explained and len(norms) == 1:
            self.monitor.explain_first_step(numbers["loss"])
        if self.due(5) or self.step == 1:
            self.monitor.show(self.step, groups[self.step % len(groups)])
            self.monitor.histograms(self.step, batch, trained, self.algo)
        self.not_finite = self.not_finite + 1 if lost else 0
        if self.not_finite == 5:
            raise FloatingPointError("5 steps in a row had no finite gradient; the last checkpoint is sound, this is not")
        if self.due(self.cfg.save_every) or self.step == self.cfg.steps:
            self.save()
        self.buffer.trained(self.step)  # admits the groups of the next step

    def save(self) -> Path:
        """A checkpoint of now; resuming from it is exact. Raises FloatingPointError for weights that are not finite."""
        if not all(weight.isfinite().all() for part in self.parts for weight in part.module.parameters()):
            raise FloatingPointError("weights are not finite, so they are not saved; go back to a checkpoint, lower --lr")
        state = {"step": self.step, "evaluation": self.evaluation, "before": self.before,
                 "problems": tasks.fingerprint(self.task)}  # fmt: skip
        score = self.evaluation.get("eval/pass@1") if self.due(self.cfg.eval_every) else None
        return checkpoint.save(self.folder, self.step, self.parts, self.tokenizer, state, score)

    def begin(self) -> None:
        """Evaluate before training has changed anything. A resumed run has done that."""
        if self.step == 0 and self.cfg.eval_every:
            self.evaluation = self.before = self.evaluate()
            self.monitor.evaluation(0, self.evaluation)

    def finish(self) -> None:
        """Evaluate once more; say what the run reached, where everything lies, what to try next (and in summary.json)."""
        results, before = self.evaluate(self.cfg.eval_samples) if self.cfg.eval_every else {}, self.before
        summary = {"steps": self.step, "seconds": time.monotonic() - self.began, "before": before, "after": results,
                   "command": config.command(self.script, self.name, self.cfg, self.algo.axes)}  # fmt: skip
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        last = checkpoint.latest(self.folder)
        asked = ("task", "digits", "data", "eval_data", "system_prompt", "prompt_suffix", "stop", "reward", "dtype",
                 "seed", "max_new_tokens", "temperature", "eval_problems", "eval_samples")  # fmt: skip
        again = Config(**{f: getattr(self.cfg, f) for f in asked}, model=str(last), eval_only=True)
        print(f"\ndone: step {self.step}, {summary['seconds']:.0f} s since this start")
        for key, value in results.items():
            was = f"{before[key]:.3f} → " if key in before else ""
            print(f"  {key.removeprefix('eval/'):12} {was}{value:.3f}")
        print(f"the run       {self.folder} (metrics.jsonl, samples.jsonl, summary.json)\n"
              f"weights       {last} (AutoModelForCausalLM.from_pretrained opens it)\n"
              f"curves        tensorboard --logdir {self.folder.parent}\n"
              f"go on         python {self.script} --resume {self.folder} --steps {2 * self.cfg.steps}\n"
              f"evaluate      {config.command(self.script, self.name, again, self.algo.axes)}")  # fmt: skip
        if self.cfg.task == "arithmetic":
            print(f"harder        python {self.script} {self.name} --digits {min(12, max(6, self.cfg.digits + 1))}\n"
                  f"another way   python train_grpo.py {'dr_grpo' if self.name != 'dr_grpo' else 'rloo'}")  # fmt: skip

    def close(self) -> None:
        """End the thread and close the files, as far as they were opened."""
        for part in (self.rollout, self.monitor, self.lock):
            if part is not None:
                part.close()


@contextmanager
def started(script: str, name: str, cfg: Config, axes: Axes) -> Iterator[Run | None]:
    """A run ready to train, or None where the flags ask only to look (--dry-run) or to evaluate (--eval-only)."""
    run = Run(script, name, cfg, axes)
    print(f"{run.task.says}; {run.start} on {run.device}", flush=True)
    if cfg.dry_run:
        dry_run(run)
        yield None
    elif cfg.eval_only:
        run.rollout = rollout.Rollout(Buffer(cfg.prompts_per_step), run.make_group)
        for key, value in run.evaluate(cfg.eval_samples).items():
            print(f"  {key.removeprefix('eval/'):12} {value:.3f}")
        run.rollout.close()
        yield None
    else:
        try:
            run.open()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, run.stop.handle)
            yield run
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")
            raise Stopped(f"nobody reads the output any more; saved in {run.save()}") from None
        finally:
            run.close()
