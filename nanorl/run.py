"""What is a run? Its folder, its parts put together from the flags, its signals, its beginning and its end.

Everything that `train_grpo.py` needs beside the loop itself stands here, so that the loop fits on one page.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from nanorl import algorithms, checkpoint, engine, engines, evaluate, optimize, policy, rollout, scoring, summary
from nanorl import tasks, tiny
from nanorl.axes import Axes
from nanorl.buffer import Buffer, Stopped
from nanorl.config import Config, Refused
from nanorl.critic import Critic
from nanorl.launch import Stop
from nanorl.local import LocalEngine
from nanorl.memory import dry_run
from nanorl.metrics import average, of_tokens, published, step_metrics, utilisation
from nanorl.monitor import Clock, Monitor, log, text_progress
from nanorl.sample import Batch, Group, Prompt
from nanorl.timeline import Lane, Trace

TIMEOUT = 1800.0  # seconds without a single finished group, after which something is stuck


class Run:
    """The parts of a run and what it does around its steps: evaluate, save, finish."""

    def __init__(self, script: str, name: str, cfg: Config, axes: Axes):
        self.script, self.name, self.cfg = Path(script).name, name, cfg
        self.axes, self.algo = axes, algorithms.chosen(name, axes, cfg.pace.stale, cfg.max_new_tokens)
        self.needs = self.algo.needs(cfg)
        self.limit = self.algo.limit(cfg)
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
        self.folder = Path(cfg.resume) if cfg.resume else None
        self.rollout = self.scorer = self.engine = self.monitor = self.trace = self.lock = self.ref = self.critic = None
        self.last = checkpoint.latest(self.folder) if cfg.resume else None
        self.value_norms: list[float] = []  # of the critic's gradient, one an update of the step
        self.step, self.not_finite, self.stop, self.clock = 0, 0, Stop(), Clock()
        self.evaluation: dict[str, float] = {}  # the last one's results
        self.before: dict[str, float] = {}  # those before training
        self.began = time.monotonic()

        checkpoint.refuse_used(cfg)
        for flag, device in (("--device", self.device), ("--engine-device", cfg.pace.engine_device)):
            policy.refuse_device(device or self.device, flag)
        self.task = tasks.load(cfg)
        start_is_ref = "logp_ref" in self.needs and axes.ref_model is None
        fresh = self.last is None or start_is_ref or cfg.pace.delay == "inf"  # else the checkpoint has all that is needed
        self.start = cfg.model or (self.warm_start() if fresh else str(self.last))
        model, self.tokenizer = policy.load(str(self.last or self.start), self.device)
        self.policy = policy.Policy(model, cfg.temperature, getattr(torch, cfg.dtype))
        self.own_critic = self.algo.critic and axes.critic.trunk == "own"
        self.saved = (model,) * (1 + self.own_critic)  # whose sizes a checkpoint has; a critic's head is small
        if "logp_ref" in self.needs and not cfg.eval_only:  # the start weights, also after a resume
            self.ref = policy.frozen(axes.ref_model or str(self.start), self.policy, self.tokenizer)
        self.end = policy.end_tokens(model, self.tokenizer)
        rooms = [policy.room(scorer.model) for scorer in (self.policy, self.ref) if scorer is not None]
        rooms += [] if cfg.eval_only else engines.rooms(self)  # before anything is written
        tasks.check_lengths(self.task, self.tokenizer, cfg, min(rooms))
        if max(self.prompt(0).ids + tuple(self.end)) >= (known := model.get_input_embeddings().weight.shape[0]):
            raise Refused(f"--model {self.start}: the tokenizer has ids above the model's {known}; they do not fit")
        policy.check_scores(self.policy, torch.tensor([self.prompt(0).ids + (min(self.end),)], device=self.device))
        if not cfg.eval_only:
            checkpoint.refuse_full(cfg, *self.saved)
        self.engine = self.judge = LocalEngine(self.policy, self.tokenizer)  # evaluation is by the weights of now
        self.rewards = Lane("rewards", "reward")

    def warm_start(self) -> str:
        """The folder of the tiny model's warm start, made now if it is not cached."""
        return str(tiny.warm_started(tiny.WarmStart(digits=self.cfg.digits, seed=self.cfg.seed)))

    def prompt(self, number: int) -> Prompt:
        """Prompt `number` of the run."""
        return tasks.make_prompt(self.task.train(number), number, self.tokenizer, self.cfg, self.task)

    async def score(self, prompt: Prompt, completion: str, completion_ids: Sequence[int]) -> float:
        """The task's reward; when it was at work goes into the timeline. Raises Unscored for a sample to leave out."""
        start = time.monotonic()
        try:
            verdict = await self.scorer.score(prompt, completion, completion_ids)
        finally:
            self.rewards.add(start, time.monotonic(), rewards=1)
        for name, value in verdict.notes:
            log(name, value)
        if verdict.value is None:
            raise rollout.Unscored(verdict.fault)
        if prompt.task:
            log(f"task/{prompt.task}/reward", verdict.value)
        return verdict.value

    def sampling(self) -> engine.Sampling:
        """How training samples; evaluation too, but for its stream of random numbers."""
        key = (self.cfg.seed, rollout.TRAIN)
        return engine.Sampling(self.cfg.max_new_tokens, self.cfg.temperature, self.end, self.cfg.stop, key)

    def open(self) -> None:
        """Make or reopen the folder, restore the last checkpoint, start the thread that samples. Raises Refused."""
        cfg, axes = self.cfg, self.algo.axes
        self.scorer = scoring.scorer(self.task.rewards, cfg.scoring)  # first: it starts while the rest is put together
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
        state = {}
        if self.last is not None:
            state = checkpoint.restore(self.last, self.parts)
            self.step, self.evaluation, self.before = state["step"], state["evaluation"], state["before"]
            if state["problems"] != tasks.fingerprint(self.task):
                raise Refused(f"--data {cfg.data}: other problems than at the start; restore it, or start a new run")
            if self.step >= cfg.steps and (self.folder / "summary.json").exists():  # else only the end was cut short
                raise Refused(f"--resume {cfg.resume}: that run is done ({self.step} steps); add --steps {2 * self.step}")
        (self.folder / "summary.json").unlink(missing_ok=True)
        checkpoint.write_settings(self.folder, self.script, self.name, cfg, self.axes)
        self.buffer = Buffer(cfg.prompts_per_step, self.step, cfg.pace, state.get("buffer"), cfg.steps)
        self.monitor, self.trace = Monitor(self.folder, self.step, cfg.steps), Trace(self.folder / "trace.json")
        self.rollout = rollout.Rollout(self.buffer, self.make_group)
        self.judge.version = self.step
        self.engine = engines.sampler(self)
        self.buffer.acknowledged = self.engine.version
        if self.beside:  # the first weights come from here, whatever model it has loaded
            self.engine.update_weights(self.policy, self.step)

    @property
    def beside(self) -> bool:
        """The engine is beside this process, with weights of its own."""
        return self.cfg.engine != "local"

    def acknowledged(self, version: int) -> None:
        """On the rollout's thread: the engine beside has this version now."""
        self.buffer.acknowledge(version)
        self.rollout.start_admitted()

    async def make_group(self, number: int) -> Group:
        """G tries at prompt `number`."""
        return await rollout.group(self.engine, self.tokenizer, self.prompt(number), self.score, self.sampling(),
                                   self.cfg.samples_per_prompt)  # fmt: skip

    def take(self) -> list[Group]:
        """The groups of the next step: start what may start, wait for the oldest."""
        self.rollout.pump()
        try:
            self.algo.refuse_samples(groups := self.buffer.take(TIMEOUT, self.stop), Refused)
            return groups
        except Stopped:
            raise Stopped(f"saved in {self.save()}; go on with --resume {self.folder}") from None
        except (FloatingPointError, KeyboardInterrupt):  # these weights are not worth it; asked to stop at once
            raise
        except BaseException as error:  # between two steps everything is consistent: whatever happened, lose nothing
            print(f"{type(error).__name__}: saved in {self.save()}; go on with --resume {self.folder}", file=sys.stderr)
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
        question = evaluate.evaluate(self.judge, self.tokenizer, prompts, self.score, self.sampling(), samples,
                                     self.cfg.seed, self.cfg.pace.deadline, lambda done: progress(done=done))  # fmt: skip
        with self.clock("evaluate"):
            results, groups = self.rollout.call(question, "the evaluation", (lambda: False) if within_step else self.stop)
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
        self.publish()
        metrics = step_metrics(groups, batch, trained, self.algo, len(norms))
        metrics |= {**numbers, "grad_norm": max(norms), "skipped": skipped, **self.buffer.lap(),
                    **self.scorer.lap()}  # fmt: skip
        if self.value_norms:
            metrics["value/grad_norm"] = max(self.value_norms)
            self.value_norms = []
        if self.due(self.cfg.eval_every):
            self.evaluation = self.evaluate(within_step=True)
            metrics |= self.evaluation
        stages, spans, seconds = self.clock.lap()
        spans += self.engine.lap() + self.rewards.lap()
        self.trace.write(spans)
        self.monitor.step(self.step, metrics | utilisation(spans, seconds) | published(spans), groups, stages,
                          of_tokens(batch, trained, self.algo, len(norms)))  # fmt: skip
        if self.step == 1 and self.algo.explained and len(norms) == 1:
            self.monitor.explain_first_step(numbers["loss"])
        if self.due(5) or self.step == 1:
            self.monitor.show(self.step, groups[self.step % len(groups)])
            self.monitor.histograms(self.step, batch, trained, self.algo)
        self.not_finite = self.not_finite + 1 if lost else 0
        if self.not_finite == 5:
            raise FloatingPointError("5 steps in a row had no finite gradient; the last checkpoint is sound, this is not")
        if self.due(self.cfg.save_every) or self.step == self.cfg.steps:
            with self.clock("save"):
                self.save()

    def publish(self) -> None:
        """Hand the step's weights to the engine. Its groups are not outstanding any more, so others may start."""
        with self.clock("publish"):
            if self.cfg.pace.delay == 0:  # who shares the weights has nothing under way, the process finds a place itself
                self.engine.update_weights(self.policy, self.step)
            else:
                self.rollout.between(lambda: self.engine.update_weights(self.policy, self.step), "the new weights' turn")
        self.buffer.acknowledge(self.engine.version)
        self.buffer.trained(self.step)
        if self.beside:  # who shares this process waits until the trainer does
            self.rollout.pump()

    def save(self) -> Path:
        """A checkpoint of now; resuming from it is exact. Raises FloatingPointError for weights that are not finite."""
        if not all(weight.isfinite().all() for part in self.parts for weight in part.module.parameters()):
            raise FloatingPointError("weights are not finite, so they are not saved; go back to a checkpoint, lower --lr")
        state = {"step": self.step, "evaluation": self.evaluation, "before": self.before,
                 "problems": tasks.fingerprint(self.task), "buffer": self.buffer.state()}  # fmt: skip
        score = self.evaluation.get("eval/pass@1") if self.due(self.cfg.eval_every) else None
        return checkpoint.save(self.folder, self.step, self.parts, self.tokenizer, state, score)

    def begin(self) -> None:
        """Evaluate before training has changed anything. A resumed run has done that."""
        if self.beside:
            self.rollout.pump()
        if self.step == 0 and self.cfg.eval_every:
            self.evaluation = self.before = self.evaluate()
            self.trace.write(self.clock.lap()[1])
            self.monitor.evaluation(0, self.evaluation)

    def finish(self) -> None:
        """Evaluate once more; say what the run reached."""
        self.engine.close()
        results = self.evaluate(self.cfg.eval_samples) if self.cfg.eval_every else {}
        self.trace.write(self.clock.lap()[1])
        summary.finish(self, results)

    def close(self) -> None:
        """End the thread, the other processes, and the files, as far as they were opened."""
        with ExitStack() as parts:  # whatever one of them raises
            for part in filter(None, (self.lock, self.trace, self.monitor, self.engine, self.scorer, self.rollout)):
                parts.callback(part.close)


@contextmanager
def started(script: str, name: str, cfg: Config, axes: Axes) -> Iterator[Run | None]:
    """A run ready to train, or None where the flags ask only to look (--dry-run) or to evaluate (--eval-only)."""
    run = Run(script, name, cfg, axes)
    print(f"{run.task.says}; {run.start} on {run.device}", flush=True)
    if cfg.dry_run:
        dry_run(run)
        yield None
    elif cfg.eval_only:
        run.scorer = scoring.scorer(run.task.rewards, cfg.scoring)
        run.rollout = rollout.Rollout(Buffer(cfg.prompts_per_step), run.make_group)
        try:
            for key, value in run.evaluate(cfg.eval_samples).items():
                print(f"  {key.removeprefix('eval/'):12} {value:.3f}")
        finally:
            run.close()
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
