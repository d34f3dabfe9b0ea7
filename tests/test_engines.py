"""What every engine does alike: the local one, the worker in its process, and the vLLM server that is a real one."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch

from nanorl import tiny
from nanorl.config import Remote
from nanorl.engine import Sampling
from nanorl.local import LocalEngine
from nanorl.policy import Policy
from nanorl.worker import WorkerEngine
from tests.server import ROOM, small, spread
from tests.test_delayed import as_batch, weights

WORDS = tiny.tokenizer()
ENGINES = ["local", "worker", pytest.param("vllm", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=ENGINES)
def started(request, tmp_path_factory):
    """An engine of each kind on a loop of its own, with what it told; halted(): a pause that was asked for has come."""
    it = SimpleNamespace(kind=request.param, loop=asyncio.new_event_loop(), acknowledged=[], failed=[], policy=small(),
                         halted=lambda: True)  # fmt: skip
    folder, told = tmp_path_factory.mktemp("engine"), (it.acknowledged.append, it.failed.append)
    if it.kind == "local":
        it.engine = LocalEngine(it.policy, WORDS)
    elif it.kind == "worker":
        for part in (it.policy.model.config, WORDS):
            part.save_pretrained(folder)
        settings = {"model": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "version": -1}
        it.engine = WorkerEngine(settings, folder / "log", it.loop, False, *told)
    else:
        from nanorl.servers import VLLMEngine

        remote = Remote(servers=(request.getfixturevalue("real_server").url,))
        it.halted = lambda: httpx.get(f"{remote.servers[0]}/is_paused", timeout=60).json()["is_paused"]
        it.engine = VLLMEngine(remote, folder, it.policy.model.config, it.loop, *told)
    yield it
    it.engine.close()
    it.loop.run_until_complete(asyncio.sleep(0.1))  # what it has ended gets to its end
    it.loop.close()


@pytest.fixture
def it(started):
    """The engine with the small model's weights under a new version, nothing told yet."""
    spread(started.policy.model, 0)
    started.engine.resume()
    in_time(started, publish(started))
    started.engine.lap()
    started.acknowledged.clear()
    return started


def in_time(it, question):
    """The answer to a question asked on the loop."""
    return it.loop.run_until_complete(asyncio.wait_for(question, timeout=120))


async def until(what):
    """Until what() is true."""
    while not what():
        await asyncio.sleep(0.002)


async def publish(it):
    """The policy's weights as the next version; back when the engine samples with them."""
    version = it.engine.version + 1
    it.engine.update_weights(it.policy, version)
    await until(lambda: it.engine.version >= version)
    return version


async def answers(engine, jobs):
    """All completions, the requests having arrived together."""
    return await asyncio.gather(*(engine.generate(*job) for job in jobs))


def jobs_of(new=24, keys=0, **how):
    """Six prompts of unequal lengths, one of them asked twice; each answer has its own length and its own numbers."""
    seeded = torch.Generator().manual_seed
    prompts = [tuple(torch.randint(0, 17, (n,), generator=seeded(n)).tolist()) for n in (4, 25, 1, 9, 9, 70)]
    return [(ids, Sampling(new + 3 * i, key=(keys, 0, i, 0, 0), **how)) for i, ids in enumerate(prompts)]


def check(jobs, got, kept):
    """Every token has the log-prob that the weights of its version give it at its temperature, to 5e-5.

    kept: {version: weights}.
    """
    assert {version for c in got for version in c.version} <= kept.keys()
    assert all(len(c.ids) == len(c.logp) == len(c.version) for c in got)
    for temperature in {how.temperature for _, how in jobs}:
        chosen = [(job, c) for job, c in zip(jobs, got) if job[1].temperature == temperature]
        batch = as_batch(*zip(*chosen))
        for version in kept:
            policy = small(temperature=temperature or 1.0)
            policy.model.load_state_dict(kept[version])
            here = batch.mask & (batch.version == version)
            with torch.no_grad():
                torch.testing.assert_close(batch.logp_behave[here], policy(batch).logp[here], rtol=0, atol=5e-5)


# ------------------------------------------------------------------------------------------------ what is sampled


def test_greedy_tokens_are_the_likeliest_wherever_two_do_not_share_the_first_place(it):
    """And their log-probs are those of temperature 1."""
    jobs = jobs_of(temperature=0.0)
    got = in_time(it, answers(it.engine, jobs))
    check(jobs, got, {it.engine.version: weights(it.policy)})
    batch = as_batch(jobs, got)
    with torch.no_grad():
        two = it.policy.model(input_ids=batch.ids).logits[:, :-1].topk(2)
    clear = batch.mask[:, 1:] & (two.values[..., 0] - two.values[..., 1] > 1e-3)
    assert clear.sum() > 0.9 * batch.mask.sum() > 100
    assert torch.equal(two.indices[..., 0][clear], batch.ids[:, 1:][clear])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_the_trainers_at_the_temperature(it, temperature):
    jobs = jobs_of(temperature=temperature)
    check(jobs, in_time(it, answers(it.engine, jobs)), {it.engine.version: weights(it.policy)})


def test_greedy_and_hot_requests_together_have_each_their_own_temperature(it):
    jobs = [(ids, replace(how, temperature=t)) for (ids, how), t in zip(jobs_of(), itertools.cycle([0.0, 0.5, 2.0]))]
    check(jobs, in_time(it, answers(it.engine, jobs)), {it.engine.version: weights(it.policy)})


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_over_many_keys_each_token_comes_as_often_as_its_probability(it, temperature):
    """400 first tokens, in bounds of 4.5 standard deviations. No top-p, no top-k: the unlikely ones come, too."""
    ids = jobs_of()[5][0]
    jobs = [(ids, Sampling(1, temperature=temperature, key=(0, 0, 0, i, 0))) for i in range(400)]
    got = in_time(it, answers(it.engine, jobs))
    count = torch.bincount(torch.tensor([c.ids[0] for c in got]), minlength=17).double()
    with torch.no_grad():
        p = (it.policy.model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(0)
    deviation = (400 * p * (1 - p)).sqrt()
    assert ((count - 400 * p).abs() < 4.5 * deviation + 1).all() and (p > 0.02).sum() > 3


def test_the_key_decides_and_nothing_else(it):
    """The same requests again are answered alike; with other keys, otherwise."""
    first, again = (in_time(it, answers(it.engine, jobs_of(new=40))) for _ in range(2))
    other = in_time(it, answers(it.engine, jobs_of(new=40, keys=1)))
    assert [c.ids for c in first] == [c.ids for c in again]
    assert all(one.ids != two.ids for one, two in zip(first, other))
    assert first[3].ids[:20] != first[4].ids[:20]  # the same prompt, another sample


# ------------------------------------------------------------------------------------------------ where it ends


def test_an_answer_ends_with_its_first_end_token_which_it_holds_and_with_no_other_token(it):
    """Several end tokens; the model's own end token, 1, is none of them here. One that comes as the last is an end."""
    end = frozenset({3, 5})
    jobs = [(ids, replace(how, max_new_tokens=n)) for n in (6, 60) for ids, how in jobs_of(end=end, temperature=2.0)]
    got = in_time(it, answers(it.engine, jobs))
    for (_, how), c in zip(jobs, got):
        ended = c.ids[-1] in end
        assert c.finish == ("stop" if ended else "length") and (ended or len(c.ids) == how.max_new_tokens)
        assert not end & {*c.ids[:-1]}
    assert {c.finish for c in got} == {"stop", "length"} and any(1 in c.ids for c in got)
    check(jobs, got, {it.engine.version: weights(it.policy)})


def test_an_end_token_in_the_last_place_is_an_end(it):
    jobs = jobs_of(new=12)
    whole = in_time(it, answers(it.engine, jobs))
    ends = [(ids, replace(how, end=frozenset({c.ids[-1]}))) for (ids, how), c in zip(jobs, whole)]
    for c, before in zip(in_time(it, answers(it.engine, ends)), whole):
        assert c.finish == "stop" and c.ids == before.ids[: before.ids.index(before.ids[-1]) + 1]


def test_an_answer_ends_with_the_first_stop_text_which_it_holds(it):
    """Also one of two tokens, and one that begins in the prompt and so is none."""
    texts = ("7", "+(")
    jobs = [(ids, replace(how, max_new_tokens=n)) for n in (4, 80) for ids, how in jobs_of(stop=texts)]
    got = in_time(it, answers(it.engine, jobs))
    for (_, how), c in zip(jobs, got):
        text, before = WORDS.decode(c.ids), WORDS.decode(c.ids[:-1])
        assert not any(stop in before for stop in texts)
        ended = any(stop in text for stop in texts)
        assert c.finish == ("stop" if ended else "length") and (ended or len(c.ids) == how.max_new_tokens)
    assert {c.finish for c in got} == {"stop", "length"}
    check(jobs, got, {it.engine.version: weights(it.policy)})


def test_what_has_no_room_is_refused_and_what_just_has_is_not(it):
    fits, how = (1,) * (ROOM - 9), Sampling(9, key=(1,))
    (c,) = in_time(it, answers(it.engine, [(fits, how)]))
    assert len(c.ids) == 9 and c.finish == "length"
    for ids, images, said in (((1, *fits), (), f"{ROOM - 8} prompt tokens \\+ 9 new, but room for {ROOM}"),
                              ((), (), "0 prompt tokens"), (fits, ("picture",), "no images")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            in_time(it, it.engine.generate(ids, how, images))


# ------------------------------------------------------------------------------------------------ new weights


def test_interrupted_again_and_again_every_token_is_of_the_weights_whose_version_it_carries(it):
    """Nothing is thrown away, nothing sampled twice; versions only grow, and each is acknowledged in its turn."""
    kept, jobs, got = {it.engine.version: weights(it.policy)}, [], []

    async def publishing():
        while len(kept) < 6:
            await asyncio.sleep(0.05)
            spread(it.policy.model, 50 + len(kept))
            kept[await publish(it)] = weights(it.policy)

    async def asking(i, others):
        """One request after the other, so that something is in flight whenever new weights come."""
        while not others.done():
            job = jobs_of(new=200, keys=len(jobs))[i]
            completion = await it.engine.generate(*job)
            jobs.append(job)
            got.append(completion)

    async def interrupted():
        others = asyncio.ensure_future(publishing())
        await asyncio.gather(*(asking(i, others) for i in range(6)))
        await others

    in_time(it, interrupted())
    assert all(list(c.version) == sorted(c.version) for c in got) and max(len(set(c.version)) for c in got) > 1
    assert [(len(c.ids), c.finish) for c in got] == [(how.max_new_tokens, "length") for _, how in jobs]
    assert it.acknowledged == ([*kept][1:] if it.kind != "local" else [])
    check(jobs, got, kept)
    spans = it.engine.lap()
    assert sum(span.args["rows"] for span in spans if span.name == "generate") == sum(len(c.ids) for c in got)
    assert it.kind == "local" or "interrupt" in {span.name for span in spans}
    assert it.engine.lap() == []


def test_weights_are_theirs_once_handed_over_whatever_the_trainer_does_next(it):
    """Also those behind which others come at once. The local engine has no others than the trainer's."""
    before = spread(it.policy.model, 7)
    kept = {it.engine.version + 2: weights(it.policy)}
    if it.kind == "local":
        it.engine.update_weights(it.policy, it.engine.version + 2)
    else:
        spread(it.policy.model, 6)
        it.engine.update_weights(it.policy, it.engine.version + 1)
        it.engine.update_weights(Policy(spread(before, 7)), next(iter(kept)))
        spread(it.policy.model, 8)
    in_time(it, until(lambda: it.engine.version in kept))
    jobs = jobs_of()
    check(jobs, in_time(it, answers(it.engine, jobs)), kept)


def test_paused_it_samples_nothing_and_resumed_it_goes_on_with_the_newest_weights(it):
    """A server takes a while to be paused: what it has in the works is far longer than what comes later."""
    kept, began = {it.engine.version: weights(it.policy)}, time.monotonic()
    jobs = jobs_of(new=3900 if it.kind == "vllm" else 120)[:3] + jobs_of(new=120)[3:]
    in_time(it, answers(it.engine, jobs[3:]))
    takes = time.monotonic() - began

    async def paused():
        early = asyncio.ensure_future(answers(it.engine, jobs[:3]))
        await asyncio.sleep(0.1 * takes)
        it.engine.pause()
        await until(it.halted)
        late = asyncio.ensure_future(answers(it.engine, jobs[3:]))
        spread(it.policy.model, 9)
        version = it.engine.version + 1
        it.engine.update_weights(it.policy, version)
        kept[version] = weights(it.policy)
        await asyncio.sleep(1.2 * takes)
        assert not early.done() and not late.done()
        it.engine.resume()
        return await early + await late

    got = in_time(it, paused())
    assert {c.version[-1] for c in got} == {it.engine.version} and {c.version[0] for c in got[:3]} == {min(kept)}
    assert {len(c.ids) for c in got} == {how.max_new_tokens for _, how in jobs}
    check(jobs, got, kept)


# ------------------------------------------------------------------------------------------------ many, and fewer


def test_a_hundred_at_once_are_each_answered_as_asked(it):
    jobs = [(ids[: 1 + i], replace(how, max_new_tokens=1 + (7 * i + j) % 40, key=(i, j)))
            for i in range(17) for j, (ids, how) in enumerate(jobs_of())]  # fmt: skip
    got = in_time(it, answers(it.engine, jobs))
    assert [len(c.ids) for c in got] == [how.max_new_tokens for _, how in jobs]
    check(jobs, got, {it.engine.version: weights(it.policy)})


def test_a_cancelled_request_is_over_and_changes_no_other(it):
    (ids, how), *others = jobs_of()

    async def cancelled():
        running = asyncio.ensure_future(it.engine.generate(ids, replace(how, max_new_tokens=ROOM - len(ids))))
        rest = asyncio.ensure_future(answers(it.engine, others))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return await rest

    got = in_time(it, cancelled())
    check(others, got, {it.engine.version: weights(it.policy)})
    assert [len(c.ids) for c in got] == [how.max_new_tokens for _, how in others]
    spans = it.engine.lap()
    in_time(it, publish(it))
    assert {s.name for s in it.engine.lap()} <= {"generate", "sync"} and spans  # nobody was interrupted: it had left
