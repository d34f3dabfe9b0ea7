"""What is scored is what the model says, token by token, and an optimizer step moves the weights or leaves them whole."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from nanorl import policy as module
from nanorl import tiny
from nanorl.algorithms import ALGORITHMS
from nanorl.config import Config, Refused
from nanorl.optimize import adamw, clip_and_step, learning_rate
from nanorl.policy import Policy, admit, check_scores, end_tokens, frozen, load, measure, scored
from nanorl.sample import Group, Prompt, Sample, collate

V = 17  # the tiny tokenizer's vocabulary
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": V, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
EVERY = ["qwen3", "gpt2", "llama"]


def make(name, dtype=torch.float64):
    """A model whose weights are wide enough that position, padding and the whole past show in its log-probs."""
    net = {
        "qwen3": lambda: tiny.model(0),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1,
                                                   bos_token_id=1, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, attention_dropout=0.1)),
    }[name]()  # fmt: skip
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=random) * 1.5 / p.shape[-1] ** 0.5)
    return net.to(dtype)


def sample(ids, mask):
    return Sample(ids=tuple(ids), mask=tuple(mask), logp_behave=(-1.0,) * len(ids), finish="stop",
                  version=tuple(0 if m else -1 for m in mask), rewards=((len(ids) - 1, 1.0),))  # fmt: skip


def make_batch(lengths=(9, 3, 14, 6), seed=0):
    """Rows of unequal length, any tokens, masks with gaps as several turns leave them; the last token is sampled."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for n in lengths:
        mask = [False] + (torch.rand(n - 2, generator=random) < 0.6).tolist() + [True]
        rows.append(sample(torch.randint(0, V, (n,), generator=random).tolist(), mask))
    return collate([Group(Prompt(i, row.ids[:1], "", ""), (row,)) for i, row in enumerate(rows)])


def gradient(policy, value):
    """The gradient of a value with respect to all weights, as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(policy.parameters()))])


def probe(policy, batch):
    """Log-probs and the gradient of a sum of them with unequal weights, also off the mask."""
    logp = policy(batch).logp
    weight = torch.arange(1, logp.numel() + 1, dtype=logp.dtype).reshape(logp.shape).sin()
    return logp.detach(), gradient(policy, (logp * weight).sum())


def same(a, b, tolerance=1e-12):
    return all((x - y).abs().max() <= tolerance * x.abs().max() for x, y in zip(a, b))


# ---- what is scored


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", EVERY)
def test_logp_at_t_is_the_models_own_log_softmax_at_t_minus_1_of_the_token_at_t(name, temperature):
    """Row by row, alone and unpadded, position by position; 0 off the mask."""
    net, batch = make(name), make_batch()
    with torch.no_grad():
        logp = Policy(net, temperature)(batch).logp
        assert logp.shape == batch.mask.shape and logp.dtype == torch.float64
        for i, n in enumerate(batch.length.tolist()):
            logits = net(input_ids=batch.ids[i : i + 1, :n]).logits[0]
            for t in range(batch.mask.shape[1]):
                told = logp[i, t].item()
                if not batch.mask[i, t]:
                    assert told == 0.0
                else:
                    assert told == pytest.approx(torch.log_softmax(logits[t - 1] / temperature, 0)[batch.ids[i, t]].item(), abs=1e-10)


def test_the_temperature_divides_logits_and_not_log_probs():
    """Logits (2, 0) at T = 0.5: log-prob −0.018, where −0.127 is the raw one and −0.254 the raw one divided."""
    policy = Policy(make("qwen3"), temperature=0.5)
    head = policy.model.get_output_embeddings()
    head.weight.data = torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double()
    assert policy.score(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([0])).item() == pytest.approx(-0.01815, abs=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_padding_changes_nothing_whatever_it_holds_and_however_wide_it_is(name):
    policy, batch = Policy(make(name)), make_batch()
    padding = torch.arange(batch.ids.shape[1]) >= batch.length[:, None]
    assert padding.any()
    clean = probe(policy, batch)
    for seed in range(3):
        garbage = torch.randint(0, V, batch.ids.shape, generator=torch.Generator().manual_seed(seed))
        assert same(clean, probe(policy, replace(batch, ids=batch.ids.where(~padding, garbage))))
    rows = [batch.select(torch.tensor([i])) for i in range(len(batch))]  # each row alone, without padding
    for i, (row, n) in enumerate(zip(rows, batch.length.tolist())):
        assert row.ids.shape == (1, n)
        assert torch.allclose(policy(row).logp[0], clean[0][i, :n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_change_neither_value_nor_gradient_and_bound_the_logits(name, rows, monkeypatch):
    policy, batch = Policy(make(name), temperature=0.7), make_batch()
    plain, sizes, score = probe(policy, batch), [], policy.score
    monkeypatch.setattr(module, "CHUNK", rows * V + 1)
    monkeypatch.setattr(policy, "score", lambda past, token: sizes.append(len(token)) or score(past, token))
    assert same(plain, probe(policy, batch))
    assert max(sizes) == rows
    assert sum(sizes) == 2 * batch.mask.sum()  # once forward, and once again for the gradient: nothing was kept


def test_a_batch_in_which_nothing_was_sampled_scores_zero_everywhere():
    batch = make_batch()
    assert Policy(make("qwen3"))(replace(batch, mask=torch.zeros_like(batch.mask))).logp.eq(0).all()


ENTROPY = frozenset({"entropy"})


@pytest.mark.parametrize("rows", [1, 3, 10**6])
@pytest.mark.parametrize("name", EVERY)
def test_entropy_is_that_of_the_models_own_distribution_in_value_and_gradient(name, rows, monkeypatch):
    """H = −Σ_v p_v log p_v, from [B, T, V] logits that the policy itself never has; 0 off the mask."""
    net, batch, temperature = make(name).eval(), make_batch(), 0.7
    logp = torch.log_softmax(net(input_ids=batch.ids).logits / temperature, -1)
    before = -(logp.exp() * logp).sum(-1)[:, :-1]  # [B, T−1] of the distribution that the next token is from
    weight = torch.arange(1, batch.mask.numel() + 1).double().reshape(batch.mask.shape).sin() * batch.mask
    wanted = gradient(net, (before * weight[:, 1:]).sum())
    monkeypatch.setattr(module, "CHUNK", rows * V)
    out = Policy(net, temperature)(batch, ENTROPY)
    assert same([out.entropy[:, 1:]], [before * batch.mask[:, 1:]]) and out.entropy[~batch.mask].eq(0).all()
    assert same([gradient(net, (out.entropy * weight).sum())], [wanted], 1e-10) and wanted.norm() > 0.1


def test_asking_for_the_entropy_changes_no_log_prob_and_not_asking_computes_none():
    policy, batch = Policy(make("qwen3"), temperature=0.7), make_batch()
    without, asked = policy(batch), policy(batch, ENTROPY)
    assert without.entropy is None and asked.entropy[batch.mask].gt(0).all()
    assert same([asked.logp], [without.logp])
    assert same([gradient(policy, asked.logp.sum())], [gradient(policy, policy(batch).logp.sum())])
    assert torch.equal(without.hidden, policy.hidden(batch.ids))


def test_probabilities_of_zero_have_no_entropy_and_a_finite_gradient():
    """Logits 1,000 apart in float32: p log p is 0, not 0 · −∞."""
    policy = Policy(make("llama", torch.float32), temperature=0.05)
    policy.model.lm_head.weight.data *= 200
    entropy = policy(make_batch(), ENTROPY).entropy
    assert entropy.isfinite().all() and entropy.min() >= 0 and entropy.max() < 1e-3
    assert gradient(policy, entropy.sum()).isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_two_passes_of_a_model_with_dropout_are_equal(name):
    """And KL(policy‖reference) is 0 before the first step."""
    net, batch = make(name).train(), make_batch()
    assert not torch.equal(net(batch.ids).logits, net(batch.ids).logits) or name == "qwen3"  # it does drop
    policy = Policy(admit(net, name))
    assert torch.equal(policy(batch).logp, policy(batch).logp)


def test_an_admitted_gpt2_drops_nothing_even_in_training_mode():
    policy, batch = Policy(admit(make("gpt2"), "gpt2")), make_batch()
    calm = policy(batch).logp
    assert torch.equal(policy.train()(batch).logp, calm)


@pytest.mark.parametrize("name", EVERY)
def test_bfloat16_is_the_precision_of_passes_and_never_that_of_weights(name):
    net, batch = make(name, torch.float32), make_batch()
    wide, narrow = Policy(net)(batch).logp, Policy(net, dtype=torch.bfloat16)(batch).logp
    assert narrow.dtype == torch.float32 and narrow.isfinite().all()
    assert 0 < (wide - narrow).abs().max() < 0.3  # it is another precision, and close
    narrow.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())


# ---- measure


def counted(policy):
    """The rows that the policy scores from now on, as lists of their places in the batch, one a pass."""
    passes = []
    policy.register_forward_hook(lambda _, args, __: passes.append(args[0].row.tolist()))
    return passes


def test_one_update_costs_no_pass_and_more_cost_one_for_the_rows_of_later_updates_alone():
    policy, batch = Policy(make("qwen3")), make_batch()
    exact, passes = policy(batch).logp.detach(), counted(policy)
    grpo = ALGORITHMS["grpo"]

    def measured(**flags):
        cfg = Config(**flags)
        updates = batch.shuffle_into(cfg.updates_per_batch, cfg.epochs_per_batch, key=(0, 0))
        passes.clear()
        return updates, measure(batch, policy, None, grpo.needs(cfg), updates[1:], tokens=8)

    _, result = measured()
    assert passes == [] and result is batch

    updates, result = measured(updates_per_batch=2)
    first, second = (rows.tolist() for rows in updates)
    assert sorted(sum(passes, [])) == sorted(second) and len(passes) > 1
    assert not result.logp_prox.requires_grad
    assert result.logp_prox[first].isnan().all()
    assert torch.allclose(result.logp_prox[second].double(), exact[second], rtol=0, atol=1e-6)

    _, result = measured(epochs_per_batch=2)  # the second pass takes every row again
    assert sorted(sum(passes, [])) == list(range(len(batch)))
    assert torch.allclose(result.logp_prox.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 20, 10**6])
def test_the_reference_is_measured_for_every_row_by_its_own_weights_in_passes_of_any_size(tokens):
    policy, ref, batch = Policy(make("gpt2")), Policy(make("llama")), make_batch()
    mine, theirs = counted(policy), counted(ref)
    result = measure(batch, policy, ref, frozenset({"logp_ref"}), [], tokens)
    assert mine == [] and sorted(sum(theirs, [])) == list(range(len(batch)))
    assert torch.allclose(result.logp_ref.double(), ref(batch).logp, rtol=0, atol=1e-6)
    assert result.logp_prox is None


@pytest.mark.parametrize("tokens", [1, 20, 10**6])
def test_whatever_the_order_in_which_rows_are_asked_for_each_gets_its_own_scores_and_the_others_none(tokens):
    policy, batch, rows = Policy(make("llama")), make_batch((9, 3, 14, 6, 12)), torch.tensor([4, 0, 3])
    exact, found = policy(batch).logp.detach(), scored(lambda micro: policy(micro).logp.detach(), batch, rows, tokens)
    assert torch.allclose(found[rows].double(), exact[rows], rtol=0, atol=1e-6) and exact.any(1).all()
    assert found[[1, 2]].isnan().all()


# ---- the reference


def saved(net, folder):
    """The folder of a model and the tiny tokenizer."""
    net.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_the_reference_is_the_model_of_its_folder_at_the_policys_temperature_and_never_trained(tmp_path):
    policy, batch = Policy(make("llama", torch.float32), temperature=0.7), make_batch()
    ref = frozen(str(saved(make("qwen3", torch.float32), tmp_path)), policy, tiny.tokenizer())
    assert torch.equal(ref(batch).logp, Policy(make("qwen3", torch.float32), temperature=0.7)(batch).logp)
    assert not any(p.requires_grad for p in ref.parameters()) and not ref(batch).logp.requires_grad
    half, alike = (Policy(make(name, torch.float32), dtype=torch.bfloat16) for name in ("llama", "qwen3"))
    assert torch.equal(frozen(str(tmp_path), half, tiny.tokenizer())(batch).logp, alike(batch).logp)


def test_a_reference_from_the_policys_own_folder_stays_when_the_policy_moves(tmp_path):
    policy, batch = Policy(load(str(saved(make("gpt2", torch.float32), tmp_path)), "cpu")[0]), make_batch()
    ref = frozen(str(tmp_path), policy, tiny.tokenizer())
    start = policy(batch).logp.detach()
    policy(batch).logp.sum().backward()
    clip_and_step(policy, adamw(policy, Config()), 1e-2, 1.0)
    assert torch.equal(ref(batch).logp, start) and not torch.equal(policy(batch).logp, start)


def test_a_reference_of_another_vocabulary_or_none_is_refused_by_its_own_flag_in_one_line(tmp_path):
    policy = Policy(make("llama", torch.float32))
    other = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": V + 1}))
    for folder, wrong in ((saved(other, tmp_path / "other"), f"it knows {V + 1} tokens, the policy {V};"),
                          (tmp_path / "none", "no such folder")):  # fmt: skip
        with pytest.raises(Refused, match=f"^--ref-model {folder}: {wrong}") as refused:
            frozen(str(folder), policy, tiny.tokenizer())
        assert "\n" not in str(refused.value)


def test_a_reference_that_numbers_tokens_otherwise_is_refused_in_one_line(tmp_path, monkeypatch):
    """It would score other texts. One that merely lacks a token of the policy's is not told apart by that."""
    policy, words = Policy(make("llama", torch.float32)), tiny.tokenizer()
    monkeypatch.setattr(tiny, "CHARACTERS", tiny.CHARACTERS[::-1])
    saved(make("qwen3", torch.float32), tmp_path)
    with pytest.raises(Refused, match=f"^--ref-model {tmp_path}: its tokenizer numbers tokens otherwise; use") as refused:
        frozen(str(tmp_path), policy, words)
    assert "\n" not in str(refused.value)
    words.add_tokens(["<new>"])
    monkeypatch.undo()
    tiny.tokenizer().save_pretrained(tmp_path)
    frozen(str(tmp_path), policy, words)


# ---- which models may be trained


class Halved(LlamaForCausalLM):
    """A model that scales its logits without a name for it in its config."""

    def forward(self, **inputs):
        out = super().forward(**inputs)
        return replace(out, logits=out.logits / 2)


SCALED = {
    "final_logit_softcapping": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=30.0)),
    "logits_scaling": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "logit_scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625)),
    None: lambda: Halved(LlamaConfig(**SIZES)),
}


@pytest.mark.parametrize("scaling", SCALED)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(scaling):
    net = SCALED[scaling]()
    with torch.no_grad():
        net.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(0))
    if scaling:
        with pytest.raises(Refused, match=f"^--model NAME: {scaling}"):
            admit(net, "--model NAME")
    with pytest.raises(Refused, match="^--model: log-probs from hidden states differ"):
        check_scores(Policy(net), make_batch().ids)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize("name", EVERY)
def test_a_plain_model_passes_the_check(name, temperature):
    ids = make_batch().ids
    assert check_scores(Policy(make(name, torch.float32), temperature), ids) < 1e-5 * max(1, 1 / temperature)
    check_scores(Policy(make(name, torch.float32), temperature=1.0, dtype=torch.bfloat16), ids)


def test_a_model_that_says_nan_is_refused():
    net = make("llama", torch.float32)
    net.lm_head.weight.data[3, 3] = math.nan
    with pytest.raises(Refused, match="^--model: log-probs"):
        check_scores(Policy(net), make_batch().ids)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(Refused, match="^--model NAME: no output embedding"):
        admit(make("llama").model, "--model NAME")


@pytest.mark.parametrize(("declared", "of_tokenizer", "all_of_them"), [
    (1, 1, {1}), (1, 2, {1, 2}), ([2, 7], 2, {2, 7}), ([2, 7], None, {2, 7}), (None, 5, {5}), (0, None, {0}), ([], 0, {0})])  # fmt: skip
def test_every_declared_end_token_ends(declared, of_tokenizer, all_of_them):
    net = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=declared))
    assert end_tokens(net, SimpleNamespace(eos_token_id=of_tokenizer)) == all_of_them


def test_a_model_without_any_end_token_is_refused():
    for config in (None, SimpleNamespace(eos_token_id=None), SimpleNamespace(eos_token_id=[])):
        with pytest.raises(Refused, match="end token"):
            end_tokens(SimpleNamespace(generation_config=config), SimpleNamespace(eos_token_id=None))


def test_a_generation_config_with_a_temperature_can_be_saved_once_the_model_is_admitted(tmp_path):
    net = make("llama", torch.float32)
    net.generation_config.temperature, net.generation_config.do_sample = 0.6, False
    with pytest.raises(ValueError, match="temperature"):
        net.save_pretrained(tmp_path / "refused")
    admit(net, "llama").save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values()))
    assert again.generation_config.temperature == 0.6


def test_weights_saved_in_bfloat16_are_trained_in_float32(tmp_path):
    net, words = load(str(saved(make("llama", torch.bfloat16), tmp_path)), "cpu")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert words("1+2=").input_ids == tiny.tokenizer()("1+2=").input_ids


def test_a_folder_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(Refused, match=f"^--model {tmp_path}: no config.json"):
        load(str(tmp_path), "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(Refused, match=f"^--model {tmp_path}: cannot be loaded") as refused:
        load(str(tmp_path), "cpu")
    assert "\n" not in str(refused.value)


# ---- how the weights are moved


def test_a_weight_of_one_moves_by_lr_1e_6_under_bfloat16_passes():
    """Adam's first step is lr·sign(gradient); in bfloat16 1 − 1e-6 would be 1."""
    policy = Policy(make("llama", torch.float32), dtype=torch.bfloat16)
    optimizer = adamw(policy, Config(lr=1e-6))
    policy(make_batch()).logp.sum().backward()
    norm = policy.model.model.norm.weight
    assert norm.detach().eq(1).all() and norm.grad.abs().min() > 1e-5
    sign = norm.grad.sign()
    clip_and_step(policy, optimizer, lr=1e-6, max_grad_norm=1e9)
    assert torch.allclose(1 - norm.detach(), 1e-6 * sign, rtol=0.1, atol=0)
    assert all(state[key].dtype == torch.float32 for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))


def test_weight_decay_acts_on_matrices_alone():
    policy = Policy(make("gpt2"))
    groups = adamw(policy, Config(weight_decay=0.1)).param_groups
    decayed = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decayed == {id(p): 0.1 if p.dim() >= 2 else 0.0 for p in policy.parameters()}


def test_the_learning_rate_rises_linearly_then_stays_or_falls_to_zero_just_after_the_last_step():
    def rates(schedule, steps, warmup):
        cfg = Config(lr=8.0, lr_schedule=schedule, steps=steps, warmup_steps=warmup)
        return [learning_rate(step, cfg) for step in range(steps + 1)]

    assert rates("constant", 3, 0) == [8.0] * 4
    assert rates("constant", 5, 4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates("linear", 4, 0) == [8.0, 6.0, 4.0, 2.0, 0.0]
    assert rates("linear", 6, 2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    assert rates("cosine", 4, 0) == pytest.approx([4 + 4 * math.cos(math.pi * x) for x in (0, 0.25, 0.5, 0.75, 1)])
    assert rates("cosine", 6, 2) == pytest.approx([4.0, *rates("cosine", 4, 0)[:1], *rates("cosine", 4, 0)])
    assert rates("linear", 2, 2) == [4.0, 8.0, 8.0]  # warm-up to the end: no division by zero


def stepped(policy, optimizer, before, **given):
    """The norm, and how every weight moved in one step."""
    norm = clip_and_step(policy, optimizer, **given)
    return norm, [a.detach() - b for a, b in zip(policy.parameters(), before)]


def test_a_step_goes_along_the_gradient_shortened_to_the_norm_that_is_allowed():
    """By plain descent, in which the weights move by lr·gradient·min(1, allowed/norm). The norm told is that before."""
    for allowed in (0.5, 1e9):
        policy = Policy(make("llama"))
        policy(make_batch()).logp.sum().backward()
        before, gradients = ([x.detach().clone() for x in xs] for xs in (policy.parameters(), [p.grad for p in policy.parameters()]))
        size = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        norm, moved = stepped(policy, torch.optim.SGD(policy.parameters(), lr=99.0), before, lr=0.01, max_grad_norm=allowed)
        assert size > 0.5 and norm == pytest.approx(size, rel=1e-12)
        for m, g in zip(moved, gradients):
            assert torch.allclose(m, -0.01 * g * min(1, allowed / size), rtol=1e-4, atol=1e-12)
        assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_bad_number_in_the_gradient_leaves_weights_and_moments_bitwise_as_they_were(poison):
    policy = Policy(make("llama"))
    optimizer = adamw(policy, Config(weight_decay=0.1))
    policy(make_batch()).logp.sum().backward()
    clip_and_step(policy, optimizer, 1e-3, 1.0)
    weights = [p.detach().clone() for p in policy.parameters()]
    moments = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in policy.parameters()]

    policy(make_batch()).logp.sum().backward()
    policy.model.lm_head.weight.grad[3, 2] = poison
    norm = clip_and_step(policy, optimizer, 1e-3, 1.0)
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.parameters()))
    assert all(torch.equal(v, optimizer.state[p][k]) for p, was in zip(policy.parameters(), moments) for k, v in was.items())

    policy(make_batch()).logp.sum().backward()  # and the next good gradient is not spoiled by it
    assert math.isfinite(clip_and_step(policy, optimizer, 1e-3, 1.0))
    assert all(p.isfinite().all() for p in policy.parameters())


def test_no_gradient_is_no_step_not_even_of_weight_decay():
    policy = Policy(make("llama"))
    optimizer = adamw(policy, Config(weight_decay=0.1))
    weights = [p.detach().clone() for p in policy.parameters()]
    assert clip_and_step(policy, optimizer, 1e-3, 1.0) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.parameters())) and not optimizer.state


def test_a_rate_of_0_is_no_step_so_that_moments_do_not_gather_what_is_not_followed():
    """The gradient is told and cleared. The first step after it is that of a fresh optimizer."""
    policy = Policy(make("llama"))
    optimizer, weights = adamw(policy, Config(weight_decay=0.1)), [p.detach().clone() for p in policy.parameters()]
    policy(make_batch()).logp.sum().backward()
    size = math.sqrt(sum(float(p.grad.square().sum()) for p in policy.parameters()))
    assert clip_and_step(policy, optimizer, 0.0, 1.0) == pytest.approx(size, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.parameters())) and not optimizer.state
    assert all(p.grad is None for p in policy.parameters())


def test_only_weights_that_want_a_gradient_are_trained():
    policy = Policy(make("llama"))
    head = policy.model.lm_head.weight.requires_grad_(False)
    trained = {id(p) for group in adamw(policy, Config()).param_groups for p in group["params"]}
    assert id(head) not in trained and len(trained) == len(list(policy.parameters())) - 1
