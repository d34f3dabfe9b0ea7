"""Inside vLLM: what is loaded generates, what is broken does not, and a probe sees any tensor that stayed behind."""

from __future__ import annotations

import os
import time
from multiprocessing import get_context

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from nanorl import tiny
from nanorl.policy import Policy, admit
from nanorl.snapshot import snapshot
from nanorl.sync import FLOOR, GROWTH
from nanorl.transfer import describe
from tests.server import small, spread

pytestmark = pytest.mark.slow
LR = 1e-4
PROMPT = torch.randint(17, (200,), generator=torch.Generator().manual_seed(3)).tolist()  # cached by blocks of 128


def untied(seed=0):
    """A policy of another family, its head apart from its embedding, grouped heads, biases."""
    config = LlamaConfig(vocab_size=17, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, attention_bias=True, max_position_embeddings=256, pad_token_id=0,
                         bos_token_id=None, eos_token_id=1)  # fmt: skip
    return varied(Policy(spread(admit(LlamaForCausalLM(config), "untied"), seed)), seed)


def tied(seed=0):
    """The policy of the other tests' server, with norms of its own for each seed."""
    return varied(small(seed), seed)


def varied(policy, seed):
    """The policy with norms and biases that differ from seed to seed."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() < 2:
                p.add_(torch.randn(p.shape, generator=random) * 0.2)
    return policy


POLICIES = {"tied": tied, "untied": untied}


# ------------------------------------------------------------------------------------------------ vLLM, in a process


def serve(connection, folder):
    """In a process of its own: a vLLM in this process alone, and what a test asks it to do."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                      VLLM_LOGGING_LEVEL="ERROR")  # fmt: skip
    from vllm import LLM, SamplingParams  # not in the tests' process: it changes threads, signals and affinity

    llm = LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True, logprobs_mode="processed_logprobs",
              generation_config="vllm", weight_transfer_config={"backend": "nanorl"}, enable_prefix_caching=True,
              worker_extension_cls="nanorl.receive.Extension", scheduling_policy="priority",
              distributed_executor_backend="uni")  # fmt: skip

    def score(ids):
        """The log-probs of ids[1:]."""
        how = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (out,) = llm.generate([{"prompt_token_ids": ids}], how, use_tqdm=False)
        return [by_id[token].logprob for token, by_id in zip(ids[1:], out.prompt_logprobs[1:])]

    def greedy(ids, count):
        """Tokens and log-probs of an answer; its prompt may come from the prefix cache."""
        how = SamplingParams(max_tokens=count, temperature=0.0, logprobs=0, ignore_eos=True)
        (out,) = llm.generate([{"prompt_token_ids": ids}], how, use_tqdm=False)
        answer = out.outputs[0]
        return list(answer.token_ids), [by_id[t].logprob for t, by_id in zip(answer.token_ids, answer.logprobs)]

    calls = {"score": score, "greedy": greedy, "rpc": lambda method: llm.collective_rpc(method)[0],
             "start": llm.start_weight_update, "update": lambda info: llm.update_weights({"update_info": info}),
             "finish": llm.finish_weight_update, "forget": llm.reset_prefix_cache}  # fmt: skip
    while True:
        name, *args = connection.recv()
        try:
            connection.send((calls[name](*args), None))
        except Exception as error:  # for the test to see
            connection.send((None, f"{type(error).__name__}: {error}"))


class Inside:
    """A vLLM that holds a policy's weights, as its process sees it."""

    def __init__(self, policy, folder):
        policy.model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        context = get_context("spawn")
        self.folder, (self.connection, theirs) = folder, context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(folder)), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, name, *args):
        """What a call returns; raises RuntimeError with what it raised."""
        self.connection.send((name, *args))
        result, error = self.connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def stage(self, weights, **changed):
        """Begin an update with these tensors and digests, from a file; what it comes to."""
        path = self.folder / "weights.safetensors"
        save_file(weights.tensors | changed, path)
        self("rpc", "nanorl_drop")
        self("start")
        self("update", {"tensors": describe(weights.tensors), "digests": weights.digests, "path": str(path)})
        while (report := self("rpc", "nanorl_staged"))["state"] == "receiving":
            time.sleep(0.002)
        return report

    def load(self, weights):
        """A whole update."""
        assert self.stage(weights)["state"] == "whole"
        self("finish")
        self("forget")  # as a pause does


@pytest.fixture(scope="module", params=list(POLICIES))
def inside(request, tmp_path_factory):
    """A vLLM of each kind, and the function that makes its policy from a seed."""
    make = POLICIES[request.param]
    vllm = Inside(make(), tmp_path_factory.mktemp(request.param))
    yield vllm, make
    vllm.process.kill()
    vllm.process.join()


def mismatch(vllm, probe):
    """The mean difference of the probe's log-probs, as `Link.prove` takes it."""
    return float((torch.tensor(vllm("score", list(probe.ids))) - torch.tensor(probe.logp)).abs().mean())


def moved(policy, seed=0):
    """The policy after a step of ±LR for each weight, as Adam's first."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(LR * (torch.randint(2, p.shape, generator=random) * 2 - 1))
    return policy


# ------------------------------------------------------------------------------------------------ what it generates


def test_it_says_which_model_it_serves_and_how(inside):
    vllm, make = inside
    about, config = vllm("rpc", "nanorl_about"), make().model.config
    assert all(about["config"][name] == getattr(config, name) for name in ("hidden_size", "vocab_size", "model_type"))
    assert about["config"]["tie_word_embeddings"] == config.tie_word_embeddings
    assert (about["dtype"], about["device"], about["room"], about["workers"]) == ("float32", "cpu", 256, 1)
    assert about["receiver"] and about["logprobs"] == "processed_logprobs" and about["policy"] == "priority"


def test_after_an_update_it_answers_as_a_fresh_one_with_the_new_weights(inside, tmp_path):
    """Prompt log-probs and greedy answers, the prompt having been in the prefix cache under the old weights."""
    vllm, make = inside
    new = make(seed=5)
    old = vllm("greedy", PROMPT, 24)
    vllm.load(snapshot(new, 1))
    fresh = Inside(new, tmp_path / "fresh")
    try:
        wanted = fresh("greedy", PROMPT, 24), fresh("score", PROMPT)
    finally:
        fresh.process.kill()
    tokens, logp = vllm("greedy", PROMPT, 24)
    assert tokens == wanted[0][0] != old[0]
    torch.testing.assert_close(torch.tensor(logp), torch.tensor(wanted[0][1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(vllm("score", PROMPT)), torch.tensor(wanted[1]), atol=1e-5, rtol=0)


def test_any_number_of_updates_leaves_the_trainers_log_probs(inside):
    vllm, make = inside
    for seed in (1, 2, 1):
        weights = snapshot(make(seed=seed), seed)
        vllm.load(weights)
        assert mismatch(vllm, weights.probe) < FLOOR


def test_the_prefix_cache_outlives_an_update_unless_it_is_cleared(inside):
    """Why the server is paused with the default that clears it: without that, old keys and values answer."""
    vllm, make = inside
    one, other = snapshot(make(seed=1), 1), snapshot(make(seed=2), 2)
    vllm.load(other)
    wanted = torch.tensor(vllm("greedy", PROMPT, 8)[1])
    vllm.load(one)
    vllm("greedy", PROMPT, 8)
    vllm.stage(other)
    vllm("finish")
    stale = torch.tensor(vllm("greedy", PROMPT, 8)[1])
    vllm("forget")
    torch.testing.assert_close(torch.tensor(vllm("greedy", PROMPT, 8)[1]), wanted, atol=1e-5, rtol=0)
    assert (stale - wanted).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------ what breaks


def test_what_is_staged_changes_nothing_until_it_is_loaded(inside):
    vllm, make = inside
    old = snapshot(make(), 0)
    vllm.load(old)
    assert vllm.stage(snapshot(make(seed=3), 1))["state"] == "whole"
    assert mismatch(vllm, old.probe) < FLOOR


def test_every_tensor_that_is_damaged_on_the_way_is_named_and_nothing_is_loaded(inside):
    vllm, make = inside
    old, new = snapshot(make(), 0), snapshot(make(seed=3), 1)
    vllm.load(old)
    names = [list(new.tensors)[i] for i in (0, 4, -1)]
    damaged = {name: new.tensors[name].clone() for name in names}
    for tensor in damaged.values():
        tensor.view(-1)[-1] += 1e-6
    assert vllm.stage(new, **damaged)["why"] == f"damaged on the way: {', '.join(names)}"
    with pytest.raises(RuntimeError, match="no whole version"):
        vllm("finish")
    assert mismatch(vllm, old.probe) < FLOOR
    vllm.load(new)
    assert mismatch(vllm, new.probe) < FLOOR


def test_a_file_that_is_not_there_or_is_another_is_a_failure_and_no_more(inside):
    vllm, make = inside
    old, new = snapshot(make(), 0), snapshot(make(seed=3), 1)
    vllm.load(old)
    for file, why in (("nowhere", "FileNotFoundError"), ("config.json", "Safetensor")):
        vllm("rpc", "nanorl_drop")
        vllm("start")
        vllm("update", {"tensors": describe(new.tensors), "digests": new.digests,
                        "path": str(vllm.folder / file)})  # fmt: skip
        while (report := vllm("rpc", "nanorl_staged"))["state"] == "receiving":
            time.sleep(0.002)
        assert report["state"] == "failed" and why in report["why"]
    assert mismatch(vllm, old.probe) < FLOOR


def test_an_update_whose_trainer_went_away_does_not_stand_in_the_next_ones_way(inside):
    """vLLM refuses a second start; `nanorl_drop` undoes the first."""
    vllm, make = inside
    vllm("rpc", "nanorl_drop")
    vllm("start")
    with pytest.raises(RuntimeError, match="already active"):
        vllm("start")
    new = snapshot(make(seed=4), 1)
    vllm.load(new)
    assert mismatch(vllm, new.probe) < FLOOR


# ------------------------------------------------------------------------------------------------ the probe's power


def test_any_one_tensor_that_stays_behind_by_a_step_of_1e_4_is_seen(inside):
    """Every tensor in turn is the old one, digested as if it were right, on the way that all tensors take."""
    vllm, make = inside
    old = snapshot(make(), 0)
    vllm.load(old)
    limit = max(GROWTH * mismatch(vllm, old.probe), FLOOR)
    new = snapshot(moved(make()), 1)
    vllm.load(new)
    assert mismatch(vllm, new.probe) < limit
    seen = {}
    for name, tensor in old.tensors.items():
        now, digested = new.tensors[name].clone(), new.digests[name]
        new.tensors[name].copy_(tensor)
        new.digests[name] = old.digests[name]
        vllm.load(new)
        seen[name] = mismatch(vllm, new.probe)
        new.tensors[name].copy_(now)
        new.digests[name] = digested
    assert len(seen) > 20 and min(seen.values()) > limit, sorted(seen.items(), key=lambda item: item[1])[:3]
