"""Which weights a server holds: published and proven by either way, or the old ones, whole, and why."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
import torch
from safetensors.torch import load_file

from nanorl.config import Lost, Refused
from nanorl.snapshot import PROBE, Probe, label, snapshot
from nanorl.sync import FLOOR, Failed, Link, Unproven
from tests.server import free_port
from tests.test_receive import moved, tied

slow = pytest.mark.slow
PROMPT = torch.randint(17, (150,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def links(real_server, tmp_path):
    """links(transport, timeout=30): a link to the real server, closed with the test."""
    made = []

    def make(transport="broadcast", timeout=30.0):
        made.append(Link(real_server.url, transport, tmp_path, timeout))
        return made[-1]

    yield make
    for link in made:
        link.close()


def holds(link, weights):
    """The server generates, and with these weights."""
    assert not httpx.get(f"{link.url}/is_paused").json()["is_paused"]
    return link.prove(weights) < FLOOR


def generate(link, ids, count, **how):
    """An answer as the server tells it."""
    sampling = {"max_tokens": count, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **how}
    return link.ask("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})["choices"][0]


def scored(policy, ids, start):
    """The policy's log-probs of ids[start:]."""
    with torch.no_grad():
        hidden = policy.hidden(torch.tensor([ids]))[0, start - 1 : -1]
        return policy.score(hidden, torch.tensor(ids[start:]))


# ------------------------------------------------------------------------------------------------ it arrives


@slow
@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_each_version_is_what_the_server_generates_with(links, transport):
    """One after another over the same group, greedy answers being the trainer's, their prompt in the prefix cache."""
    link = links(transport)
    for version in range(1, 4):
        policy = tied(seed=version)
        weights = snapshot(policy, version)
        took = link.publish(weights)
        assert took.mismatch < FLOOR and holds(link, weights)
        assert took.bytes >= sum(tensor.nbytes for tensor in weights.tensors.values())
        assert all(getattr(took, part) > 0 for part in ("copy", "digest", "transfer", "load", "probe"))
        answer = generate(link, PROMPT, 12, temperature=0.0)
        logp = [entry["logprob"] for entry in answer["logprobs"]["content"]]
        wanted = scored(policy, PROMPT + answer["token_ids"], len(PROMPT))
        torch.testing.assert_close(torch.tensor(logp), wanted, atol=5e-5, rtol=0)
        assert answer["weight_versions"] == [{"version": label(version), "start": 0, "end": 12}]


@slow
def test_the_file_on_the_disk_is_whole_and_alone(links, tmp_path):
    weights = snapshot(tied(seed=1), 1)
    links("disk").publish(weights)
    (file,) = tmp_path.iterdir()
    stored = load_file(file)
    assert stored.keys() == weights.tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.tensors.items())


@slow
def test_the_server_generates_while_it_receives_and_is_told_of_before_it_is_paused(links):
    """A request sent when the transfer has begun is answered before its first byte, by the old version."""
    link, old, new = links(), snapshot(tied(seed=1), 1), snapshot(tied(seed=2), 2)
    link.publish(old)
    during, held = [], []
    broadcast = link.group.broadcast

    def later(buckets):
        assert link.workers("nanorl_staged")[0]["state"] == "receiving"
        during.append(generate(link, PROMPT, 8))
        return broadcast(buckets)

    def hold():
        held.append((link.workers("nanorl_staged")[0]["state"], httpx.get(f"{link.url}/is_paused").json()["is_paused"]))
        assert holds(link, old)

    link.group.broadcast = later
    link.publish(new, hold)
    assert [span["version"] for span in during[0]["weight_versions"]] == [label(1)]
    assert held == [("whole", False)] and holds(link, new)


@slow
def test_the_proof_can_be_left_out_but_not_the_first_nor_after_a_new_beginning(links):
    link, weights = links(), snapshot(tied(seed=1), 1)
    assert link.publish(weights, prove=False).mismatch is not None
    assert link.publish(weights, prove=False).mismatch is None
    link.connect()
    assert link.publish(weights, prove=False).mismatch is not None


@slow
def test_another_trainer_takes_the_server_over_and_the_first_one_notices(links):
    first, second = links(), links()
    old, new = snapshot(tied(seed=1), 1), snapshot(tied(seed=2), 2)
    first.publish(old)
    second.publish(new)
    with pytest.raises(Failed):
        first.publish(old)
    assert holds(second, new)
    first.publish(old)
    assert holds(first, old)


# ------------------------------------------------------------------------------------------------ it breaks


@slow
@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_a_tensor_that_is_damaged_on_the_way_is_named_and_the_old_version_stays(links, transport):
    link, old, new = links(transport), snapshot(tied(seed=1), 1), snapshot(tied(seed=2), 2)
    link.publish(old)
    name = list(new.tensors)[5]
    new.tensors[name].view(-1)[7] += 1e-6
    with pytest.raises(Failed, match=rf"version 2: damaged on the way: {name}$"):
        link.publish(new)
    assert holds(link, old)
    again = snapshot(tied(seed=2), 3)
    link.publish(again)
    assert holds(link, again)


def silent(group, buckets):
    """Nothing comes, until the server has waited for long enough."""
    threading.Event().wait(3)
    return group.broadcast(buckets)


def half(group, buckets):
    """Half of a bucket comes, then the trainer leaves."""
    group.group.broadcast(buckets[0][: len(buckets[0]) // 2], 0).wait()
    group.group = None
    raise RuntimeError("cut")


def nothing(group, buckets):
    """The trainer leaves before the first byte."""
    group.group = None
    raise RuntimeError("cut")


@slow
@pytest.mark.parametrize("way", [silent, half, nothing])
def test_a_transfer_that_is_cut_or_too_late_leaves_the_old_version_whole(links, way):
    link, old, new = links(timeout=2), snapshot(tied(seed=1), 1), snapshot(tied(seed=2), 2)
    link.publish(old)
    group, link.group = link.group, BadGroup(link.group, way)
    del group
    with pytest.raises(Failed, match="version 2"):
        link.publish(new)
    assert holds(link, old)
    link.publish(new)
    assert holds(link, new)


class BadGroup:
    """A group over which buckets travel in a bad way."""

    def __init__(self, group, way):
        self.group, self.way = group, way

    def broadcast(self, buckets):
        """As the way has it."""
        group, self.group = self.group, None
        return self.way(group, buckets)


@slow
def test_a_server_that_loads_something_else_is_not_proven_and_is_not_left_paused(links):
    """Its probe scores as other weights do: as if loading had missed a tensor. The next publish is proven."""
    link, old, new = links(), snapshot(tied(seed=1), 1), snapshot(moved(tied(seed=1)), 2)
    link.publish(old)
    with pytest.raises(Unproven, match="version 2: its log-probs differ"):
        link.publish(replace(new, probe=old.probe))
    assert not httpx.get(f"{link.url}/is_paused").json()["is_paused"]
    assert link.publish(new, prove=False).mismatch < FLOOR  # asked all the same


@slow
def test_what_cannot_be_loaded_is_not_proven(links):
    """A tensor that the model does not know: vLLM raises in the middle of its loading."""
    link, old = links(), snapshot(tied(seed=1), 1)
    link.publish(old)
    tensors = {"model.layers.99.mlp.up_proj.weight": old.tensors["model.layers.0.mlp.up_proj.weight"]}
    digests = {name: old.digests["model.layers.0.mlp.up_proj.weight"] for name in tensors}
    layout = snapshot(tied(seed=1), 2).buckets[:0] + [next(iter(tensors.values())).reshape(-1).view(torch.uint8)]
    with pytest.raises(Unproven, match="version 2 was not loaded"):
        link.publish(replace(old, version=2, tensors=tensors, digests=digests, buckets=layout))
    assert not httpx.get(f"{link.url}/is_paused").json()["is_paused"]
    link.publish(old)
    assert holds(link, old)


@slow
def test_the_first_publish_refuses_a_server_that_scores_otherwise(links):
    link, weights = links(), snapshot(tied(seed=1), 1)
    far = Probe(weights.probe.ids, tuple(p + 1e-3 for p in weights.probe.logp))
    with pytest.raises(Refused, match=rf"^--servers {link.url}: .*1\.0e-03.*--mismatch 5e-05"):
        link.publish(replace(weights, probe=far))
    assert not httpx.get(f"{link.url}/is_paused").json()["is_paused"]


# ------------------------------------------------------------------------------------------------ interrupted


def interrupted(link, policies, count=3000):
    """An answer whose server got new weights after its first tokens: ids, log-probs, spans of versions."""
    weights = [snapshot(policy, version) for version, policy in enumerate(policies, 1)]
    link.publish(weights[0])
    link.stage(weights[1])  # so that what remains is short beside the answer
    body = {"token_ids": PROMPT, "stream": True, "sampling_params": {
        "max_tokens": count, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}}  # fmt: skip
    ids, logp, spans, loading = [], [], [], None
    with httpx.stream("POST", f"{link.url}/inference/v1/generate", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                ids += choice["token_ids"] or []
                logp += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
                spans = choice["weight_versions"] or spans
            if loading is None and len(ids) > 10:
                loading = threading.Thread(target=link.load, args=(2,))
                loading.start()
    loading.join()
    assert [span["version"] for span in spans] == [label(1), label(2)] and spans[0]["end"] == spans[1]["start"]
    return ids, torch.tensor(logp), spans[0]["end"]


@slow
def test_tokens_before_and_after_an_update_are_of_the_versions_that_they_carry(links):
    """The old part scores so under the old weights, and the new one, with all before it read again, under the new."""
    policies = tied(seed=1), tied(seed=2)
    ids, logp, turn = interrupted(links(), policies)
    old, new = (scored(policy, PROMPT + ids, len(PROMPT)) for policy in policies)
    assert 10 < turn < len(ids) - 10
    torch.testing.assert_close(logp[:turn], old[:turn], atol=1e-4, rtol=0)
    torch.testing.assert_close(logp[turn:], new[turn:], atol=1e-4, rtol=0)
    assert (logp[turn:] - old[turn:]).abs().max() > 0.1


@slow
def test_without_the_pause_that_clears_the_cache_the_new_part_is_of_no_version(links):
    """What pause?mode=keep does by default matters: new weights over old keys and values are nobody's distribution."""
    link, policies = links(), (tied(seed=1), tied(seed=2))
    ask = link.ask
    link.ask = lambda path, body=None: ask(path + "&clear_cache=false" if path.startswith("/pause") else path, body)
    ids, logp, turn = interrupted(link, policies)
    for policy in policies:
        assert (logp[turn:] - scored(policy, PROMPT + ids, len(PROMPT))[turn:]).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------ another, or nobody


@slow
def test_the_server_of_the_same_model_is_accepted_with_its_room(links):
    assert links().check(tied().model.config) > PROBE


@slow
@pytest.mark.parametrize("field, value", [
    ("num_hidden_layers", 3), ("hidden_act", "gelu"), ("tie_word_embeddings", False)])  # fmt: skip
def test_another_model_is_refused_by_the_field_that_differs_and_both_values(links, field, value):
    config = tied().model.config
    served = getattr(config, field)
    config.update({field: value})
    with pytest.raises(Refused, match=f"{field} is {served!r} there and {value!r} in --model") as refused:
        links().check(config)
    assert "\n" not in str(refused.value)


def test_where_nobody_listens_the_command_is_named_that_starts_a_server():
    port = free_port()
    link = Link(f"http://127.0.0.1:{port}", "disk", timeout=2)
    with pytest.raises(Refused, match=rf"^--servers \S+:{port}: .*python -m nanorl\.serve .*--port {port}"):
        link.check(tied().model.config)
    with pytest.raises(Lost, match=str(port)):
        link.publish(snapshot(tied(), 0))


@contextmanager
def website(status, text):
    """A web server that says the same whatever it is asked."""

    class Same(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Same) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("status, text", [(404, b"<h1>no</h1>"), (200, b"<h1>hello</h1>"), (500, b'{"error": "x"}')])
def test_a_web_server_that_is_no_vllm_of_ours_is_refused(status, text):
    with website(status, text) as url, pytest.raises(Refused, match="was not started by nanorl") as refused:
        Link(url, "disk", timeout=5).check(tied().model.config)
    assert "\n" not in str(refused.value)


def test_a_server_that_takes_a_question_and_never_answers_is_lost_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link = Link(f"http://127.0.0.1:{mute.getsockname()[1]}", "disk", timeout=0.3)
        with pytest.raises(Lost, match=r"no answer to /collective_rpc within 0\.3 s"):
            link.publish(snapshot(tied(), 0))
