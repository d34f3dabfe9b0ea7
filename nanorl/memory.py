"""What memory does a run take? Added up before anything is sampled, from the shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanorl import checkpoint, policy

if TYPE_CHECKING:
    from nanorl.run import Run


def dry_run(run: Run) -> None:
    """Show one prompt as the model gets it and what memory the run takes, by arithmetic alone."""
    prompt, cfg, text = run.prompt(0), run.cfg, run.policy.model.config.get_text_config()
    print(f"prompt 0, as the model gets it, {len(prompt.ids)} tokens:\n{prompt.text}\n{'-' * 8}")
    print(f"answer {prompt.answer!r}")
    weights = sum(p.numel() for p in run.policy.model.parameters())
    heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    vocabulary = run.policy.model.get_output_embeddings().weight.shape[0]
    cached = min(cfg.samples_per_step, run.engine.max_rows) * (len(prompt.ids) + cfg.max_new_tokens)  # tokens
    delayed = 1 if cfg.pace.delay == "inf" else cfg.pace.delay and cfg.pace.delay + 1  # copies of the weights
    parts = {
        "weights, gradients, Adam (float32)": 16 * weights,
        "weights of the engine's process": 4 * weights * (cfg.engine == "worker"),
        "delayed weights": 4 * weights * delayed,
        "reference": 4 * weights * ("logp_ref" in run.needs),
        "critic": 16 * weights * run.own_critic,
        "keys and values while sampling": cached * text.num_hidden_layers * heads * width * 8,
        "activations of a micro-batch": min(cfg.tokens_per_micro_batch, cached) * text.num_hidden_layers
                                        * text.hidden_size * 80,
        "logits of a chunk": 4 * 4 * min(policy.CHUNK, cfg.tokens_per_micro_batch * vocabulary),
    }
    for what, size in parts.items():
        if size:
            print(f"  {what:36} about {size / 1e9:8.2f} GB")
    parts = {"together": sum(parts.values()), "on disk, a checkpoint": checkpoint.need(*run.saved)}
    for what, size in parts.items():
        print(f"  {what:36} about {size / 1e9:8.2f} GB")
