"""How weights travel: digests that see every change, memory laid out alike, groups that end their waits."""

from __future__ import annotations

import hashlib
import socket
import threading
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import TCPStore

from nanorl import transfer
from nanorl.policy import Policy
from nanorl.snapshot import PROBE, snapshot
from nanorl.transfer import ALIGN, BLOCK, Group, describe, differing, digest, lay_out, meeting_point
from tests.test_delayed import small

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8, torch.int64)
shapes = st.lists(st.integers(0, 5), max_size=3)
many = st.lists(st.tuples(shapes, st.sampled_from(KINDS)), min_size=1, max_size=8)


def filled(shape, dtype, seed=0):
    """A tensor of random bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    random = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=random).view(dtype).view(shape)


def raw(tensor):
    """The bytes of a tensor."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


# ------------------------------------------------------------------------------------------------ digests


@given(shapes, st.sampled_from(KINDS), st.integers(0, 99))
def test_a_digest_is_its_equation(shape, dtype, seed):
    """Against Python's integers, a word at a time."""
    tensor, weights = filled(shape, dtype, seed), transfer.multipliers(torch.device("cpu")).tolist()
    assert digest(tensor) == slow(tensor, weights)


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK + 3, 17 * BLOCK])
def test_a_digest_is_its_equation_over_several_blocks(count):
    tensor, weights = filled((count,), torch.float32), transfer.multipliers(torch.device("cpu")).tolist()
    assert digest(tensor) == slow(tensor, weights)


def slow(tensor, weights):
    """The digest by loops."""
    data = raw(tensor)
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    whole = len(words) // BLOCK * BLOCK
    blocks = [words[i : i + BLOCK] for i in range(0, whole, BLOCK)] + [words[whole:]]
    sums = [sum(w * x for w, x in zip(weights, block)) % 2**64 for block in blocks]
    told = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    told.update(b"".join(s.to_bytes(8, "little") for s in sums))
    return told.hexdigest()


def test_every_single_bit_shows():
    tensor = filled((7, 3), torch.bfloat16)
    bits = tensor.view(-1).view(torch.uint8)
    seen = {digest(tensor)}
    for i in range(len(bits)):
        for bit in range(8):
            bits[i] ^= 1 << bit
            seen.add(digest(tensor))
            bits[i] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(bits)


def test_every_pair_of_sign_flips_and_every_swap_shows():
    """What a sum without weights, or one over 64-bit words, would not see."""
    tensor = torch.arange(1.0, 17.0)
    pairs = [(i, j) for i in range(16) for j in range(i)]
    seen = {digest(tensor)}
    for i, j in pairs:
        flipped, swapped = tensor.clone(), tensor.clone()
        flipped[[i, j]] *= -1
        swapped[[i, j]] = tensor[[j, i]]
        seen |= {digest(flipped), digest(swapped)}
    assert len(seen) == 1 + 2 * len(pairs)


def test_blocks_that_change_places_show():
    rows = filled((3, BLOCK), torch.float32)
    assert len({digest(rows[list(order)]) for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0))}) == 4


def test_the_same_bytes_under_another_shape_or_dtype_are_another_tensor():
    zeros = torch.zeros(4, 6)
    others = [zeros.view(6, 4), zeros.view(24), zeros.view(torch.int32), *map(torch.zeros, ((4, 7), (0,), ()))]
    assert len({digest(t) for t in [zeros, *others]}) == 7


@given(shapes, st.sampled_from(KINDS))
def test_where_a_tensor_lies_does_not_matter(shape, dtype):
    """Strided, or inside of larger memory at any offset."""
    tensor = filled(shape, dtype)
    inside = torch.cat([torch.zeros(1, dtype=dtype), tensor.reshape(-1)])[1:].view(shape)
    strided = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat(2)[: len(tensor)] if shape else tensor
    assert digest(tensor) == digest(inside) == digest(strided) == digest(nn.Parameter(tensor, requires_grad=False))


def test_the_weights_are_odd_so_that_no_single_word_can_hide():
    weights = transfer.multipliers(torch.device("cpu"))
    assert (weights % 2 == 1).all() and len(weights.unique()) == BLOCK


# ------------------------------------------------------------------------------------------------ memory


@given(many)
def test_tensors_lie_apart_aligned_and_alike_for_all_who_ask(asked):
    tensors = {f"t{i}": filled(shape, dtype, i) for i, (shape, dtype) in enumerate(asked)}
    one, other = (lay_out(describe(tensors), "cpu") for _ in range(2))
    for bucket, inside in one:
        for name, place in inside.items():
            assert (place.dtype, place.shape) == (tensors[name].dtype, tensors[name].shape)
            assert (place.data_ptr() - bucket.data_ptr()) % ALIGN == 0
            place.copy_(tensors[name])
    for (sent, _), (got, _) in zip(one, other, strict=True):
        got.copy_(sent)
    arrived = {name: place for _, inside in other for name, place in inside.items()}
    assert list(arrived) == list(tensors)
    assert all(raw(arrived[name]) == raw(tensor) for name, tensor in tensors.items())


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_no_bucket_is_larger_than_it_must_be(counts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BUCKET", 256)
        layout = lay_out([[f"t{i}", "uint8", [n]] for i, n in enumerate(counts)], "cpu")
    for bucket, inside in layout:
        assert len(bucket) <= 256 or len(inside) == 1
    assert sum(len(inside) for _, inside in layout) == len(counts)
    for (left, _), (right, inside) in pairwise(layout):  # the next one's first did not fit
        assert -(-len(left) // ALIGN) * ALIGN + len(next(iter(inside.values()))) > 256


def test_what_differs_is_named():
    tensors = {name: filled((3, 5), torch.float32, seed) for seed, name in enumerate("abcd")}
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    assert differing(tensors, digests) == []
    tensors["b"][2, 4] += 1
    tensors["d"] = tensors["a"]
    assert differing(tensors, digests) == ["b", "d"]


# ------------------------------------------------------------------------------------------------ groups


def members(size, timeout=20.0):
    """A group's members, the trainer first, each made on a thread as if in a process of its own."""
    made = [None] * size
    store = meeting_point("127.0.0.1", size, timeout)

    def join(rank):
        theirs = store if rank == 0 else TCPStore("127.0.0.1", store.port, size, timeout=timedelta(seconds=timeout))
        made[rank] = Group("gloo", theirs, rank, size, "127.0.0.1", timeout)

    together([lambda rank=rank: join(rank) for rank in range(size)])
    return made


def together(works):
    """Do them at the same time; raises what one of them raised."""
    errors = []

    def guarded(work):
        try:
            work()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("size", [2, 3])
def test_every_member_gets_the_trainers_bytes_in_their_order(size):
    tensors = {f"t{i}": filled((i + 1, 1000), torch.float32, i) for i in range(6)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BUCKET", 10_000)
        layouts = [lay_out(describe(tensors), "cpu") for _ in range(size)]
    assert len(layouts[0]) > 2
    for _, inside in layouts[0]:
        for name, place in inside.items():
            place.copy_(tensors[name])
    group = members(size)
    came = [[] for _ in group]
    together([lambda g=g, out=out, layout=layout: out.extend(g.broadcast([bucket for bucket, _ in layout]))
              for g, out, layout in zip(group, came, layouts)])  # fmt: skip
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    for out, layout in zip(came, layouts):
        assert [b.data_ptr() for b in out] == [bucket.data_ptr() for bucket, _ in layout]
        assert differing({name: place for _, inside in layout for name, place in inside.items()}, digests) == []


def test_a_member_that_leaves_ends_the_others_waiting_at_once():
    """Long before the timeout of twenty seconds."""
    trainer, worker = members(2)
    buckets = [torch.zeros(1000, dtype=torch.uint8) for _ in range(2)]
    done = threading.Event()

    def receive():
        with pytest.raises(RuntimeError):
            list(worker.broadcast(buckets))
        done.set()

    waiting = threading.Thread(target=receive)
    waiting.start()
    trainer.group.broadcast(buckets[0], 0).wait()
    del trainer
    assert done.wait(timeout=10)


def test_a_member_that_is_silent_ends_the_wait_after_the_timeout():
    trainer, worker = members(2, timeout=0.5)  # the trainer stays, and says nothing
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        list(worker.broadcast([torch.zeros(8, dtype=torch.uint8)]))
    assert trainer.group.rank() == 0


def test_a_group_that_nobody_joins_is_not_waited_for_without_end():
    store = meeting_point("127.0.0.1", 2, 0.5)
    with pytest.raises(RuntimeError, match="[Tt]imed? ?out"):
        Group("gloo", store, 0, 2, "127.0.0.1", 0.5)


def test_only_who_reaches_the_address_can_reach_the_meeting_point():
    """On a loopback address nobody else can: by default torch's would listen at every address of the machine."""
    store = meeting_point("127.0.0.1", 2, 5.0)
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_the_groups_of_two_servers_know_nothing_of_each_other():
    (trainer, first), (_, second) = members(2), members(2)
    sent, got = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    together([lambda: list(trainer.broadcast([sent])), lambda: list(first.broadcast([got]))])
    assert got.tolist() == sent.tolist() and second is not first


# ------------------------------------------------------------------------------------------------ a version


def test_a_snapshot_is_what_the_weights_were_and_stays_so():
    policy = small()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    taken = snapshot(policy, 7)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(1)
    assert taken.version == 7 and taken.tensors.keys() == before.keys()
    assert all(torch.equal(taken.tensors[name], before[name]) for name in before)
    assert differing(before, taken.digests) == []
    assert sorted(differing(dict(policy.model.named_parameters()), taken.digests)) == sorted(before)


def test_a_tied_head_travels_once():
    model = small().model
    model.lm_head.weight = model.model.embed_tokens.weight
    tensors = snapshot(Policy(model), 0).tensors
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors


def test_the_probe_is_scored_at_temperature_one_by_the_models_own_logits():
    model = small().model.double()
    cold, warm = (snapshot(Policy(model, temperature), 0).probe for temperature in (0.5, 1.0))
    with torch.no_grad():
        every = model(input_ids=torch.tensor([warm.ids])).logits[0, :-1].log_softmax(1)
    wanted = [float(row[token]) for row, token in zip(every, warm.ids[1:])]
    assert len(warm.ids) == PROBE and cold == warm
    np.testing.assert_allclose(warm.logp, wanted, atol=1e-12)


def test_the_probe_is_the_same_for_every_version_and_has_many_tokens():
    one, other = snapshot(small(), 0).probe, snapshot(small(), 9).probe
    assert one.ids == other.ids and len(set(one.ids)) > 12
