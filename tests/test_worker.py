"""The engine in a process of its own: the same answers, exact under interruption; what becomes of a run when one dies."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanorl import checkpoint, reward, timeline, tiny
from nanorl.buffer import Buffer
from nanorl.config import Lost
from nanorl.engine import Broken, Sampling
from nanorl.engine_process import Serving
from nanorl.local import LocalEngine
from nanorl.policy import Policy
from nanorl.rollout import TRAIN, group
from nanorl.run import Run
from nanorl.sample import Group, Prompt, Sample, collate
from nanorl.worker import WorkerEngine, weights_of
from tests.test_delayed import WORDS, check_exact, equal, jobs_of, small, weights, wide
from tests.test_train import ROOT, launch, lines, same, tuples

ROOM = small().model.config.max_position_embeddings
LONG = 400  # tokens of an answer during which a test can do something

# ------------------------------------------------------------------------------------------------ the process


def alive(pid):
    """A process of this id runs (a zombie, whose parent has not asked for its status yet, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid, seconds=10.0):
    """The process has ended within so many seconds."""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """A run that waits for samples which never come fails soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanorl.run.TIMEOUT", 20.0)
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a small model."""
    folder = tmp_path_factory.mktemp("start")
    for part in (small().model, WORDS):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def begin(start, tmp_path_factory):
    """begin(restart=False): a worker engine of version 0, and the loop that it lives on, ended with the module.

    `sent` and `received` are its messages in both directions, `acknowledged` and `failed` what it told the run.
    """
    begun = []

    def begin(restart=False):
        it = SimpleNamespace(loop=asyncio.new_event_loop(), sent=[], received=[], acknowledged=[], failed=[])
        log = tmp_path_factory.mktemp("log") / "engine-0.log"
        settings = {"model": str(start), "device": "cpu", "dtype": "float32", "threads": 1, "version": 0}
        it.engine = WorkerEngine(settings, log, it.loop, restart, it.acknowledged.append, it.failed.append)
        send, receive = it.engine.send, it.engine.receive
        it.engine.send = lambda message, *tensors: (it.sent.append(message), send(message, *tensors))
        it.engine.receive = lambda message: (it.received.append(message), receive(message))
        it.policy = small()
        begun.append(it)
        return it

    yield begin
    for it in begun:
        it.engine.close()
        it.loop.close()


@pytest.fixture(scope="module")
def shared(begin):
    """One process for all quick tests, torchrun's variables set when it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in TORCHRUN:
            patch.setenv(name, "7")
        patch.setenv("LOCALE_PATH_OF_NOBODY", "stays")
        return begin()


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR",
            "MASTER_PORT", "TORCHELASTIC_RUN_ID")  # fmt: skip


@pytest.fixture
def worker(shared):
    """The shared process with the small model's weights under a new version, nothing heard or said yet."""
    in_time(shared, publish(shared, small()))
    shared.engine.lap()
    for kept in (shared.sent, shared.received, shared.acknowledged):
        kept.clear()
    return shared


def in_time(it, question):
    """The answer to a question asked on the loop."""
    return it.loop.run_until_complete(asyncio.wait_for(question, timeout=60))


async def until(what):
    """Until what() is true."""
    while not what():
        await asyncio.sleep(0.001)


async def publish(it, policy):
    """Weights of the next version; back when the process samples with them."""
    version = it.engine.version + 1
    it.engine.update_weights(policy, version)
    await until(lambda: it.engine.version >= version)
    return version


async def answers(engine, jobs):
    """All completions, the requests having arrived together and in this order."""
    return await asyncio.gather(*(engine.generate(*job) for job in jobs))


def locally(jobs):
    """The same, from the local engine with the small model's weights."""
    return asyncio.run(answers(LocalEngine(small(), WORDS), jobs))


def untimed(completions):
    """Completions without the version, which is another in each test."""
    return [(c.ids, c.logp, c.finish) for c in completions]


# ------------------------------------------------------------------------------------------------ the same answers


def test_requests_of_one_moment_travel_as_one_message_in_their_order_and_are_answered_bit_for_bit(worker):
    jobs = jobs_of()
    got = in_time(worker, answers(worker.engine, jobs))
    (message,) = worker.sent
    assert message["kind"] == "generate"
    assert [request["ids"] for request in message["requests"]] == [list(ids) for ids, _ in jobs]
    assert [request["id"] for request in message["requests"]] == sorted(request["id"] for request in message["requests"])
    assert untimed(got) == untimed(locally(jobs))
    assert {v for c in got for v in c.version} == {worker.engine.version}
    assert not worker.engine.asked and not worker.engine.outbox


def test_groups_that_start_together_travel_together_in_their_order(worker):
    """As Rollout starts them: a task each, and in it one for each try."""

    async def started_together():
        prompts = [Prompt(number, ids, "", "") for number, (ids, _) in enumerate(jobs_of()[:4])]
        groups = [group(worker.engine, WORDS, prompt, free, Sampling(8, key=(0, TRAIN)), 3) for prompt in prompts]
        return await asyncio.gather(*map(asyncio.ensure_future, groups))

    in_time(worker, started_together())
    (message,) = worker.sent
    keys = [request["sampling"]["key"] for request in message["requests"]]
    assert keys == [(0, TRAIN, n, i, 0) for n in range(4) for i in range(3)]


async def free(prompt, text, ids):
    """A reward of nothing."""
    return 0.0


def test_requests_of_two_moments_travel_apart(worker):
    async def two_moments():
        first = asyncio.ensure_future(answers(worker.engine, jobs_of()[:2]))
        await until(lambda: worker.sent)
        return await first, await answers(worker.engine, jobs_of()[2:])

    in_time(worker, two_moments())
    assert [len(message["requests"]) for message in worker.sent] == [2, 4]


@pytest.mark.parametrize("how, ends", [
    ({"temperature": 0.0}, False), ({"temperature": 2.0}, False), ({"end": frozenset({3, 5, 11})}, True),
    ({"stop": ("7", "+(")}, True), ({"end": frozenset({2}), "stop": ("no such",)}, True)])  # fmt: skip
def test_every_way_to_sample_crosses_unchanged(worker, how, ends):
    """Greedy, hot, several end tokens, stop texts."""
    jobs = jobs_of(**how)
    expected = locally(jobs)
    assert untimed(in_time(worker, answers(worker.engine, jobs))) == untimed(expected)
    assert ("stop" in {c.finish for c in expected}) == ends


def test_what_has_no_room_is_refused_as_the_local_engine_does_and_the_others_are_answered(worker):
    jobs = [*jobs_of()[:2], ((1,) * 100, Sampling(ROOM - 99, key=(1,))), ((), Sampling(4, key=(1,)))]

    async def together():
        return await asyncio.gather(*(worker.engine.generate(*job) for job in jobs), return_exceptions=True)

    *good, long, empty = in_time(worker, together())
    assert untimed(good) == untimed(locally(jobs[:2]))
    for error, job in ((long, jobs[2]), (empty, jobs[3])):
        with pytest.raises(ValueError) as local:
            locally([job])
        assert type(error) is ValueError and str(error) == str(local.value)
    with pytest.raises(ValueError, match="no images"):
        in_time(worker, worker.engine.generate((1,), Sampling(2), images=("picture",)))


# ------------------------------------------------------------------------------------------------ new weights


def test_interrupted_again_and_again_every_token_is_of_the_weights_whose_version_it_carries(worker):
    """Long answers, new weights as soon as the last ones are there. Nothing is thrown away, nothing sampled twice."""
    jobs = [(ids, replace(how, max_new_tokens=LONG)) for ids, how in jobs_of()]
    kept = {worker.engine.version: weights(small())}

    async def interrupted():
        running = asyncio.ensure_future(answers(worker.engine, jobs))
        await until(lambda: worker.sent)
        while not running.done() and len(kept) < 9:
            wide(worker.policy.model, 50 + len(kept))
            version = worker.engine.version + 1
            kept[version] = weights(worker.policy)
            assert await publish(worker, worker.policy) == version
        return await running

    got = in_time(worker, interrupted())
    assert all(list(c.version) == sorted(c.version) for c in got) and max(len(set(c.version)) for c in got) > 2
    assert {(len(c.ids), len(c.logp), len(c.version), c.finish) for c in got} == {(LONG, LONG, LONG, "length")}
    assert worker.acknowledged == [*kept][1:]
    spans = worker.engine.lap()
    assert sum(span.args["rows"] for span in spans if span.name == "generate") == LONG * len(jobs)
    assert len(jobs) in {span.args["rows"] for span in spans if span.name == "interrupt"}
    check_exact(worker.policy, kept, jobs, got)


def test_weights_are_theirs_once_sent_whatever_the_trainer_does_next(worker):
    """Overwritten before the process can have read them all: they have crossed as bytes, or wait as a copy."""
    wide(worker.policy.model, 3)
    expected = asyncio.run(answers(LocalEngine(worker.policy, WORDS), jobs_of()))

    async def overwritten():
        version = worker.engine.version + 1
        worker.engine.update_weights(worker.policy, version)
        wide(worker.policy.model, 4)
        await until(lambda: worker.engine.version == version)
        return await answers(worker.engine, jobs_of())

    assert untimed(in_time(worker, overwritten())) == untimed(expected)


def test_an_engine_that_stands_still_holds_nobody_up_and_has_everything_when_it_goes_on(worker):
    """More weights than the sockets hold: the trainer does not wait for them to be read."""
    os.kill(worker.engine.process.pid, signal.SIGSTOP)
    for ahead in range(1, 9):
        worker.engine.update_weights(worker.policy, worker.engine.version + ahead)
    os.kill(worker.engine.process.pid, signal.SIGCONT)
    last = worker.engine.version + 8
    (c,) = in_time(worker, answers(worker.engine, jobs_of()[:1]))
    assert set(c.version) == {last} and worker.acknowledged == [*range(last - 7, last + 1)]


def test_a_request_sent_behind_weights_is_answered_by_them_although_nobody_waited(worker):
    before = worker.engine.version
    worker.engine.update_weights(worker.policy, before + 1)
    (c,) = in_time(worker, answers(worker.engine, jobs_of()[:1]))
    assert set(c.version) == {before + 1} and worker.acknowledged == [before + 1]


def test_tensors_of_every_type_and_shape_cross_bit_for_bit(monkeypatch):
    """Among them one number, none at all, and one whose rows do not lie one behind the other."""
    sizes = ((), (3,), (0, 4), (2, 0), (5, 1, 3))
    random, types = torch.Generator().manual_seed(0), (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    sent = [(100 * torch.randn(size, generator=random)).to(dtype) for size in sizes for dtype in types]
    sent += [torch.arange(12.0).view(3, 4).T, torch.tensor([torch.nan, -0.0, torch.inf])]
    got, ended = [], threading.Event()
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    serving = Serving(theirs, None)
    serving.loop = SimpleNamespace(call_soon_threadsafe=lambda go, *given: go(*given))
    serving.kinds = {"weights": lambda message, staged: got.extend(staged)}
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    threading.Thread(target=serving.listen).start()
    shapes = [["", str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in sent]
    mail = SimpleQueue()
    mail.put(({"kind": "weights", "tensors": shapes}, sent))
    mail.put(None)
    WorkerEngine.post(None, ours, mail)
    ours.close()
    assert ended.wait(10)  # the trainer is gone, and so is whoever listens to it
    theirs.close()
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in sent]
    for one, other in zip(got, sent):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        assert one.dtype == other.dtype and torch.equal(*bits)


def test_tied_weights_cross_once_under_their_first_name_and_buffers_too():
    net = tiny.model(seed=0)
    names = [name for name, _ in weights_of(net)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert {*net.state_dict()} - {"lm_head.weight"} <= {*names} and len(names) == len(set(names))
    norm = nn.BatchNorm1d(3)
    assert {name for name, _ in weights_of(norm)} == {*norm.state_dict()}


# ------------------------------------------------------------------------------------------------ stops and cancels


def test_paused_it_samples_nothing_but_takes_weights_and_requests_and_resumed_it_goes_on(worker):
    jobs = jobs_of(new=LONG)

    async def paused():
        early = asyncio.ensure_future(answers(worker.engine, jobs[:3]))
        await until(lambda: worker.sent)
        worker.engine.pause()
        late = asyncio.ensure_future(answers(worker.engine, jobs[3:]))
        await publish(worker, small())  # acknowledged: what was sent before it has arrived
        worker.engine.lap()
        await asyncio.sleep(0.1)
        await publish(worker, small())
        assert not early.done() and not late.done()
        assert [span.name for span in worker.engine.lap()] == ["interrupt" if rows_seen(worker) else "sync"]
        worker.engine.resume()
        return await early + await late

    got = in_time(worker, paused())
    assert [c.ids for c in got] == [c.ids for c in locally(jobs)]
    assert {c.version[-1] for c in got} == {worker.engine.version}


def rows_seen(it):
    """Rows that the last weights to arrive interrupted."""
    return it.received[-1]["spans"][-1]["args"]["rows"]


def test_a_cancelled_request_leaves_the_process_and_changes_no_other(worker):
    """It would go on for hundreds of tokens; what was done, and what the next weights meet, show that it left."""
    (long_ids, how), other = jobs_of()[2], jobs_of()[0]
    endless = long_ids, replace(how, max_new_tokens=2 * LONG, key=(8,))

    async def cancelled():
        running = asyncio.ensure_future(worker.engine.generate(*endless))
        stays = asyncio.ensure_future(worker.engine.generate(*other))
        await until(lambda: worker.sent)
        running.cancel()
        result = await stays
        with pytest.raises(asyncio.CancelledError):
            await running
        await publish(worker, small())  # behind it in line: whatever was sampled before is told by now
        await asyncio.sleep(0.1)
        await publish(worker, small())
        return result

    assert in_time(worker, cancelled()).ids == locally([other])[0].ids
    assert [message["kind"] for message in worker.sent] == ["generate", "cancel", "weights", "weights"]
    rows = sum(span.args["rows"] for span in worker.engine.lap() if span.name == "generate")
    assert rows < LONG and rows_seen(worker) == 0 and not worker.engine.asked


def test_what_it_did_is_told_once(worker):
    jobs = jobs_of()
    got = in_time(worker, answers(worker.engine, jobs))
    begun = time.monotonic()
    spans = worker.engine.lap()
    assert {span.lane for span in spans} == {"engine 0"} and {span.name for span in spans} == {"generate"}
    assert sum(span.args["rows"] for span in spans) == sum(len(c.ids) for c in got)
    assert sum(span.args["prefilled"] for span in spans) == sum(len(ids) for ids in {ids for ids, _ in jobs})
    assert all(begun - 60 < span.start <= span.end < begun for span in spans)  # one clock for both processes
    assert worker.engine.lap() == []


def test_torchruns_variables_do_not_reach_it_and_others_do(worker):
    """It is no rank, and would wait for others or take their port."""
    entries = Path(f"/proc/{worker.engine.process.pid}/environ").read_text().split("\0")
    environment = dict(entry.partition("=")[::2] for entry in entries)
    assert not environment.keys() & set(TORCHRUN)
    assert environment["LOCALE_PATH_OF_NOBODY"] == "stays" and environment["OMP_NUM_THREADS"] == "1"
    assert str(ROOT) in environment["PYTHONPATH"].split(os.pathsep)


def test_weights_that_are_not_numbers_break_every_request_and_sound_ones_mend_it(worker):
    """Broken, from the kind of error that it was there; its traceback is in the log."""
    with torch.no_grad():
        worker.policy.model.get_output_embeddings().weight.fill_(torch.nan)
    in_time(worker, publish(worker, worker.policy))

    async def together():
        return await asyncio.gather(*(worker.engine.generate(*job) for job in jobs_of()), return_exceptions=True)

    broken = in_time(worker, together())
    wide(worker.policy.model, 0)
    assert {(type(error), type(error.__cause__)) for error in broken} == {(Broken, FloatingPointError)}
    assert {str(error) for error in broken} == {str(broken[0].__cause__)} and "not finite" in str(broken[0])
    assert "FloatingPointError" in worker.engine.log.read_text()
    in_time(worker, publish(worker, small()))
    assert untimed(in_time(worker, answers(worker.engine, jobs_of()))) == untimed(locally(jobs_of()))


@pytest.mark.parametrize("change", ["missing", "left over", "of another shape"])
def test_weights_that_do_not_fit_one_to_one_are_refused_by_name_before_any_is_loaded(change):
    engine = LocalEngine(small(), WORDS)
    serving = Serving(None, engine)
    wide(other := small().model, 1)
    theirs = {name: tensor.detach() for name, tensor in weights_of(other)}
    last = [*theirs][-1]
    if change == "missing":
        del theirs[last]
    elif change == "left over":
        theirs["another"] = torch.zeros(1)
    else:
        theirs[last] = torch.zeros(*theirs[last].shape, 1)
    message = {"version": 1, "tensors": [[name, "float32", list(tensor.shape)] for name, tensor in theirs.items()]}
    with pytest.raises(ValueError, match="another" if change == "left over" else last):
        serving.load(message, [*theirs.values()])
    assert equal(weights(engine.policy), weights(small())) and engine.version == 0


# ------------------------------------------------------------------------------------------------ failures, in any engine


P, G = 2, 2
SIZES = ("--digits", 1, "--max-new-tokens", 6, "--prompts-per-step", P, "--samples-per-prompt", G, "--lr", 1e-2,
         "--eval-problems", 4, "--eval-every", 0, "--reward-workers", 0)  # fmt: skip


def paying(monkeypatch, worth):
    """worth(prompt's number, ids) becomes the reward; it may be one to wait for."""

    async def score(function, prompt, text, ids):
        told = worth(prompt.number, ids)
        return float(await told if inspect.isawaitable(told) else told)

    monkeypatch.setattr(reward, "score", score)


async def forever():
    """A reward that never comes."""
    await asyncio.Event().wait()


def spread(number, ids):
    """A reward that differs in nearly every group."""
    return (1 + sum(ids)) % 7


def state_of(folder):
    """What the last checkpoint says of the prompts."""
    return checkpoint.read(checkpoint.latest(folder))["state"]["buffer"]


def happened(state):
    """What groups ended as, beside being trained on."""
    return {why: count for why, count in state["ended"].items() if count}


def check_accounts(folder):
    """Every prompt was trained, filtered or failed, once, or is still owed; none is missing. Returns those trained.

    Trained: by the samples of the steps that are kept, P groups in each but for those that were left out. Rejected, or
    left out: all others that had begun and are not owed, and the checkpoint has counted exactly so many.
    """
    state, rows, steps = state_of(folder), lines(folder, "samples"), checkpoint.read(checkpoint.latest(folder))["step"]
    counts = Counter(row["prompt"] for row in rows)
    assert {*counts.values()} <= {G} and len({(row["step"], row["prompt"]) for row in rows}) == len(counts)
    assert {row["step"] for row in rows} == {*range(1, steps + 1)}
    assert len(counts) + state["ended"].get("left out", 0) == P * steps
    trained, owed = {*counts}, state["again"]
    assert len({*owed}) == len(owed) and trained.isdisjoint(owed)
    assert trained | {*owed} <= {*range(state["next"])}
    assert state["next"] - len(trained) - len(owed) == sum(state["ended"].values())
    return trained


def test_a_reward_that_raises_is_counted_and_others_come_in_its_place(start, tmp_path, monkeypatch):
    def worth(number, ids):
        if number % 5 == 3:
            raise OSError("no such judge")
        return spread(number, ids)

    paying(monkeypatch, worth)
    assert launch(*SIZES, "--model", start, "--steps", 10, "--max-failed", 0.5, "--out", tmp_path / "run") == 0
    state = state_of(tmp_path / "run")
    assert check_accounts(tmp_path / "run") == {n for n in range(10 * P + 5) if n % 5 != 3}
    assert happened(state) == {"failed": 5} and state["again"] == []
    assert [line["buffer/failed"] for line in lines(tmp_path / "run")][-1] == 5


def test_above_the_share_that_may_fail_the_run_stops_saved_with_the_first_traceback(start, tmp_path, monkeypatch, capsys):
    """Three of the last hundred with 0.02."""
    numbers = itertools.count(1)

    def the_judge(number, ids):
        if sum(ids) % 2:
            raise OSError(f"failure {next(numbers)}")
        return 0.0

    paying(monkeypatch, the_judge)
    with pytest.raises(OSError, match="^failure 1$") as raised:
        launch(*SIZES, "--model", start, "--steps", 50, "--max-failed", 0.02, "--on-reward-error", "stop",
               "--out", tmp_path / "run")
    assert "the_judge" in {frame.name for frame in traceback.extract_tb(raised.value.__traceback__)}
    assert "saved in" in capsys.readouterr().err and state_of(tmp_path / "run")["ended"]["failed"] == 3
    check_accounts(tmp_path / "run")


def test_a_reward_that_hangs_fails_at_its_deadline_and_says_so(start, tmp_path, monkeypatch, capsys):
    """Its place goes to another; where none may fail, the run stops with what it was."""
    paying(monkeypatch, lambda number, ids: forever() if number == 3 else spread(number, ids))
    flags = (*SIZES, "--model", start, "--steps", 4, "--deadline", 0.5)
    assert launch(*flags, "--max-failed", 0.5, "--out", tmp_path / "run") == 0
    assert check_accounts(tmp_path / "run") == {0, 1, 2, 4, 5, 6, 7, 8}
    with pytest.raises(TimeoutError, match=r"prompt 3: not done within --deadline 0.5 s"):
        launch(*flags, "--out", tmp_path / "stops")


def test_who_waits_says_for_what(start, tmp_path, monkeypatch, capsys):
    """Every so often, and at the end of its patience."""
    paying(monkeypatch, lambda number, ids: forever())
    monkeypatch.setattr("nanorl.buffer.HEARTBEAT", 0.2)
    monkeypatch.setattr("nanorl.run.TIMEOUT", 0.9)
    with pytest.raises(TimeoutError, match=r"2 of 2 groups \(prompts 0, 1\)"):
        launch(*SIZES, "--model", start, "--steps", 1, "--out", tmp_path / "run")
    said = "waiting for 2 of 2 groups (prompts 0, 1), 0 others are done; trainer at version 0, engine at 0"
    assert said in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ processes that die


@pytest.mark.slow
def test_an_engine_that_was_killed_is_lost_to_all_who_wait_and_to_those_who_come(begin):
    it = begin()
    in_time(it, answers(it.engine, jobs_of()))

    async def struck():
        running = [asyncio.ensure_future(it.engine.generate(*job)) for job in jobs_of(new=LONG)]
        await until(lambda: len(it.sent) == 2)
        os.kill(it.engine.process.pid, signal.SIGKILL)
        ended = await asyncio.gather(*running, return_exceptions=True)
        return ended + await asyncio.gather(it.engine.generate(*jobs_of()[0]), return_exceptions=True)

    ended = in_time(it, struck())
    assert {(type(error), type(error.__cause__)) for error in ended} == {(Broken, Lost)}
    (lost,) = it.failed
    assert {error.__cause__ for error in ended} == {lost}
    assert str(lost) == f"the engine process was ended by SIGKILL; its last words ({it.engine.log}): none"
    it.engine.update_weights(it.policy, 1)  # the trainer may not know yet; and it may close what has ended
    it.engine.close()


@pytest.mark.slow
def test_weights_of_another_model_end_the_engine_which_says_why(begin):
    it = begin()
    it.engine.update_weights(Policy(tiny.model(seed=0)), 1)
    in_time(it, until(lambda: it.failed))
    (lost,) = it.failed
    why = r"ended with status 1; .*ValueError: the trainer's weights are not those of this model: \S+$"
    assert re.search(why, str(lost))
    assert "\n" not in str(lost) and "ValueError" in it.engine.log.read_text() and not it.acknowledged


@pytest.mark.slow
def test_its_last_words_are_its_own(begin):
    """Not those of the one before it, which are in the same file."""
    it = begin(restart=True)
    first = it.engine.process
    it.engine.update_weights(Policy(tiny.model(seed=0)), 1)  # fits nothing: it dies with words
    it.engine.update_weights(small(), 2)  # what the next one begins with
    in_time(it, until(lambda: it.engine.process is not first))
    in_time(it, publish(it, small()))
    os.kill(it.engine.process.pid, signal.SIGKILL)
    in_time(it, until(lambda: it.failed))
    assert "ValueError" in it.engine.log.read_text()
    assert str(it.failed[0]).endswith(f"was ended by SIGKILL; its last words ({it.engine.log}): none")


@pytest.mark.slow
def test_its_end_is_told_although_its_log_was_deleted(begin):
    it = begin()
    in_time(it, publish(it, small()))
    it.engine.log.unlink()
    os.kill(it.engine.process.pid, signal.SIGKILL)
    in_time(it, until(lambda: it.failed))
    assert "was ended by SIGKILL" in str(it.failed[0])


@pytest.mark.slow
def test_one_that_dies_before_its_first_weights_is_started_again_and_waits_for_them(begin):
    it = begin(restart=True)
    first = it.engine.process
    os.kill(first.pid, signal.SIGKILL)
    in_time(it, until(lambda: it.engine.process is not first))
    in_time(it, publish(it, small()))
    assert untimed(in_time(it, answers(it.engine, jobs_of()))) == untimed(locally(jobs_of())) and not it.failed


@pytest.mark.slow
def test_started_again_it_has_the_latest_weights_answers_all_that_was_asked_and_dies_only_once(begin, capfd):
    it = begin(restart=True)
    wide(it.policy.model, 7)
    jobs = [(ids, replace(how, max_new_tokens=LONG)) for ids, how in jobs_of()]

    async def struck(wait):
        running = [asyncio.ensure_future(it.engine.generate(*job)) for job in jobs]
        await asyncio.sleep(0.05)
        os.kill(it.engine.process.pid, signal.SIGKILL)
        if wait:  # it is asked more than it was when it died
            await asyncio.sleep(0)
            running.append(asyncio.ensure_future(it.engine.generate(*jobs[0])))
        return await asyncio.gather(*running, return_exceptions=True)

    it.engine.update_weights(small(), 2)
    it.engine.update_weights(it.policy, 3)
    kept = {3: weights(it.policy)}
    wide(it.policy.model, 8)  # what the trainer is about to publish
    in_time(it, until(lambda: it.engine.version == 3))
    first = it.engine.process.pid
    got = in_time(it, struck(True))
    check_exact(small(), kept, [*jobs, jobs[0]], got)
    assert [len(c.ids) for c in got] == [LONG] * 7 and not it.failed
    assert gone(first) and it.engine.process.pid != first and it.acknowledged == [2, 3, 3]
    said = capfd.readouterr().err
    assert said.count("warning: the engine process was ended by SIGKILL") == 1 and "started again, once" in said
    assert {type(error) for error in in_time(it, struck(False))} == {Broken} and len(it.failed) == 1


# ------------------------------------------------------------------------------------------------ whole runs


def worker_run(start, folder, *flags, lag=0):
    """The status of a run with the engine in a process of its own."""
    return launch(*SIZES, "--model", start, "--engine", "worker", "--max-lag", lag, "--out", folder, *flags)


@pytest.fixture
def watched(monkeypatch):
    """kept: {version: weights} of the runs of this test; pids: their engines; kill, stop: before which steps to do so."""
    seen = SimpleNamespace(kept={}, pids=[], kill=[], stop=[], admitted=[])
    begin, publish, take, admit = Run.begin, Run.publish, Run.take, Buffer.admit

    def watched_begin(run):
        seen.kept[run.step] = weights(run.policy)
        begin(run)

    def watched_publish(run):
        seen.kept[run.step] = weights(run.policy)
        publish(run)

    def watched_take(run):
        if run.cfg.engine == "worker" and run.engine.process.pid not in seen.pids:
            seen.pids.append(run.engine.process.pid)
        if run.step in seen.kill:
            seen.kill.remove(run.step)
            os.kill(run.engine.process.pid, signal.SIGKILL)
        if run.step in seen.stop:
            seen.stop.remove(run.step)
            signal.raise_signal(signal.SIGINT)
        return take(run)

    def watched_admit(buffer):
        seen.admitted += [number] if (number := admit(buffer)) is not None else []
        return number

    for target, name, function in ((Run, "begin", watched_begin), (Run, "publish", watched_publish),
                                   (Run, "take", watched_take), (Buffer, "admit", watched_admit)):  # fmt: skip
        monkeypatch.setattr(target, name, function)
    return seen


def check_samples(kept, folder, policy=None):
    """Every sampled token of the run has the log-prob that the weights of its version give it. Returns the lags."""
    fields, policy = set(Sample.__dataclass_fields__), policy or small()
    rows = lines(folder, "samples")
    samples = [Sample(**{key: tuples(value) for key, value in row.items() if key in fields}) for row in rows]
    batch = collate([Group(Prompt(0, (0,), "", ""), tuple(samples))])
    assert set(batch.version[batch.mask].tolist()) <= kept.keys()
    for version in kept:
        policy.model.load_state_dict(kept[version])
        here = batch.mask & (batch.version == version)
        with torch.no_grad():
            torch.testing.assert_close(batch.logp_behave[here], policy(batch).logp[here], rtol=0, atol=1e-4)
    return [row["step"] - 1 - row["version"][row["mask"].index(1)] for row in rows]


@pytest.mark.slow
def test_without_lag_a_run_with_the_worker_is_the_synchronous_one_bit_for_bit(tmp_path, monkeypatch, watched):
    """Five steps of the full default batch on two threads: weights, optimizer, samples, all numbers but the clock's."""
    paying(monkeypatch, spread)
    before = torch.get_num_threads()
    for part in (tiny.model(seed=0), WORDS):
        part.save_pretrained(tmp_path / "start")
    flags = ("--model", tmp_path / "start", "--steps", 5, "--eval-problems", 16, "--eval-every", 2, "--eval-samples", 1,
             "--reward-workers", 0)  # fmt: skip
    torch.set_num_threads(2)
    try:
        assert launch(*flags, "--out", tmp_path / "local") == 0
        assert launch(*flags, "--engine", "worker", "--max-lag", 0, "--out", tmp_path / "worker") == 0
    finally:
        torch.set_num_threads(before)
    assert same(tmp_path / "local", tmp_path / "worker")
    assert len(lines(tmp_path / "local", "samples")) == 5 * 32 * 8
    assert not equal(watched.kept[0], watched.kept[5]) and gone(watched.pids[0], 0)
    rows = lines(tmp_path / "worker")[1:]
    assert all(row["contrast"] > 0.9 and row["util/engine/0"] > 0 for row in rows)


@pytest.mark.slow
def test_at_lag_2_tokens_are_of_the_weights_they_name_and_no_older_than_that(start, tmp_path, monkeypatch, watched):
    """Rewards that take their time let the trainer pass by, and every kind of place where weights can arrive occurs."""

    async def late(told):
        await asyncio.sleep(0.002 * told)
        return told

    paying(monkeypatch, lambda number, ids: late(spread(number, ids)))
    assert worker_run(start, tmp_path / "run", "--steps", 40, "--max-new-tokens", 40, lag=2) == 0
    found = check_samples(watched.kept, tmp_path / "run")
    assert set(found) == {0, 1, 2}
    assert check_accounts(tmp_path / "run") == {*range(40 * P)}
    assert all(row["lag/max"] <= 2 for row in lines(tmp_path / "run"))
    spans = timeline.read(tmp_path / "run" / "trace.json")
    assert {"trainer", "engine 0", "rewards"} == {span.lane for span in spans}
    assert {"interrupt"} <= {span.name for span in spans if span.lane == "engine 0"}
    assert gone(watched.pids[0], 0) and not (tmp_path / "run" / "engine-0.log").read_text()


@pytest.mark.slow
def test_a_killed_engine_ends_the_run_in_one_line_with_a_checkpoint_from_which_it_goes_on(start, tmp_path, monkeypatch,
                                                                                         watched, capfd):  # fmt: skip
    paying(monkeypatch, spread)
    watched.kill, folder = [4], tmp_path / "run"
    assert worker_run(start, folder, "--steps", 12, lag=2) == 1
    saved, lost = capfd.readouterr().err.splitlines()
    last = checkpoint.latest(folder)
    assert last.name in ("step-4", "step-5", "step-6")  # what was sampled before it died may be trained on
    assert saved == f"Lost: saved in {last}; go on with --resume {folder}"
    assert lost == f"train_grpo.py: the engine process was ended by SIGKILL; its last words ({folder}/engine-0.log): none"
    check_accounts(folder)
    assert launch("--resume", folder) == 0
    assert check_accounts(folder) == {*range(12 * P)}
    assert max(check_samples(watched.kept, folder)) <= 2 and all(gone(pid, 0) for pid in watched.pids)


@pytest.mark.slow
def test_asked_to_the_run_starts_a_killed_engine_again_but_only_once(start, tmp_path, monkeypatch, watched, capfd):
    paying(monkeypatch, spread)
    watched.kill, folder = [4, 9], tmp_path / "run"
    assert worker_run(start, folder, "--steps", 12, "--restart-engine", lag=2) == 1
    said = capfd.readouterr().err
    assert said.count("SIGKILL") == 2 and said.count("warning: ") == said.count("it is started again, once") == 1
    assert len(watched.pids) == 2 and all(gone(pid, 0) for pid in watched.pids)
    assert len(lines(folder)) >= 9
    assert max(check_samples(watched.kept, folder)) <= 2
    check_accounts(folder)


def moody(prompt, text, asked, ids, answer, **row):
    """A reward that takes its time, often lets a group without contrast, and now and then raises."""
    import asyncio

    async def told():
        await asyncio.sleep(0.004 * (sum(ids) % 5))
        if sum(ids) % 23 == 0:
            raise OSError("no such judge")
        return float(ids[0] % 2)

    return told() if ids else float(bool(text))


MOODY = ("--dynamic-sampling", "refill", "--max-failed", 0.5, "--on-reward-error", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("way, overtake", [("refill", 0), ("shrink", 0), ("refill", 2)])
def test_stopped_at_lag_4_and_resumed_every_prompt_is_accounted_for_once(start, tmp_path, monkeypatch, watched, way,
                                                                         overtake):  # fmt: skip
    """What was in flight is asked again first, in its order, and never what was trained or rejected."""
    monkeypatch.setitem(reward.REWARDS, "arithmetic", moody)
    watched.stop, folder = [6], tmp_path / "run"
    pace = ("--dynamic-sampling", way, "--max-failed", 0.5, "--overtake", overtake, "--on-reward-error", "stop")
    assert worker_run(start, folder, "--steps", 18, *pace, lag=4) == 130
    state = state_of(folder)
    check_accounts(folder)
    watched.admitted.clear()
    assert launch("--resume", folder) == 0
    assert watched.admitted[: len(state["again"])] == state["again"] and len(state["again"]) >= P
    assert watched.admitted[len(state["again"]) :] == [*range(state["next"], state_of(folder)["next"])]
    check_accounts(folder)
    assert happened(state_of(folder)).keys() == {"failed", "left out" if way == "shrink" else "filtered"}
    assert state_of(folder)["again"] == []
    assert max(check_samples(watched.kept, folder)) <= 4 and all(gone(pid, 0) for pid in watched.pids)


# ------------------------------------------------------------------------------------------------ a trainer that ends


PAGE = f"""
import sys
import train_grpo
from nanorl import reward
from nanorl.launch import launch

{inspect.getsource(moody)}
reward.REWARDS["arithmetic"] = moody
sys.exit(launch("train_grpo.py", "grpo", train_grpo.train, sys.argv[1:]))
"""


def children(pid):
    """The processes that this one has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.fixture
def program(start, tmp_path):
    """A run at lag 4 as a program of its own, the leader of its process group as in a terminal; killed with the test."""
    (tmp_path / "page.py").write_text(PAGE)
    folder = tmp_path / "run"
    flags = (*SIZES, "--model", start, "--engine", "worker", "--max-lag", 4, *MOODY, "--steps", 10**6,
             "--save-every", 1, "--out", folder)  # fmt: skip
    process = subprocess.Popen([sys.executable, tmp_path / "page.py", *map(str, flags)], start_new_session=True,
                               env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    yield SimpleNamespace(process=process, folder=folder)
    process.kill()
    process.communicate()


def trains(program, steps=5):
    """Wait for so many steps of the run, and return its engine's process."""
    metrics, end = program.folder / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        assert program.process.poll() is None, program.process.communicate()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    (engine,) = children(program.process.pid)
    return engine


def goes_on(folder, monkeypatch):
    """The run resumes, here, for six more steps, and its accounts are in order before and after."""
    monkeypatch.setitem(reward.REWARDS, "arithmetic", moody)
    steps = int(checkpoint.latest(folder).name.removeprefix("step-"))
    assert launch("--resume", folder, "--steps", steps + 6) == 0
    assert len(check_accounts(folder)) == (steps + 6) * P and state_of(folder)["again"] == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_asked_to_stop_is_saved_leaves_no_process_and_goes_on(program, monkeypatch, how):
    """A terminal sends Ctrl-C to all processes of the group, a scheduler SIGTERM to the one it started."""
    engine = trains(program)
    if how == "Ctrl-C":
        os.killpg(program.process.pid, signal.SIGINT)
    else:
        program.process.send_signal(signal.SIGTERM)
    said = program.process.communicate(timeout=60)[1]
    assert program.process.returncode == 130 and gone(engine, 0)
    last = checkpoint.latest(program.folder)
    assert f"saved in {last}; go on with --resume {program.folder}" in said and "Traceback" not in said
    assert last.name == f"step-{lines(program.folder)[-1]['step']}"
    check_accounts(program.folder)
    goes_on(program.folder, monkeypatch)


@pytest.mark.slow
def test_when_the_trainer_is_killed_its_engine_ends_within_seconds_and_the_run_goes_on(program, monkeypatch):
    engine = trains(program)
    assert alive(engine)
    program.process.kill()
    assert gone(engine, 5)
    goes_on(program.folder, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_stopped_while_the_engine_starts_nothing_stays(program, times):
    log, end = program.folder / "engine-0.log", time.monotonic() + 60
    while not log.exists():
        assert program.process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    (engine,) = children(program.process.pid)
    for _ in range(times):
        os.killpg(program.process.pid, signal.SIGINT)
        time.sleep(0.3)
    said = program.process.communicate(timeout=60)[1]
    assert program.process.returncode == 130 and gone(engine, 30), said
    assert "Traceback" not in said and "KeyboardInterrupt" not in log.read_text()
