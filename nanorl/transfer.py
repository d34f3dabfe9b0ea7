"""How do weights travel? Memory that both sides lay out alike, a process group of its own for each server, digests.

The trainer is rank 0 and broadcasts; the workers of one server are the other ranks. Tensors lie side by side in flat
buckets, so that hundreds of small ones cost no more messages than a few large ones, and what arrives in a bucket is in
its place already. Servers do not share a group: one that dies or hangs stops nobody else.

On a receiver each tensor is digested while the next bucket arrives. The digest is one that a GPU can take as well as a
CPU, where a cryptographic one would be slower than the network: it finds damage, it does not resist an enemy.
"""

from __future__ import annotations

import functools
import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

BUCKET = 1 << 26  # bytes that travel as one message; a larger tensor has a bucket of its own
ALIGN = 64  # bytes; a tensor begins at a multiple, so that any dtype may
BLOCK = 1 << 14  # words that are summed into one number of a digest
Described = Sequence[Sequence]  # (name, dtype as text, shape) of each tensor, in the order in which they lie


def digest(tensor: Tensor) -> str:
    """What the bytes, the shape and the dtype of a tensor come to, on whatever device it is.

        s_b = Σ_j w_j·x_bj mod 2⁶⁴          digest = BLAKE2b(dtype, shape, s_0, s_1, …)

    x_bj: the j-th 32-bit word of block b; w_j: fixed odd pseudo-random 64-bit weights. Integer sums are exact in any
    order. One changed word always shows, for an odd w times less than 2³² is no multiple of 2⁶⁴; of other changes a
    share of at most 2⁻³² does not, over random weights (Lemire and Kaser 2014, "Strongly universal string hashing is
    fast"). No cryptographic strength: who knows the weights can make a collision.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    words, weights = data.view(torch.int32), multipliers(data.device)
    whole = len(words) // BLOCK * BLOCK
    rows = words[:whole].view(-1, BLOCK)
    wide = torch.empty(min(8, len(rows)), BLOCK, dtype=torch.int64, device=data.device)  # once: new memory costs more
    sums = [wide[: len(part)].copy_(part).mul_(weights).sum(1) for part in rows.split(8)]
    sums.append((words[whole:] * weights[: len(words) - whole]).sum()[None])
    told = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    told.update(torch.cat(sums).cpu().numpy().tobytes())
    return told.hexdigest()


@functools.cache
def multipliers(device: torch.device) -> Tensor:
    """[BLOCK] the weights of the digest."""
    random = torch.Generator().manual_seed(0x6E616E6F)
    return (torch.randint(-(2**62), 2**62, (BLOCK,), generator=random) * 2 + 1).to(device)


def describe(tensors: Mapping[str, Tensor]) -> list[list]:
    """(name, dtype, shape) of each, as JSON can say it."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]


def lay_out(described: Described, device: torch.device | str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Empty buckets [bytes] for such tensors, each with the tensors that lie in it by name; alike for all who ask."""
    plans: list[list[tuple[int, int, str, torch.dtype, Sequence[int]]]] = []
    end = 0
    for name, kind, shape in described:
        dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(shape).numel()
        if not plans or end + size > BUCKET:
            plans.append([])
            end = 0
        plans[-1].append((end, size, name, dtype, shape))
        end += -(-size // ALIGN) * ALIGN
    out = []
    for plan in plans:
        bucket = torch.empty(plan[-1][0] + plan[-1][1], dtype=torch.uint8, device=device)
        inside = {name: bucket[at : at + size].view(dtype).view(shape) for at, size, name, dtype, shape in plan}
        out.append((bucket, inside))
    return out


def differing(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> list[str]:
    """The names of the tensors whose digest is another."""
    return [name for name, tensor in tensors.items() if digest(tensor) != digests[name]]


def address_towards(host: str, port: int, timeout: float) -> str:
    """This machine's address as that one sees it. Raises OSError where nobody listens there."""
    with socket.create_connection((host, port), timeout) as connection:
        return connection.getsockname()[0]


def meeting_point(address: str, size: int, timeout: float) -> TCPStore:
    """Where the members of a group of this size find each other: any free port of this address and of no other."""
    listener = socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0])
    return TCPStore(address, listener.getsockname()[1], size, is_master=True, wait_for_workers=False,
                    timeout=timedelta(seconds=timeout), master_listen_fd=listener.detach())  # fmt: skip


class Group:
    """One member of a process group: the trainer, rank 0, or a worker of the server, ranks 1 to size − 1.

    Making one waits for all the others. Every wait ends with a RuntimeError (torch's) after `timeout` seconds, and at
    once when a member's process ends; a group in which that happened is of no more use.
    """

    def __init__(self, backend: str, store: TCPStore, rank: int, size: int, address: str, timeout: float):
        self.backend, self.store = backend, store  # the store lives as long as the group
        wait = timedelta(seconds=timeout)
        if backend == "nccl":
            from torch.distributed import ProcessGroupNCCL  # a CPU build of torch has none

            options = ProcessGroupNCCL.Options()
            options._timeout = wait
            self.group = ProcessGroupNCCL(store, rank, size, options)
        else:
            options = ProcessGroupGloo._Options()
            options._timeout, options._threads = wait, 1  # one: messages in their order
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self.group = ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, buckets: Iterable[Tensor]) -> Iterable[Tensor]:
        """Send them (rank 0) or fill them (the others), in order; each comes out when that is done with it."""
        sent = [bucket.cpu() if self.backend == "gloo" else bucket for bucket in buckets]
        works = [(bucket, self.group.broadcast(bucket, 0)) for bucket in sent]  # all on their way
        for bucket, work in works:
            work.wait()
            yield bucket
