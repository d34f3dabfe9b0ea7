"""Who generates: what is sampled depends on the weights, the prompt and the key, and on nothing else.

First the local engine, then episodes and groups, then the thread that runs them.
"""

import asyncio
import gc
import itertools
import math
import re
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers import Qwen3ForCausalLM, Qwen3NextConfig

from nanorl import tiny
from nanorl.buffer import Buffer, Stopped
from nanorl.config import Lost, Refused
from nanorl.engine import Completion, Sampling
from nanorl.local import LocalEngine, Request
from nanorl.monitor import log
from nanorl.pace import Pace
from nanorl.policy import Policy, admit
from nanorl.rollout import EVALUATE, TRAIN, Rollout, Turns, group, one_turn
from nanorl.sample import Group, Prompt, Sample, collate

V = 17  # the tiny tokenizer's vocabulary
END = 1
EVERY = ["qwen3", "gpt2", "llama"]
WORDS = tiny.tokenizer()


def make(name, seed=0):
    """A small float32 model whose weights are wide enough that position, padding and the past show in what it says."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V,
             "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": END}  # fmt: skip
    net = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=96, n_embd=32, n_layer=2, n_head=2, bos_token_id=END,
                                                   eos_token_id=END, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=False)),
    }[name]()  # fmt: skip
    return admit(widen(net, seed), name)


def widen(net, seed):
    """Weights of its own for each seed, in place."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=random) * 1.5 / p.shape[-1] ** 0.5)
    return net


def engine_of(name, seed=0, **limits):
    return LocalEngine(Policy(make(name, seed)), WORDS, **limits)


def ids_of(length, seed=0):
    return tuple(torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(100 * length + seed)).tolist())


def jobs_of(lengths, new=12, **more):
    """A prompt of each length, and how to sample it: every answer has another length limit and its own key."""
    return [(ids_of(n, i), Sampling(new + 3 * (i % 4), key=(0, TRAIN, i, 0, 0), **more)) for i, n in enumerate(lengths)]


def generate(engine, jobs):
    """All completions, the requests having arrived together and in this order."""

    async def all_of_them():
        return await asyncio.wait_for(asyncio.gather(*(engine.generate(ids, how) for ids, how in jobs)), timeout=60)

    return asyncio.run(all_of_them())


def alone(name, jobs, seed=0):
    """What each request gives in an engine that it has for itself."""
    engine = engine_of(name, seed)
    return [generate(engine, [job])[0] for job in jobs]


def tokens(completions):
    return [c.ids for c in completions]


def as_batch(pairs):
    """(prompt ids, completion) pairs as the trainer sees them, garbage in the padding."""
    rows = []
    for ids, c in pairs:
        n = len(ids)
        rows.append(Sample(ids=ids + c.ids, mask=(False,) * n + (True,) * len(c.ids), logp_behave=(0.0,) * n + c.logp,
                           version=(-1,) * n + c.version, finish=c.finish, rewards=()))  # fmt: skip
    batch = collate([Group(Prompt(0, (0,), "", ""), tuple(rows))])
    padding = torch.arange(batch.ids.shape[1]) >= batch.length[:, None]
    return replace(batch, ids=batch.ids.where(~padding, (torch.arange(batch.ids.numel()) % V).reshape(batch.ids.shape)))


# ---------------------------------------------------------------------------------------------- engine and trainer


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("end", [0, END])  # 0: the end token is also what pads, left in the engine and right in the batch
def test_the_engine_tells_the_log_probs_that_the_trainer_computes(name, temperature, end):
    engine = engine_of(name)
    jobs = jobs_of([1, 40, 2, 17, 40, 5], temperature=temperature, end=frozenset({end}))
    jobs += [(ids, replace(how, key=(9,))) for ids, how in jobs]
    completions = generate(engine, jobs)
    batch = as_batch([(ids, c) for (ids, _), c in zip(jobs, completions)])
    with torch.no_grad():
        logp = Policy(engine.policy.model, temperature)(batch).logp
    assert (logp - batch.logp_behave).abs().max() < 1e-4 * max(1, 1 / temperature)
    assert temperature < 0.5 or batch.logp_behave[batch.mask].std() > 0.1  # they are not all alike


def test_gradients_can_be_taken_after_generation_also_in_bfloat16():
    for dtype in (torch.float32, torch.bfloat16):
        engine = LocalEngine(Policy(make("llama"), dtype=dtype), WORDS)
        jobs = jobs_of([3, 9])
        batch = as_batch([(ids, c) for (ids, _), c in zip(jobs, generate(engine, jobs))])
        engine.policy(batch).logp.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in engine.policy.parameters())


def test_generation_moves_neither_weights_nor_the_global_random_state():
    engine = engine_of("gpt2")
    weights, state = [p.clone() for p in engine.policy.parameters()], torch.get_rng_state()
    generate(engine, jobs_of([3, 9]))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.policy.parameters()))


@pytest.mark.parametrize("name", EVERY)
def test_greedy_is_the_models_own_greedy_generation(name):
    engine = engine_of(name)
    jobs = jobs_of([1, 30, 2, 17, 8], new=20, temperature=0.0, end=frozenset({END}))
    for (ids, how), c in zip(jobs, generate(engine, jobs)):
        whole = engine.policy.model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                                             do_sample=False, max_new_tokens=how.max_new_tokens, pad_token_id=0)  # fmt: skip
        assert c.ids == tuple(whole[0, len(ids) :].tolist())


def test_greedy_and_sampled_rows_share_steps_without_sharing_temperatures():
    jobs = [(ids, replace(how, temperature=t)) for (ids, how), t in zip(jobs_of([5] * 4), [0.0, 2.0, 0.3, 1.0])]
    assert tokens(generate(engine_of("llama"), jobs)) == tokens(alone("llama", jobs))


def test_a_token_is_the_inverse_of_the_cumulative_distribution_at_its_number():
    """15 tokens alike between two impossible ones: token 1 + ⌊15u⌋, also at u = 0 and at the largest u there is."""
    engine = engine_of("llama")
    head = engine.policy.model.get_output_embeddings().weight.data.zero_()
    head[[0, V - 1]] = -1e5
    numbers = [0.0, *((i + 0.5) / 60 for i in range(60)), 1 - 2**-53]
    engine.rows = [Request((1,), Sampling(1, key=(i,)), None) for i in range(len(numbers))]
    for request, u in zip(engine.rows, numbers):
        request.uniform = [u]
    with torch.no_grad():
        engine.sample(torch.ones(len(numbers), 32))
    assert [r.new for r in engine.rows] == [[1 + int(15 * u)] for u in numbers]
    assert [p for r in engine.rows for p in r.logp] == pytest.approx([-math.log(15)] * len(numbers), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_over_many_keys_each_token_comes_as_often_as_its_probability(temperature):
    """Pearson's statistic over 17 tokens: mean 16, standard deviation 5.7; twice as much spread gives hundreds."""
    n, ids, engine = 4000, ids_of(6), engine_of("llama", max_rows=4000)
    drawn = Counter(c.ids[0] for c in generate(engine, [(ids, Sampling(1, temperature, key=(0, TRAIN, 0, i, 0))) for i in range(n)]))
    with torch.no_grad():
        expected = n * torch.softmax(engine.policy.model(torch.tensor([ids])).logits[0, -1].double() / temperature, 0)
    expected = expected.tolist()
    rare = sum(e for e in expected if e < 5)  # the usual rule: cells of at least five
    cells = [(drawn[t], e) for t, e in enumerate(expected) if e >= 5]
    cells += [(n - sum(o for o, _ in cells), rare)] if rare > 1 else []
    assert sum((o - e) ** 2 / e for o, e in cells) < 45 and len(cells) > 5


# ---------------------------------------------------------------------------------------------- what a sample depends on


TIGHT = {"max_rows": 3, "prefill": 45}


@pytest.mark.parametrize("name, limits", [
    *((name, limits) for name in EVERY for limits in ({}, TIGHT)),
    *((EVERY[0], limits) for limits in ({"max_rows": 1}, {"max_rows": 3}, {"prefill": 1}, {"prefill": 45}))])  # fmt: skip
def test_a_sample_depends_neither_on_batch_mates_nor_on_arrival_nor_on_room(name, limits):
    jobs = jobs_of([4, 25, 1, 25, 9, 40, 2], end=frozenset({END}))
    expected = tokens(alone(name, jobs))
    engine = engine_of(name, **limits)
    for order in (range(7), reversed(range(7)), [3, 0, 6, 2, 5, 1, 4]):
        order = list(order)
        assert tokens(generate(engine, [jobs[i] for i in order])) == [expected[i] for i in order]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 25), min_size=7, max_size=7), st.sampled_from([1, 2, 3, 512]))
def test_rows_that_come_and_go_give_what_they_give_alone(arrivals, max_rows):
    """Each request arrives after as many token steps as drawn; at any time the cache is as wide as its longest row."""
    engine, step = COMING.engine, COMING.step
    engine.max_rows = max_rows

    def checked():
        counts = step()
        assert len(engine.rows) <= max_rows
        assert (engine.cache is None) == (not engine.rows)
        if engine.rows:
            held = [len(r.ids) + len(r.new) - 1 for r in engine.rows]  # all but the latest token, which comes next
            assert engine.length.tolist() == held and engine.cache.get_seq_length() == max(held)
            assert engine.cache.layers[0].keys.shape[0] == len(held)
        return counts

    engine.token_step = checked

    async def one(job, steps):
        for _ in range(steps):
            await asyncio.sleep(0)
        return await engine.generate(*job)

    async def all_of_them():
        return await asyncio.gather(*(one(job, steps) for job, steps in zip(COMING.jobs, arrivals)))

    assert tokens(asyncio.run(all_of_them())) == COMING.expected
    assert engine.rows == engine.waiting == []


COMING = SimpleNamespace(jobs=jobs_of([4, 25, 1, 25, 9, 40, 2], new=6, end=frozenset({END})), engine=engine_of("gpt2"))
COMING.expected, COMING.step = tokens(alone("gpt2", COMING.jobs)), COMING.engine.token_step


def test_the_key_and_each_of_its_numbers_decides():
    engine, ids = engine_of("llama"), ids_of(5)
    keys = [(3, 1, 4, 1, 5), *(tuple(k + (i == j) for j, k in enumerate((3, 1, 4, 1, 5))) for i in range(5))]
    answers = tokens(generate(engine, [(ids, Sampling(20, key=key)) for key in keys]))
    assert len(set(answers)) == len(keys)
    assert tokens(generate(engine, [(ids, Sampling(20, key=key)) for key in keys])) == answers
    shorter = tokens(generate(engine, [(ids, Sampling(7, key=key)) for key in keys]))
    assert shorter == [a[:7] for a in answers]  # the t-th token has the t-th number, however many there may be


def shapes_of_passes(engine):
    """[rows, tokens] of every forward pass from now on."""
    passes = []
    engine.policy.model.base_model.register_forward_pre_hook(
        lambda _, args, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True)  # fmt: skip
    return passes


def test_prompts_that_arrive_together_are_prefilled_once_each():
    engine = engine_of("llama")
    passes = shapes_of_passes(engine)
    prompts = [ids_of(n) for n in (6, 20, 13)]
    generate(engine, [(ids, Sampling(4, key=(i, j))) for i, ids in enumerate(prompts) for j in range(5)])
    assert passes == [(3, 20), (15, 1), (15, 1), (15, 1)]


def test_a_prefill_holds_no_more_tokens_than_it_may_unless_one_prompt_alone_does():
    engine = engine_of("llama", prefill=40)
    passes = shapes_of_passes(engine)
    generate(engine, jobs_of([9, 9, 9, 9, 9, 60, 2, 2], new=20))
    assert [p for p in passes if p[1] > 1] == [(4, 9), (1, 9), (1, 60), (2, 2)]

    async def interrupted():
        running = asyncio.gather(*(engine.generate(*job) for job in jobs_of([9, 9, 9, 9], new=20)))
        await sampled(engine, 4)
        engine.update_weights(engine.policy, 1)
        return await running

    passes.clear()
    asyncio.run(interrupted())
    assert [p for p in passes if p[1] > 1] == [(4, 9), (3, 13), (1, 13)]  # by then the prefix has what was sampled


# ---------------------------------------------------------------------------------------------- how an answer ends


@settings(max_examples=25)
@given(st.sets(st.integers(0, V - 1), max_size=4))
def test_an_answer_ends_with_its_first_end_token_which_it_holds(end):
    """Any of several end tokens; without one in it, at the length limit. The trainer's mask covers it."""
    for (ids, how), whole in zip(ENDING.jobs, ENDING.whole):
        (c,) = generate(ENDING.engine, [(ids, replace(how, end=frozenset(end)))])
        cut = next((i + 1 for i, t in enumerate(whole) if t in end), None)
        assert c.ids == whole[:cut] and c.finish == ("length" if cut is None else "stop")
        assert len(c.ids) == len(c.logp) == len(c.version)


ENDING = SimpleNamespace(jobs=jobs_of([3, 8], new=8), engine=engine_of("llama"))
ENDING.whole = tokens(generate(ENDING.engine, ENDING.jobs))


@settings(max_examples=25)
@given(st.integers(0, 37), st.integers(1, 9), st.booleans())
def test_an_answer_ends_with_the_first_stop_text_which_it_holds(start, length, first):
    """The shortest beginning whose text has it; of several stop texts any."""
    present = STOPPING.text[start : start + length]
    n = next(n for n in range(1, 41) if present in WORDS.decode(STOPPING.whole[:n]))
    stop = (present, "no such text") if first else ("no such text", present)
    (c,) = generate(STOPPING.engine, [(STOPPING.ids, replace(STOPPING.how, stop=stop))])
    assert c.ids == STOPPING.whole[:n] and c.finish == "stop"


STOPPING = SimpleNamespace(ids=ids_of(4), how=Sampling(40, key=(2,)), engine=engine_of("llama"))
STOPPING.whole = generate(STOPPING.engine, [(STOPPING.ids, STOPPING.how)])[0].ids
STOPPING.text = WORDS.decode(STOPPING.whole)


def byte_tokenizer():
    """One token a byte, as byte-level BPE writes what it has no merges for."""
    table = {chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else None: b for b in range(256)}
    table.pop(None)
    rest = [b for b in range(256) if b not in table.values()]
    table |= {chr(256 + i): b for i, b in enumerate(rest)}
    inner = Tokenizer(models.BPE(table, []))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("stop", ["a", "</answer>", "\n\n", "答案完毕", "答案已经写完了，到此为止。", "🎉🎉🎉🎉🎉"])
def test_a_stop_text_of_many_tokens_ends_the_answer_at_its_last(stop):
    words = byte_tokenizer()
    engine = LocalEngine(Policy(make("llama")), words)
    whole = list(f"So it is 42 — {stop}".encode())
    assert words.decode(whole).endswith(stop)
    request = Request((1,), Sampling(10**4, stop=("never", stop)), None)
    ended = []
    for token in whole:
        request.new.append(token)
        ended.append(engine.finished(request))
    assert ended == [None] * (len(whole) - 1) + ["stop"]


def test_what_has_no_room_in_the_model_is_refused_and_what_just_has_is_not():
    engine = engine_of("gpt2")  # learned positions: one more would be an index error
    assert len(generate(engine, [(ids_of(80), Sampling(16, key=(0,)))])[0].ids) == 16
    for ids, new in [(ids_of(81), 16), (ids_of(97), 1), ((), 4)]:
        with pytest.raises(ValueError, match=f"{len(ids)} prompt tokens .* room for 96"):
            generate(engine, [(ids, Sampling(new, key=(0,)))])


@pytest.mark.parametrize(("config", "layer"), [
    (Qwen3Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=0), "DynamicSlidingWindowLayer"),
    (Qwen3NextConfig(num_hidden_layers=4), "LinearAttentionLayer")])  # fmt: skip
def test_a_cache_of_another_kind_is_refused_by_name(config, layer):
    with pytest.raises(Refused, match=layer):
        LocalEngine(SimpleNamespace(model=SimpleNamespace(config=config)), WORDS)


# ---------------------------------------------------------------------------------------------- interruption


async def sampled(engine, steps):
    """Until the oldest row has so many tokens."""
    while not engine.rows or len(engine.rows[0].new) < steps:
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("steps", [1, 7])
def test_new_weights_go_on_where_the_old_ones_were_and_nothing_is_thrown_away(name, steps):
    """Tokens so far keep their values and version; each later one has the new weights' log-prob given all before it."""
    engine = engine_of(name, max_rows=4)
    jobs = jobs_of([4, 25, 1, 9, 6, 30], new=14)  # two of them wait for a row meanwhile
    old = generate(engine, jobs)

    async def interrupted():
        running = [asyncio.ensure_future(engine.generate(*job)) for job in jobs]
        await sampled(engine, steps)
        rows = list(engine.rows)
        engine.pause()
        widen(engine.policy.model, seed=1)
        engine.update_weights(engine.policy, version=1)
        engine.resume()
        await sampled(engine, steps + 1)
        assert engine.rows == rows  # who has begun does not wait again
        return await asyncio.gather(*running)

    new = asyncio.run(interrupted())
    with torch.no_grad():
        logp = engine.policy(as_batch([(ids, c) for (ids, _), c in zip(jobs, new)])).logp
    for i, ((ids, how), a, b) in enumerate(zip(jobs, old, new)):
        kept = b.version.count(0)
        assert kept == (steps if i < 4 else 0)
        assert b.version == (0,) * kept + (1,) * (how.max_new_tokens - kept) and b.finish == "length"
        assert b.ids[:kept] == a.ids[:kept] and b.logp[:kept] == pytest.approx(a.logp[:kept], abs=1e-6)
        later = logp[i, len(ids) + kept : len(ids) + len(b.ids)]
        assert later.tolist() == pytest.approx(b.logp[kept:], abs=1e-4)
    assert sum(a.ids != b.ids for a, b in zip(old, new)) > 3  # the weights did change
    assert {v for c in generate(engine, jobs) for v in c.version} == {1}


def test_an_update_with_the_same_weights_changes_nothing_but_the_version():
    engine, jobs = engine_of("gpt2", max_rows=3), jobs_of([4, 25, 1, 9], new=10)
    expected = tokens(generate(engine, jobs))

    async def interrupted():
        running = asyncio.gather(*(engine.generate(*job) for job in jobs))
        for version in range(1, 6):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.update_weights(engine.policy, version)
        return await running

    assert tokens(new := asyncio.run(interrupted())) == expected
    assert all(list(c.version) == sorted(c.version) for c in new) and len(set(new[0].version)) > 2


def test_a_paused_engine_samples_nothing_and_resumes_with_all_its_rows():
    engine, jobs = engine_of("llama"), jobs_of([4, 25, 1, 9])
    expected = tokens(generate(engine, jobs))

    async def paused():
        running = asyncio.gather(*(engine.generate(*job) for job in jobs[:3]))
        await sampled(engine, 4)
        engine.pause()
        late = asyncio.ensure_future(engine.generate(*jobs[3]))
        await asyncio.sleep(0.05)
        assert [len(r.new) for r in engine.rows] == [4, 4, 4] and not late.done() and not running.done()
        engine.resume()
        while len(engine.rows[0].new) < 6:
            await asyncio.sleep(0.001)
        assert len(engine.rows) == 4
        return [*await running, await late]

    assert tokens(asyncio.run(paused())) == expected


def test_a_cancelled_request_frees_its_row_and_changes_no_other():
    """One that is sampling, one that waits for a row; with room for one row the next could else never start."""
    engine, jobs = engine_of("llama", max_rows=2), jobs_of([4, 25, 9, 9, 5])
    expected = tokens(alone("llama", jobs))

    async def cancelled():
        running = [asyncio.ensure_future(engine.generate(*job)) for job in jobs]
        await sampled(engine, 3)
        running[0].cancel()
        running[3].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(engine.rows[0].new) < 6 and not any(r.answer.cancelled() for r in engine.rows)
        return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), timeout=30)

    results = asyncio.run(cancelled())
    assert [type(results[i]) for i in (0, 3)] == [asyncio.CancelledError] * 2
    assert [results[i].ids for i in (1, 2, 4)] == [expected[i] for i in (1, 2, 4)]
    assert engine.rows == engine.waiting == [] and engine.cache is None


@pytest.mark.parametrize("broken", [0, 1, 4])  # the first prefill; a decoding step; a prefill of rows that join others
def test_an_error_in_the_engine_reaches_everybody_who_waits_and_the_next_request_is_served(broken):
    engine, jobs = engine_of("llama", max_rows=2), jobs_of([4, 25, 9, 5], new=3)
    expected, calls = tokens(alone("llama", jobs)), itertools.count()

    def fail(module, args):
        if next(calls) == broken:
            raise RuntimeError("out of memory")

    handle = engine.policy.model.base_model.register_forward_pre_hook(fail)

    async def all_of_them():
        running = [asyncio.ensure_future(engine.generate(*job)) for job in jobs]
        done, pending = await asyncio.wait(running, timeout=2)
        assert not pending, f"{len(pending)} of {len(jobs)} wait for ever"
        return [task.exception() or task.result() for task in done]

    results = asyncio.run(all_of_them())
    errors = [r for r in results if isinstance(r, Exception)]
    assert len(errors) >= len(jobs) - 1 and {str(e) for e in errors} == {"out of memory"}
    handle.remove()
    assert tokens(generate(engine, jobs)) == expected


# ---------------------------------------------------------------------------------------------- episodes


class Echo:
    """An engine of known answers: 1 to 3 tokens that the key decides, after as many turns of the loop."""

    def __init__(self, version=7):
        self.version, self.asked = version, []

    async def generate(self, ids, sampling, images=()):
        self.asked.append((tuple(ids), sampling))
        n = 1 + sum(sampling.key) % 3
        for _ in range(4 - n):
            await asyncio.sleep(0)
        return Completion(tuple(10 * len(self.asked) + i for i in range(n)), tuple(-0.5 - i for i in range(n)), (self.version,) * n, "stop")


class Lossy:
    """A tokenizer whose text says less than its ids: every id reads "x", and no text gives the ids back."""

    def decode(self, ids, skip_special_tokens=False):
        return "x" * len(ids)


async def nothing(prompt, text, ids):
    return 0.0


def turns(engine, tokenizer=None, **how):
    return Turns(engine, tokenizer or Lossy(), Sampling(3, key=(0, TRAIN, 0, 0), **how))


def test_one_turn_masks_exactly_what_was_sampled_and_pays_at_its_last_token():
    async def score(prompt, text, ids):
        return 10.0 * prompt.number + len(ids) + len(text)

    prompt = Prompt(4, (5, 6, 7), "?", "!")
    (s,) = asyncio.run(one_turn(turns(Echo()), prompt, score))
    n = len(s.ids) - 3
    assert s.ids == (5, 6, 7) + tuple(10 + i for i in range(n))  # the ids that were sampled, never encoded again
    assert s.mask == (False,) * 3 + (True,) * n and s.version == (-1,) * 3 + (7,) * n
    assert s.logp_behave == (0.0,) * 3 + tuple(-0.5 - i for i in range(n))
    assert s.rewards == ((3 + n - 1, 40.0 + 2 * n),) and s.finish == "stop" and s.text == "x" * n and s.train


def test_one_turn_of_the_local_engine_is_an_answer_with_its_end_token():
    """Where the end token is also the padding token: it is in the mask, and the text is without it."""
    engine, prompt = engine_of("llama"), Prompt(0, ids_of(4), "", "")
    for i in range(5):
        (s,) = asyncio.run(one_turn(Turns(engine, WORDS, Sampling(60, end=frozenset({0}), key=(0, 0, 0, i))), prompt, nothing))
        assert s.finish == "stop" and s.ids[-1] == 0 and s.mask[-1] and s.ids.count(0) == 1 + prompt.ids.count(0)
        assert sum(s.mask) == len(s.ids) - 4 and "<pad>" not in s.text


def test_every_turn_of_a_trajectory_has_numbers_of_its_own():
    async def twice(engine, prompt, score):
        a = await engine.generate(prompt.ids)
        await engine.generate((*prompt.ids, *a.ids))
        return []

    engine, prompt = Echo(), Prompt(5, (1, 2), "", "")
    asyncio.run(group(engine, Lossy(), prompt, nothing, Sampling(3, key=(11, TRAIN)), 2, twice))
    assert sorted(how.key for _, how in engine.asked) == [(11, TRAIN, 5, i, turn) for i in range(2) for turn in range(2)]


@given(st.permutations(range(5)))
def test_scores_and_notes_stay_with_their_own_sample_whatever_the_order(order):
    """Every reward says which prompt and ids it judged, after waiting for as long as it likes."""

    async def score(prompt, text, ids):
        log("before", prompt.number)
        for _ in range((3 * prompt.number + ids[0]) % 5):
            await asyncio.sleep(0)
        log("after", float(ids[0]))
        return 1000.0 * prompt.number + ids[0]

    async def all_of_them():
        engine = Echo()
        prompts = [Prompt(i, (i,) * (i + 1), "", "") for i in order]
        return await asyncio.gather(*(group(engine, Lossy(), p, score, Sampling(3, key=(0, TRAIN)), 3) for p in prompts))

    groups = asyncio.run(all_of_them())
    assert [g.prompt.number for g in groups] == list(order)
    for g in groups:
        assert len(g.samples) == 3
        for s in g.samples:
            n = len(g.prompt.ids)
            assert s.ids[:n] == g.prompt.ids
            assert s.reward == 1000.0 * g.prompt.number + s.ids[n]
            assert s.notes == (("before", g.prompt.number), ("after", s.ids[n]))


def test_a_group_is_the_same_samples_whoever_else_is_sampled():
    engine = engine_of("gpt2")
    prompts = [Prompt(i, ids_of(n), "", "") for i, n in enumerate((3, 12, 7))]
    sampling = Sampling(10, end=frozenset({END}), key=(0, TRAIN))

    async def several(chosen):
        return await asyncio.gather(*(group(engine, WORDS, p, nothing, sampling, 3) for p in chosen))

    together = asyncio.run(several(prompts))
    backwards = asyncio.run(several(prompts[::-1]))[::-1]
    for p, a, b in zip(prompts, together, backwards):
        (single,) = asyncio.run(several([p]))
        assert [s.ids for s in a.samples] == [s.ids for s in b.samples] == [s.ids for s in single.samples]
    assert len({s.ids for g in together for s in g.samples}) == 9
    other = asyncio.run(group(engine, WORDS, prompts[0], nothing, replace(sampling, key=(0, EVALUATE)), 3))
    assert {s.ids for s in other.samples}.isdisjoint({s.ids for s in together[0].samples})  # evaluation has its own stream


# ---------------------------------------------------------------------------------------------- the thread


def never():
    return False


def rollout_threads():
    return [t for t in threading.enumerate() if t.name == "rollout"]


@pytest.fixture
def rolling():
    """Rollouts that are closed after the test."""
    made = []

    def start(buffer, make):
        made.append(Rollout(buffer, make))
        return made[-1]

    yield start
    for rollout in made:
        if rollout.thread.is_alive():
            rollout.close()


def made_by(engine, score=nothing, samples=2):
    async def one(number):
        return await group(engine, WORDS, Prompt(number, ids_of(3 + number % 5), "", ""), score, Sampling(6, key=(0, TRAIN)), samples)

    return one


def test_synchronous_steps_get_their_own_prompts_in_order_by_the_weights_of_now(rolling):
    engine = engine_of("llama")
    buffer = Buffer(prompts_per_step=3)
    rollout = rolling(buffer, made_by(engine))
    for step in range(4):
        rollout.pump()
        groups = buffer.take(30, never)
        assert [g.prompt.number for g in groups] == [3 * step, 3 * step + 1, 3 * step + 2]
        assert {v for g in groups for s in g.samples for v in s.version if v >= 0} == {step}
        assert not buffer.done and buffer.placed == 3 * step + 3  # and nobody has begun the next step
        engine.pause()
        engine.update_weights(engine.policy, step + 1)
        engine.resume()
        buffer.acknowledge(engine.version)
        buffer.trained(step + 1)


def test_groups_admitted_together_reach_the_engine_together_and_in_order(rolling):
    engine = Echo(version=0)
    buffer = Buffer(prompts_per_step=4)
    rollout = rolling(buffer, made_by(engine))
    rollout.pump()
    buffer.take(30, never)
    assert [how.key for _, how in engine.asked] == [(0, TRAIN, number, i, 0) for number in range(4) for i in range(2)]


def test_a_reward_that_raises_ends_take_within_seconds_with_its_own_traceback(rolling):
    class Broken(Exception):
        pass

    async def my_reward(prompt, text, ids):
        if prompt.number == 2:
            raise Broken("no gold")
        return 0.0

    buffer = Buffer(prompts_per_step=4)
    rollout = rolling(buffer, made_by(Echo(), my_reward))
    rollout.pump()
    begin = time.monotonic()
    with pytest.raises(Broken, match="no gold") as raised:
        buffer.take(60, never)
    assert time.monotonic() - begin < 5
    assert "my_reward" in {frame.name for frame in traceback.extract_tb(raised.value.__traceback__)}


def test_an_engine_that_breaks_ends_take_too(rolling):
    engine = engine_of("llama")
    engine.policy.model.base_model.register_forward_pre_hook(lambda *_: 1 / 0)
    buffer = Buffer(prompts_per_step=2)
    rolling(buffer, made_by(engine)).pump()
    with pytest.raises(ZeroDivisionError):
        buffer.take(3, never)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_reward_that_ends_the_program_is_a_failure_like_any_other(rolling, end):
    """In an asyncio task either would end the thread unheard, and the trainer would wait for ever."""

    async def leaves(prompt, text, ids):
        raise end(3)

    buffer = Buffer(prompts_per_step=2)
    rolling(buffer, made_by(Echo(0), leaves)).pump()
    with pytest.raises(RuntimeError, match=rf"^prompt \d: its episode or reward ended with {end.__name__}\(3\)$"):
        buffer.take(30, never)


def test_where_one_try_fails_the_others_are_ended(rolling):
    """Nobody waits for them; left alone they would sample on, and one that hangs would stay for ever."""
    ended = []

    async def judged(prompt, text, ids):
        if not ended and len(judging) == 3:
            raise ValueError("one of four")
        judging.append(ids)
        try:
            await forever()
        finally:
            ended.append(ids)

    judging = []
    with pytest.raises(ValueError, match="^one of four$"):
        asyncio.run(asyncio.wait_for(made_by(Echo(), judged, samples=4)(0), timeout=30))
    assert len(ended) == len(judging) == 3


async def forever():
    await asyncio.Event().wait()


def test_an_interrupted_engine_counts_what_it_reads_again_and_what_there_was():
    """Three greedy answers to one prompt are one, and a fourth to another; 3 or more tokens each, then new weights."""
    engine, prompts = engine_of("llama"), [(3, 4, 5)] * 3 + [(6, 7)]

    async def run():
        tasks = [asyncio.create_task(engine.generate(ids, Sampling(8, temperature=0.0))) for ids in prompts]
        while not engine.rows or len(engine.rows[0].new) < 3:
            await asyncio.sleep(0)
        made = len(engine.rows[0].new)
        engine.update_weights(engine.policy, 1)
        await asyncio.gather(*tasks)
        return made

    made = asyncio.run(run())
    spans = engine.lap()
    total = {name: sum(span.args[name] for span in spans) for name in ("rows", "prefilled", "read_again", "interrupted")}
    again = (3 + made) + (2 + made)
    assert total == {"rows": 4 * 8, "prefilled": 3 + 2 + again, "read_again": again, "interrupted": again + 2 * (3 + made)}


def test_asked_to_stop_the_trainer_stops_wherever_it_waits(rolling):
    buffer = Buffer(prompts_per_step=2)
    rollout = rolling(buffer, lambda number: forever())
    rollout.pump()
    asked = iter([False, True])
    with pytest.raises(Stopped):
        buffer.take(60, lambda: next(asked))
    ended = threading.Event()

    async def question():
        try:
            await forever()
        finally:
            ended.set()

    asked = iter([False, True])
    with pytest.raises(Stopped):
        rollout.call(question(), "this", lambda: next(asked))
    assert ended.wait(5)  # nobody goes on answering it


def test_a_question_gets_its_answer_or_its_own_exception(rolling):
    rollout = rolling(Buffer(1), lambda number: forever())

    async def slow(value):
        await asyncio.sleep(0.3)  # longer than the trainer waits between two looks
        if isinstance(value, Exception):
            raise value
        return value

    assert rollout.call(slow(42), "this", never) == 42
    for error in (ValueError("mine"), TimeoutError("the question's own")):
        with pytest.raises(type(error), match=str(error)):
            rollout.call(slow(error), "this", never)


def test_a_reward_that_holds_the_thread_is_named_and_in_the_end_ends_the_run(monkeypatch, capsys):
    monkeypatch.setattr("nanorl.rollout.HEARTBEAT", 0.3)
    held = threading.Event()

    async def blocking(number):
        held.wait(20)

    rollout = Rollout(Buffer(1, pace=Pace(deadline=2.5)), blocking)
    try:
        rollout.pump()
        with pytest.raises(Lost, match="held its thread for . s .--deadline 2.5., and with it the weights; let it await"):
            rollout.between(lambda: None, "the weights")
    finally:
        held.set()
        rollout.close()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "waiting for the weights" and re.search("waiting for the weights: an .* holds its thread since [12] s", said[-1])


def test_a_reward_that_holds_the_thread_at_the_end_is_left_behind_with_a_warning(monkeypatch, capsys):
    monkeypatch.setattr("nanorl.rollout.CLOSING", 0.3)
    began, held = threading.Event(), threading.Event()

    async def blocking(number):
        began.set()
        held.wait(20)

    rollout = Rollout(Buffer(1), blocking)
    rollout.pump()
    assert began.wait(5)
    rollout.close()
    assert rollout.thread.is_alive() and "has held its thread for 0 s; it is left behind" in capsys.readouterr().err
    held.set()
    while rollout.tasks or asyncio.all_tasks(rollout.loop):  # what it was asked for, it does at last
        time.sleep(0.01)
    rollout.loop.call_soon_threadsafe(rollout.loop.stop)
    rollout.thread.join(5)
    assert not rollout.thread.is_alive()


def test_a_thread_that_only_waits_is_not_held(rolling, monkeypatch, capsys):
    monkeypatch.setattr("nanorl.rollout.HEARTBEAT", 0.3)
    rollout = rolling(Buffer(1, pace=Pace(deadline=0.5)), lambda number: forever())
    rollout.call(asyncio.sleep(1.5), "this", never)
    assert set(capsys.readouterr().out.splitlines()) == {"waiting for this"}


def test_an_answer_that_comes_between_two_looks_is_the_answer(rolling, monkeypatch):
    """The wait runs out, and before anybody asks whether the answer is there, it is."""

    class Late:
        def __init__(self):
            self.waits = 0

        def result(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                raise TimeoutError
            return 42

        def done(self):
            return True

    question = nothing(None, "", ())
    rollout = rolling(Buffer(1), lambda number: forever())
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", lambda coroutine, loop: Late())
        try:
            assert rollout.call(question, "this", never) == 42
        finally:
            question.close()


def test_closing_ends_what_is_in_the_making_and_leaves_no_thread():
    before, ended = len(rollout_threads()), []

    async def endless(number):
        try:
            await forever()
        finally:
            ended.append(number)

    buffer = Buffer(prompts_per_step=3)
    rollout = Rollout(buffer, endless)
    rollout.pump()
    while len(rollout.tasks) < 3:
        time.sleep(0.001)
    assert len(rollout_threads()) == before + 1
    rollout.close()
    assert sorted(ended) == [0, 1, 2] and not rollout.thread.is_alive()
    assert len(rollout_threads()) == before
    assert buffer.error is None  # to be ended is no error


def test_closing_while_the_engine_samples_is_silent_and_leaves_no_thread_and_an_engine_fit_for_use(caplog):
    """Whoever presses Ctrl-C sees no traceback of what was in the making."""
    engine = engine_of("llama")
    rollout = Rollout(Buffer(prompts_per_step=3), made_by(engine))
    engine.pause()  # nothing finishes before it is closed
    rollout.pump()
    while len(engine.waiting) < 6:
        time.sleep(0.001)
    rollout.close()
    assert not rollout.thread.is_alive()
    gc.collect()  # when asyncio tells of exceptions that nobody has asked for
    assert not caplog.records
    engine.resume()
    jobs = jobs_of([4, 9])
    assert tokens(generate(engine, jobs)) == tokens(alone("llama", jobs))
