"""What all tests share: one thread (tests run beside each other), no hub, hypothesis without a clock, a tiny model."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("nanorl", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("nanorl")


@pytest.fixture(scope="session")
def tiny_model():
    """The tiny model with fresh weights, float32, and its tokenizer. Shared: do not train it."""
    from nanorl import tiny

    return tiny.model(seed=0).eval(), tiny.tokenizer()
