"""What is scored? One module around a `transformers` model: the policy, and the frozen reference.

`forward` is the only entry. The model's output at position t−1 is the distribution of token t, and `logp[:, t]` is
written where the token stands: `before` is the only place of the project where something is shifted by one.

Log-probs are computed from the hidden states, for sampled tokens alone and a chunk at a time, so that the [B, T, V]
tensor of logits (a gigabyte at a vocabulary of 150,000 and 2,000 tokens) never exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from nanorl.config import Refused
from nanorl.sample import Batch

logging.disable_progress_bar()  # one for every file saved would bury the run's own lines
CHUNK = 1 << 24  # logits that exist at a time. 64 MB: blocks under 32 MB glibc keeps, and its heap grew to gigabytes


class Out(NamedTuple):
    """What a pass says about the sampled tokens of a batch; 0 where the mask is False."""

    logp: Tensor  # [B, T] log π_θ(ids[:, t] | ids[:, :t])
    entropy: Tensor | None  # [B, T] of the whole distribution that ids[:, t] was drawn from, nats; where it is needed
    hidden: Tensor  # [B, T, H] the last hidden states, unshifted: a critic on the same trunk reads them


class Policy(nn.Module):
    """π_θ(token | past) at one sampling temperature, around a causal language model with an output embedding."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.model, self.temperature, self.dtype = model.eval(), temperature, dtype  # eval: no dropout, ever

    def forward(self, batch: Batch, needs: frozenset[str] = frozenset()) -> Out:
        """[B, T] log π_θ(ids[:, t] | ids[:, :t]) at the temperature, with gradient; entropy too if it is among the needs.

            log π(y|x) = z_y/T − log Σ_v exp(z_v/T)          H(x) = −Σ_v π(v|x) log π(v|x)

        Rows are padded on the right, where causal attention never looks: no attention mask, no position ids.
        """
        hidden = self.hidden(batch.ids)
        past, token = before(hidden, batch.mask), batch.ids[batch.mask]  # [N, H], [N]
        rows = max(1, CHUNK // self.model.get_output_embeddings().weight.shape[0])
        score = self.score_and_entropy if "entropy" in needs else self.score
        if len(token) <= rows:
            scored = score(past, token)
        else:  # keep no chunk's logits for the backward pass: they are computed again there
            parts = zip(past.split(rows), token.split(rows))
            scored = torch.cat([checkpoint(score, p, t, use_reentrant=False) for p, t in parts], -1)
        logp, *entropy = (scattered(row, batch.mask) for row in torch.atleast_2d(scored))
        return Out(logp, entropy[0] if entropy else None, hidden)

    def autocast(self) -> torch.autocast:
        """The precision of a pass: bfloat16 where asked for, over weights that stay float32."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T, H] the last hidden states, as the output embedding gets them."""
        with self.autocast():
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def score(self, past: Tensor, token: Tensor) -> Tensor:
        """[N] the log-prob of each token after its past [N, H]; the softmax in float32 or wider."""
        logits = self.logits(past)
        return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(1)

    def score_and_entropy(self, past: Tensor, token: Tensor) -> Tensor:
        """[2, N] `score`, and the entropy of the distribution that the token is from."""
        every = self.logits(past).log_softmax(1)
        return torch.stack([every.gather(1, token[:, None])[:, 0], -(every.exp() * every).sum(1)])

    def logits(self, past: Tensor) -> Tensor:
        """[N, V] logits at the temperature, float32 or wider."""
        with self.autocast():
            logits = self.model.get_output_embeddings()(past)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature


def before(hidden: Tensor, mask: Tensor) -> Tensor:
    """[N, H] The hidden state that saw all before each sampled token and not the token itself: the shift by one."""
    # lab: begin (which hidden state scores which token?)
    return hidden[:, :-1][mask[:, 1:]]  # column 0 has no past and is never in the mask
    # lab: end


def scattered(x: Tensor, mask: Tensor) -> Tensor:
    """[N] → [B, T]: one number a sampled token, each where its token stands; 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mask, x)


@torch.no_grad()
def measure(batch: Batch, policy: Policy, ref: Policy | None, needs: frozenset[str], later: list[Tensor],
            tokens: int) -> Batch:  # fmt: skip
    """The batch with what the algorithm needs beforehand, computed without gradient; no needs, no pass.

    logp_prox is measured for the rows of `later` updates alone, unless all are asked for: in the first one the policy
    itself is π_prox. The other rows hold NaN, so that a use by mistake cannot pass unseen.
    """
    everything = torch.arange(len(batch))
    if "logp_prox" in needs:
        rows = everything if "logp_prox of all rows" in needs else torch.cat(later).unique()
        batch = replace(batch, logp_prox=scored(lambda micro: policy(micro).logp, batch, rows, tokens))
    if "logp_ref" in needs:
        batch = replace(batch, logp_ref=scored(lambda micro: ref(micro).logp, batch, everything, tokens))
    return batch


def scored(score: Callable[[Batch], Tensor], batch: Batch, rows: Tensor, tokens: int) -> Tensor:
    """[B, T] score(micro) of these rows, NaN in the others, in passes of at most this many tokens.

    batch: a step's own, row i at place i.
    """
    out = torch.full(batch.mask.shape, float("nan"), device=batch.ids.device)
    chosen = batch.select(rows)
    chosen = replace(chosen, weight=chosen.mask.float(), local_mean=False)
    for micro in chosen.split(tokens):
        out[micro.row, : micro.ids.shape[1]] = score(micro).to(out.dtype)
        out[micro.row, micro.ids.shape[1] :] = 0.0
    return out


def refuse_device(device: str, flag: str) -> None:
    """Raise Refused for a device that is not there, or that cannot hold numbers (meta)."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch's words
        raise Refused(f"{flag} {device}: {first_line(error)}") from None


def load(name: str, device: str, flag: str = "--model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in float32 and its tokenizer, from a folder or the Hugging Face hub.

    Raises Refused where there is none, or where the model cannot be trained here.
    """
    if not Path(name).exists() and (name[0] in "./~" or name.count("/") > 1):
        raise Refused(f"{flag} {name}: no such folder")
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise Refused(f"{flag} {name}: no config.json there; name a folder with config.json and model.safetensors")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise Refused(f"{flag} {name}: cannot be loaded ({first_line(error)})") from None
    return admit(model, f"{flag} {name}").to(device), tokenizer


def frozen(name: str, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """The reference: another model at the policy's temperature and precision, never trained. Raises Refused."""
    model, its = load(name, str(policy.model.device), "--ref-model")
    ids = its.get_vocab()
    if any(ids.get(token, number) != number for token, number in tokenizer.get_vocab().items()):
        raise Refused(f"--ref-model {name}: its tokenizer numbers tokens otherwise; use a model of the policy's family")
    sizes = [m.get_output_embeddings().weight.shape[0] for m in (model, policy.model)]
    if sizes[0] != sizes[1]:
        raise Refused(f"--ref-model {name}: it knows {sizes[0]} tokens, the policy {sizes[1]}; use a model of its family")
    return Policy(model, policy.temperature, policy.dtype).requires_grad_(False)


def admit(model: PreTrainedModel, what: str) -> PreTrainedModel:
    """The model with dropout 0, fit to be saved. Raises Refused for what the chunked log-probs would score wrongly."""
    if model.get_output_embeddings() is None:
        raise Refused(f"{what}: no output embedding; use a causal language model")
    text = model.config.get_text_config()
    for scaling in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(text, scaling, None) not in (None, 1.0):
            raise Refused(f"{what}: {scaling} changes the logits after the output embedding; not supported")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if model.generation_config is not None:  # transformers refuses to save a temperature beside do_sample=False
        model.generation_config.do_sample = True
    return model


@torch.no_grad()
def check_scores(policy: Policy, ids: Tensor) -> float:
    """The largest difference between the chunked log-probs and the model's own logits on these ids [B, T], float32.

    Raises Refused above 1e-3: the model does something between its hidden states and its logits that is not known here.
    """
    hidden = policy.hidden(ids)[:, :-1].flatten(0, 1)
    ours = policy.score(hidden, ids[:, 1:].flatten())
    with policy.autocast():
        logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    theirs = (logits.float() / policy.temperature).log_softmax(1).gather(1, ids[:, 1:].flatten()[:, None])[:, 0]
    worst = float((ours - theirs).abs().max())
    if not worst <= (1e-3 if policy.dtype == torch.float32 else 0.1):  # NaN is not
        raise Refused(f"--model: log-probs from hidden states differ from the model's own by {worst:.1e}; not supported")
    return worst


def room(model: PreTrainedModel) -> int:
    """Tokens that a prompt and its answer may have together; without a limit where the model names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end an answer: those of the generation config and the tokenizer's. Raises Refused if there is none."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    ids |= {tokenizer.eos_token_id} - {None}
    if not ids:
        raise Refused("--model: neither generation_config.json nor the tokenizer names an end token; set eos_token_id")
    return frozenset(ids)


def first_line(error: Exception) -> str:
    """The first line of an exception's message, shortened."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
