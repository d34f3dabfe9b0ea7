"""What happens to new weights inside a vLLM server? Received beside the work, digested, loaded between two token steps.

vLLM's workers import this file (--worker-extension-cls nanorl.receive.Extension, --weight-transfer-config
'{"backend": "nanorl"}'); nobody else does, for it imports vLLM. vLLM's own engines write into the live weights as
tensors arrive, so a transfer that breaks leaves a broken server. Here a thread receives into memory of its own:

    init_weight_transfer_engine    join the trainer's process group
    start_weight_update            nothing
    update_weights                 a thread begins to receive; generation goes on
    nanorl_staged                  has it all come, and as the trainer's digests say?
    finish_weight_update           load: from checkpoint names to vLLM's fused and packed layers
    nanorl_drop                    forget what has come so far; the weights that generate are as they were
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nanorl.transfer import Group, address_towards, differing, lay_out


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where the trainer waits for this server's workers, who will be `size` with it."""

    backend: str
    address: str
    port: int
    size: int
    timeout: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """What is about to come: (name, dtype, shape) and digest of each tensor; by broadcast, or from a file at `path`."""

    tensors: list[list[Any]]
    digests: dict[str, str]
    path: str | None


class Staging:
    """One version on its way into memory of its own, on a thread of its own. `state`: receiving, whole or failed.

    The memory is that of the version before, once that is loaded, if it has the same tensors: new memory costs more than
    the bytes that go into it.
    """

    def __init__(self, update: Update, group: Group | None, device: torch.device, before: Staging | None):
        where = device if group is not None and group.backend == "nccl" else torch.device("cpu")
        self.kind = (update.tensors, where)
        self.layout = before.layout if before is not None and before.kind == self.kind else lay_out(update.tensors, where)
        self.state, self.why = "receiving", ""
        threading.Thread(target=self.run, args=(update, group, device), name="new weights", daemon=True).start()

    def run(self, update: Update, group: Group | None, device: torch.device) -> None:
        """Receive all; whatever goes wrong is told by `why`, and the state comes last, for others watch it."""
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with the first one
            wrong = self.receive(update, group)
        except Exception as error:  # told to the trainer, who asks for it
            self.why = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            self.why = f"damaged on the way: {', '.join(wrong)}" if wrong else ""
        self.state = "failed" if self.why else "whole"

    def receive(self, update: Update, group: Group | None) -> list[str]:
        """The names of the tensors that have come and are not those that were sent."""
        buckets = [bucket for bucket, _ in self.layout]
        full = group.broadcast(buckets) if update.path is None else read(update.path, self.layout)
        return [name for _, (_, tensors) in zip(full, self.layout) for name in differing(tensors, update.digests)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What has come, by name."""
        for _, inside in self.layout:
            yield from inside.items()


def read(path: str, layout: list[tuple[Tensor, dict[str, Tensor]]]) -> Iterator[Tensor]:
    """Fill each bucket from a file of safetensors, and yield it."""
    with safe_open(path, "pt") as file:
        for bucket, tensors in layout:
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
            yield bucket


class Receiver(WeightTransferEngine[Meeting, Update]):
    """vLLM's side of a transfer, in each worker."""

    init_info_cls, update_info_cls = Meeting, Update
    group: Group | None = None
    staging: Staging | None = None
    loaded: Staging | None = None  # its memory is free to receive into

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join the trainer's group: waits for the trainer and the server's other workers."""
        self.shutdown()
        meet = init_info
        mine = address_towards(meet.address, meet.port, meet.timeout)
        store = TCPStore(meet.address, meet.port, meet.size, timeout=timedelta(seconds=meet.timeout))
        rank = 1 + self.parallel_config.rank
        self.group = Group(meet.backend, store, rank, meet.size, mine, meet.timeout)

    def start_weight_update(self) -> None:
        """Nothing: the live weights stay as they are until all is here."""

    def receive_weights(self, update_info: Update) -> None:
        """Begin to receive, and return at once: vLLM generates on this thread."""
        before, self.loaded = self.loaded, None  # one that is dropped may still be written to: it is not used again
        self.staging = Staging(update_info, self.group, self.device, before)

    def finish_weight_update(self) -> None:
        """Load what is staged. Raises RuntimeError unless it is whole, and then nothing has changed."""
        if self.staging is None or self.staging.state != "whole":
            raise RuntimeError("no whole version of the weights is staged")
        self.loaded, self.staging = self.staging, None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self.loaded.tensors())
        finalize_layerwise_reload(self.model, self.model_config)
        for head in self.model.modules():
            if isinstance(head, ParallelLMHead):  # tied to the embedding it got no tensor, and its packed copy is old
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Leave the group and forget what is staged; a thread that still receives ends when the trainer leaves."""
        self.group, self.staging, self.loaded = None, None, None


class Extension:
    """What every worker can be asked beside (POST /collective_rpc)."""

    def nanorl_about(self) -> dict[str, Any]:
        """What it serves, and how."""
        config = self.model_config
        return {"config": json.loads(config.hf_text_config.to_json_string(use_diff=False)),
                "dtype": str(config.dtype).removeprefix("torch."), "device": self.device.type,
                "logprobs": config.logprobs_mode, "room": config.max_model_len,
                "policy": self.vllm_config.scheduler_config.policy,
                "workers": self.parallel_config.world_size,
                "receiver": isinstance(self.weight_transfer_engine, Receiver)}  # fmt: skip

    def nanorl_staged(self) -> dict[str, Any]:
        """How far the version is that is being received."""
        staging = self.weight_transfer_engine.staging
        if staging is None:
            return {"state": "failed", "why": "it was dropped, by another trainer perhaps"}
        return {"state": staging.state, "why": staging.why}

    def nanorl_drop(self) -> None:
        """Forget a version that is not loaded, also one whose trainer is gone."""
        self.weight_transfer_engine.staging = None
        self._weight_update_active = False  # vLLM's own note that an update has begun


WeightTransferEngineFactory.register_engine("nanorl", Receiver)
