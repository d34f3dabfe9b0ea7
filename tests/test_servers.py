"""Servers that break: what is in flight is asked again, once, of one that has proven its weights; or one line says why.

A real vLLM server with the small model, and in front of it a proxy that cuts, delays, answers 500, or says nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from nanorl import remote, servers
from nanorl.config import Lost, Refused, Remote
from nanorl.engine import Broken, Sampling
from nanorl.remote import body_of, read
from nanorl.servers import VLLMEngine
from nanorl.snapshot import label
from nanorl.sync import Link
from tests.server import free_port, small, spread
from tests.test_delayed import weights
from tests.test_engines import answers, check, jobs_of, until

ERROR = (b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain\r\nContent-Length: 14\r\n"
         b"Connection: close\r\n\r\nout of memory\n")  # fmt: skip


class Proxy:
    """Passes what goes to a server and comes from it, as long as `mode` is pass.

    cut: ends every connection, and takes no more; hang: takes them and says nothing; 500: answers so. Whatever it does,
    it does to connections that are open, too. `only`: it does so to requests for this path alone.
    """

    def __init__(self, port):
        self.to, self.mode, self.only, self.pairs, self.seen = port, "pass", None, [], []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.listen, daemon=True).start()

    def set(self, mode, only=None):
        """From now on, and to connections that are open."""
        self.mode, self.only = mode, only
        if mode == "cut" and only is None:
            for end in [end for pair in self.pairs for end in pair]:
                hang_up(end)
            self.pairs.clear()

    def listen(self):
        """Take connections, until closed."""
        try:
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()
        except OSError:  # closed
            return

    def serve(self, client):
        """One connection: its request, and what becomes of it."""
        try:
            request = client.recv(1 << 16)
            path = request.split(b" ")[1].decode() if request else ""
            self.seen.append(path)
            mode = self.mode if self.only is None or path.startswith(self.only) else "pass"
            if mode == "cut":
                hang_up(client)
            elif mode == "500":
                client.sendall(ERROR)
                hang_up(client)
            elif mode == "pass":
                server = socket.create_connection(("127.0.0.1", self.to))
                self.pairs.append((client, server))
                server.sendall(request)
                threading.Thread(target=self.pump, args=(client, server), daemon=True).start()
                self.pump(server, client)
            else:
                self.pairs.append((client, client))
        except OSError:  # one of the two is gone
            hang_up(client)

    def pump(self, source, sink):
        """Pass bytes on until one side ends, or as long as nothing hangs."""
        try:
            while data := source.recv(1 << 16):
                while self.mode == "hang" and self.only is None:
                    time.sleep(0.02)
                sink.sendall(data)
        except OSError:  # cut
            pass
        hang_up(source)
        hang_up(sink)


def hang_up(end):
    """Close a socket for both sides, also while somebody waits for it."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # it was closed before
        pass
    end.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What hangs is found soon."""
    monkeypatch.setattr(servers, "WATCH", 0.2)
    monkeypatch.setattr(servers, "AGAIN", 0.2)
    monkeypatch.setattr(servers, "HANG", 12.0)  # a busy machine holds a server up for seconds
    monkeypatch.setattr(remote, "HANG", 12.0)


@contextmanager
def running(*urls, folder=None, **flags):
    """An engine over these servers with the small model as version 0, on a loop of its own, and what it told."""
    it = SimpleNamespace(loop=asyncio.new_event_loop(), acknowledged=[], failed=[], policy=small(), kept={})
    it.engine = VLLMEngine(Remote(servers=urls, **flags), folder, it.policy.model.config, it.loop,
                           it.acknowledged.append, it.failed.append)  # fmt: skip
    try:
        yield it
    finally:
        it.engine.close()
        it.loop.run_until_complete(asyncio.sleep(0.1))
        it.loop.close()


def in_time(it, question, seconds=100):
    """The answer to a question asked on the loop."""
    return it.loop.run_until_complete(asyncio.wait_for(question, timeout=seconds))


def hand_over(it, version):
    """Weights of their own for this version."""
    spread(it.policy.model, 20 + version)
    it.kept[version] = weights(it.policy)
    it.engine.update_weights(it.policy, version)


async def publish(it, version):
    """The same; back when they are proven."""
    hand_over(it, version)
    await until(lambda: it.engine.version >= version)


@pytest.fixture
def proxies(real_server):
    """Two ways to the one server."""
    both = [Proxy(real_server.port) for _ in range(2)]
    yield both
    for proxy in both:
        proxy.set("cut")
        proxy.listener.close()


LONG = 1500  # tokens of an answer during which a test can do something


# ------------------------------------------------------------------------------------------------ at the start


def refused(*given, **named):
    """The one line that refuses the start of an engine."""
    with pytest.raises(Refused) as said, running(*given, **named):
        pass
    assert "\n" not in str(said.value)
    return str(said.value)


def test_a_server_that_is_not_there_is_refused_with_the_command_that_starts_one():
    port = free_port()
    line = refused(f"http://127.0.0.1:{port}")
    assert f"--servers http://127.0.0.1:{port}" in line and "python -m nanorl.serve --model DIR" in line
    assert f"--port {port}" in line


@pytest.mark.slow
def test_a_server_of_another_model_is_refused_with_the_field_and_both_values(real_server):
    config = small().model.config
    config.intermediate_size = 97
    with pytest.raises(Refused) as said:
        VLLMEngine(Remote(servers=(real_server.url,)), None, config, asyncio.new_event_loop(), None, None)
    assert real_server.url in str(said.value) and "intermediate_size is 96 there and 97 in --model" in str(said.value)


@pytest.mark.slow
def test_other_weights_than_the_trainers_end_the_run_at_the_first_proof(real_server, monkeypatch):
    """What the server had before stays, under the new version's name."""
    nothing_loaded(monkeypatch, lambda version: True)
    with running(real_server.url) as it:
        hand_over(it, 3)
        in_time(it, until(lambda: it.failed))
        with pytest.raises(Broken):
            in_time(it, it.engine.generate((1, 2), Sampling(3)))
        (error,) = it.failed
        assert type(error) is Refused and "more than --mismatch 5e-05" in str(error) and "\n" not in str(error)
        assert it.acknowledged == [] and it.engine.version == -1


def nothing_loaded(monkeypatch, when):
    """Versions for which when(version) holds get their name on the server, and no weights."""
    ask = Link.ask

    def asked(link, path, body=None):
        if path == "/finish_weight_update" and when(int(body["weight_version"].rpartition(".")[2])):
            return ask(link, "/update_weight_version", {"new_version": body["weight_version"]})
        return ask(link, path, body)

    monkeypatch.setattr(Link, "ask", asked)


# ------------------------------------------------------------------------------------------------ while it generates


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "500", "hang"])
def test_a_server_that_breaks_leaves_and_is_proven_before_it_gets_a_request_again(proxies, fault, capsys):
    """Nothing is lost and nothing answered twice, by exactly the weights whose version it carries."""
    (proxy, _), jobs = proxies, jobs_of(new=LONG)

    async def broken():
        await publish(it, 0)
        asked = asyncio.ensure_future(answers(it.engine, jobs))
        await asyncio.sleep(0.2)
        proxy.set(fault)
        late = asyncio.ensure_future(answers(it.engine, jobs_of()))
        await until(lambda: it.engine.servers[0].version == -1)
        hand_over(it, 1)
        await asyncio.sleep(1)
        assert not asked.done() and not late.done()
        del proxy.seen[:]
        proxy.set("pass")
        return await asked, await late

    with running(proxy.url) as it:
        first, late = in_time(it, broken())
        check(jobs, first, it.kept)
        check(jobs_of(), late, it.kept)
        assert {v for c in late for v in c.version} == {1} and it.acknowledged == [0, 1] and not it.failed
        assert all(len({*c.version}) == 1 for c in first)  # done before it broke, or asked again from the start
        assert proxy.seen.index("/finish_weight_update") < proxy.seen.index("/inference/v1/generate")
    said = capsys.readouterr()
    assert said.err.count("it gets no request until") >= 1 and "in use again, with version 1" in said.out


@pytest.mark.slow
def test_one_of_two_gone_its_requests_go_to_the_other(proxies):
    """Two ways to one server, of which never more than one is open: a server of its own each, as the engine sees it."""
    one, other = proxies
    jobs = jobs_of(new=LONG)

    async def rerouted():
        other.set("cut")
        await publish(it, 0)
        asked = asyncio.ensure_future(answers(it.engine, jobs))
        await until(lambda: it.engine.servers[0].flying == len(jobs))
        one.set("cut")
        other.set("pass")
        return await asked

    with running(one.url, other.url) as it:
        got = in_time(it, rerouted())
        check(jobs, got, it.kept)
        assert it.engine.servers[0].version == -1 and it.engine.servers[1].version == 0 and it.acknowledged == [0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "500", "hang"])
def test_where_none_comes_back_the_run_ends_in_one_line(proxies, fault):
    proxy, _ = proxies

    async def ended():
        await publish(it, 0)
        asked = [asyncio.ensure_future(it.engine.generate(*job)) for job in jobs_of(new=LONG)]
        await asyncio.sleep(0.1)
        proxy.set(fault)
        results = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(Broken):
            await it.engine.generate((1, 2), Sampling(3))
        return results

    with running(proxy.url, patience=1.0) as it:
        results = in_time(it, ended())
        (error,) = it.failed
        assert {type(result) for result in results} == {Broken} and {result.__cause__ for result in results} == {error}
        assert type(error) is Lost and re.match(r"no vLLM server for 1 s \(--patience\): http", str(error))
        assert "\n" not in str(error) and "python -m nanorl.serve" in str(error)


# ------------------------------------------------------------------------------------------------ while it takes weights


@pytest.mark.slow
@pytest.mark.parametrize("fault, path", [
    *itertools.product(["cut", "500"], ["/collective_rpc", "/start_weight_update", "/update_weights", "/pause",
                                        "/finish_weight_update", "/resume"]), ("hang", "/update_weights")])  # fmt: skip
def test_broken_wherever_it_is_in_taking_weights_it_has_them_later(proxies, fault, path):
    """Whether the old ones go on serving meanwhile or it leaves: what comes is of the version that it carries."""
    (proxy, _), jobs = proxies, jobs_of(new=LONG)

    async def broken():
        await publish(it, 0)
        asked = asyncio.ensure_future(answers(it.engine, jobs))
        await asyncio.sleep(0.2)
        proxy.set(fault, only=path)
        hand_over(it, 1)
        await asyncio.sleep(0.6)
        assert it.engine.version == 0
        proxy.set("pass")
        await until(lambda: it.engine.version == 1)
        return await asked

    with running(proxy.url) as it:
        check(jobs, in_time(it, broken()), it.kept)
        assert it.acknowledged == [0, 1] and not it.failed


@pytest.mark.slow
def test_what_came_of_a_version_whose_proof_fails_is_thrown_away_and_asked_again(real_server, monkeypatch, capsys):
    """Version 1 comes into force without its weights, once. What the server answers under that name goes to nobody."""
    prove, failures, early = Link.prove, [], []
    nothing_loaded(monkeypatch, lambda version: version == 1 and not failures)

    def proved(link, weights):
        if weights.version == 1 and not failures:
            failures.append(1)
            end = time.monotonic() + 60
            while label(1) not in early and time.monotonic() < end:  # the proof takes until somebody has been answered
                time.sleep(0.01)
        return prove(link, weights)

    monkeypatch.setattr(Link, "prove", proved)
    jobs = jobs_of(new=LONG)

    async def unproven():
        await publish(it, 0)
        (server,) = it.engine.servers
        post = server.http.post

        async def posted(*given, **named):
            reply = await post(*given, **named)
            if server.coming == label(1):
                early.append(reply.json()["choices"][0]["weight_versions"][-1]["version"])
            return reply

        monkeypatch.setattr(server.http, "post", posted)
        asked = asyncio.ensure_future(answers(it.engine, jobs))
        await until(lambda: server.flying)
        hand_over(it, 1)
        got = await asked
        await until(lambda: it.engine.version == 1)
        return got

    with running(real_server.url) as it:
        got = in_time(it, unproven())
        check(jobs, got, it.kept)
        assert failures and label(1) in early
        assert it.acknowledged == [0, 1] and not it.failed
    assert "version 1: its log-probs differ" in capsys.readouterr().err


@pytest.mark.slow
def test_what_another_run_brought_to_the_server_is_not_taken_for_ours(real_server, capsys):
    async def used_by_two():
        await publish(it, 0)
        it.engine.servers[0].link.ask("/update_weight_version", {"new_version": "12345678.0"})  # the same number
        return await answers(it.engine, jobs_of())

    with running(real_server.url) as it:
        got = in_time(it, used_by_two())
        check(jobs_of(), got, it.kept)
        assert {v for c in got for v in c.version} == {0} and it.acknowledged == [0]
    assert "'12345678.0', which this run has not published" in capsys.readouterr().err


@pytest.mark.slow
def test_by_disk_it_is_the_same(real_server, tmp_path):
    async def twice():
        await publish(it, 0)
        asked = asyncio.ensure_future(answers(it.engine, jobs_of(new=LONG)))
        await publish(it, 1)
        return await asked

    with running(real_server.url, transport="disk", folder=tmp_path / "weights") as it:
        check(jobs_of(new=LONG), in_time(it, twice()), it.kept)
        assert it.acknowledged == [0, 1]


@pytest.mark.slow
def test_every_so_many_publishes_are_proven_and_each_acknowledged(real_server, monkeypatch):
    proofs, prove = [], Link.prove
    monkeypatch.setattr(Link, "prove", lambda link, weights: (proofs.append(weights.version), prove(link, weights))[1])

    async def seven():
        for version in range(7):
            await publish(it, version)

    with running(real_server.url, prove_every=3) as it:
        in_time(it, seven())
        assert proofs == [0, 3, 6] and it.acknowledged == [*range(7)]
        spans = it.engine.lap()
    assert {"bytes", "copy", "digest", "transfer", "load", "probe", "rows"} <= spans[0].args.keys()
    assert ["mismatch" in span.args for span in spans] == [True, False, False, True, False, False, True]


# ------------------------------------------------------------------------------------------------ several servers


@pytest.mark.slow
def test_the_version_is_the_oldest_in_use_it_never_falls_and_a_late_one_may_not_join(proxies):
    with running(proxies[0].url, proxies[1].url) as it:
        engine, (a, b) = it.engine, it.engine.servers
        engine.lost.clear()

        async def told():
            engine.proven(a, 3)
            assert engine.version == 3  # b is not in use
            engine.proven(b, 2)
            assert engine.version == 3 and b.version == -1 and b in engine.lost
            engine.lost.clear()
            engine.proven(b, 3)
            engine.proven(a, 5)
            assert engine.version == 3 and a.open and b.open
            engine.leave(b, Lost("gone"))
            assert engine.version == 5
            engine.proven(b, 9)  # while it is lost
            assert b.version == -1 and engine.alone is None
            engine.leave(a, Lost("gone"))
            assert engine.version == 5 and engine.alone is not None

        in_time(it, told())
        assert it.acknowledged == [3, 5]


@pytest.mark.slow
def test_a_request_goes_where_the_least_is_in_flight_and_to_none_that_loads(proxies):
    with running(proxies[0].url, proxies[1].url) as it:
        engine, (a, b) = it.engine, it.engine.servers

        async def chosen():
            engine.lost.clear()
            for server in (a, b):
                engine.proven(server, 0)
            a.flying, b.flying = 3, 2
            assert await engine.choose() is b
            engine.hold(b, 1)
            assert await engine.choose() is a
            engine.hold(a, 1)
            waits = asyncio.ensure_future(engine.choose())
            await asyncio.sleep(0.05)
            assert not waits.done()
            engine.proven(b, 1)
            assert await waits is b
            a.flying = b.flying = 0

        in_time(it, chosen())


# ------------------------------------------------------------------------------------------------ details


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_what_nobody_waits_for_any_more_leaves_the_server(real_server, how):
    async def works(some):
        """Until the server has requests in the works, or none."""
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                text = (await http.get(f"{real_server.url}/metrics")).text
                (line,) = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
                if (float(line.split()[-1]) > 0) == some:
                    return
                await asyncio.sleep(0.02)

    async def left():
        await publish(it, 0)
        asked = [asyncio.ensure_future(it.engine.generate(*job)) for job in jobs_of(new=3900)]
        await works(True)
        for one in asked if how == "cancelled" else ():
            one.cancel()
        if how == "closed":
            it.engine.close()
        await works(False)
        assert how == "cancelled" or not any(one.done() for one in asked)  # as with a worker: nobody is waited for
        for one in asked:
            one.cancel()

    with running(real_server.url) as it:
        in_time(it, left())
        assert sum(s.args["rows"] for s in it.engine.lap() if s.name == "generate") == 0 and not it.failed


def test_a_seed_depends_on_the_key_and_fits_a_signed_number():
    keys = itertools.product(range(40), repeat=2)
    seeds = {body_of((1,), Sampling(1, key=(0, 0, *key)))["sampling_params"]["seed"] for key in keys}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62


def choice_of(versions, logp=(-1.0, -2.0, -3.0)):
    """What a server says of an answer of three tokens."""
    return {"token_ids": [5, 6, 7], "logprobs": {"content": [{"logprob": p} for p in logp]}, "finish_reason": "stop",
            "weight_versions": versions}  # fmt: skip


def test_an_answer_is_read_with_the_version_of_each_token():
    c = read(choice_of([{"version": "3", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]))
    assert (c.ids, c.logp, c.version, c.finish) == ((5, 6, 7), (-1.0, -2.0, -3.0), (3, 5, 5), "stop")
    with pytest.raises(FloatingPointError, match="not finite"):
        read(choice_of([{"version": "3", "start": 0, "end": 3}], (-1.0, -9999.0, -1.0)))


@pytest.mark.slow
def test_what_vllm_would_change_in_silence_is_refused(real_server):
    with running(real_server.url) as it, pytest.raises(ValueError, match="temperature 0.005"):
        in_time(it, it.engine.generate((1,), Sampling(2, temperature=0.005)))


@pytest.mark.slow
def test_killed_while_it_generates_and_while_it_takes_weights_it_is_proven_when_it_is_back(real_server, monkeypatch):
    """Killed as by the kernel, and started again at the same address."""
    jobs, ask, killed = jobs_of(new=LONG), Link.ask, []

    def asked(link, path, body=None):
        if path == "/update_weights" and killed == [0]:
            killed.append(1)
            real_server.kill()
            killed.append(2)  # now its port is free
        return ask(link, path, body)

    async def again(server):
        await asyncio.get_running_loop().run_in_executor(None, server.start)

    async def survived():
        await publish(it, 0)
        first = asyncio.ensure_future(answers(it.engine, jobs))
        await asyncio.sleep(0.1)
        real_server.kill()
        await again(real_server)
        first = await first
        killed.append(0)
        second = asyncio.ensure_future(answers(it.engine, jobs))
        hand_over(it, 1)
        await until(lambda: killed == [0, 1, 2])
        await again(real_server)
        await until(lambda: it.engine.version == 1)
        return first, await second

    monkeypatch.setattr(Link, "ask", asked)
    with running(real_server.url) as it:
        first, second = in_time(it, survived(), seconds=300)
        assert {v for c in first for v in c.version} == {0} and {v for c in second for v in c.version} == {1}
        check(jobs, first, it.kept)
        check(jobs, second, it.kept)
        assert it.acknowledged == [0, 1] and not it.failed
