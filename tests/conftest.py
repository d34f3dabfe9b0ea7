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


@pytest.fixture(scope="session")
def real_server(tmp_path_factory):
    """A vLLM server with the small model of tests/server.py, shared by all tests that need one; see RealServer."""
    from tests.server import RealServer

    server = RealServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.close()
