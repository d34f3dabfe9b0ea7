"""Which weights does a server hold? Publish a version to a vLLM server, and prove that it is the one that generates.

    trainer                                                       one vLLM server (receive.py in its workers)
    snapshot    copies, digests, log-probs of a probe (snapshot.py)
    stage       ── names, shapes, digests (HTTP) ──────────────►  a thread receives beside what is generated,
                ── bytes (process group, or a shared disk) ────►  digests what has come and compares
    load        ── pause, finish, resume (HTTP) ───────────────►  what is staged replaces the old version
    prove       ◄── log-probs of the probe ─────────────────────  by the way that samples are generated

The digests prove the bytes and the probe proves the loading: that names found their place in fused and packed layers,
that nothing generates with a copy made before, that no cache of the old version is read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from nanorl import transfer
from nanorl.config import Lost, Refused
from nanorl.policy import first_line
from nanorl.snapshot import PROBE, Weights, label

GROWTH, FLOOR = 5, 1e-5  # mismatch of any publish against the run's first, and what is always allowed
SERVE = "python -m nanorl.serve --model DIR"
BESIDE = {  # what a config says beside the function that the model computes
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "initializer_range", "id2label", "label2id", "problem_type", "return_dict",
    "output_attentions", "output_hidden_states", "attention_dropout",
}  # fmt: skip


class Failed(Exception):
    """The new weights did not arrive; the server goes on with the old ones, whole. Publish again. One line."""


class Unproven(Exception):
    """The server has loaded weights that are not shown to be the trainer's: use nothing that it samples. One line."""


@dataclass(frozen=True)
class Took:
    """What a publish cost: seconds of each part and bytes; the probe's mean difference, None if it was not asked."""

    bytes: int
    copy: float
    digest: float
    transfer: float  # from the first byte to digests agreed; the server generates meanwhile
    load: float  # from pause to resume; the server generates nothing
    probe: float
    mismatch: float | None


class Link:
    """One server as the trainer controls it: synchronous, used by one thread at a time.

    transport: "broadcast" over a process group of its own, or "disk": a file in `folder`, which both can read.
    timeout: seconds that any single wait may take. tolerance: the largest mismatch of the first publish; later ones may
    have GROWTH times the first one's, at least FLOOR.
    """

    def __init__(self, url: str, transport: Literal["broadcast", "disk"], folder: Path | None = None,
                 timeout: float = 60.0, tolerance: float = 5e-5):  # fmt: skip
        self.url, self.transport, self.folder = url.rstrip("/"), transport, folder
        self.timeout, self.tolerance = timeout, tolerance
        self.http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False,
                                 limits=httpx.Limits(max_keepalive_connections=0))  # vLLM hangs up after an error
        self.group: transfer.Group | None = None
        self.connected = self.proven = False  # proven: by a publish since it was connected
        self.first: float | None = None  # mismatch of the first publish

    def ask(self, path: str, body: Any = None) -> Any:
        """POST. Raises Lost where no answer comes, Failed where it is an error."""
        try:
            response = self.http.post(path, json=body)
        except httpx.TimeoutException:
            raise Lost(f"{self.url}: no answer to {path} within {self.timeout:g} s") from None
        except httpx.TransportError as error:
            raise Lost(f"{self.url}: gone at {path} ({type(error).__name__}: {first_line(error)})") from None
        if response.is_error:
            raise Failed(f"{self.url}: answered {response.status_code} to {path}: {words(response)}")
        try:
            return response.json()
        except ValueError:  # JSON's
            raise Failed(f"{self.url}: the answer to {path} is no JSON: {words(response)}") from None

    def workers(self, method: str) -> list[Any]:
        """What each of the server's workers answers to a method of receive.Extension."""
        return self.ask("/collective_rpc", {"method": method})["results"]

    def check(self, config: PreTrainedConfig) -> int:
        """The server is there, was started rightly and holds a model of this config. Returns its room, in tokens.

        Raises Refused, one line: not there → the command that starts one; another model → the field that differs and
        both values; started otherwise → what to start it with.
        """
        flag, port = f"--servers {self.url}", httpx.URL(self.url).port or 80
        try:
            about = self.workers("nanorl_about")[0]
        except Lost as error:
            raise Refused(f"{flag}: no vLLM server answers ({error}); start one: {SERVE} --port {port}") from None
        except Failed as error:
            raise Refused(f"{flag}: was not started by nanorl ({error}); start it so: {SERVE} --port {port}") from None
        if not about["receiver"] or (about["logprobs"], about["policy"]) != ("processed_logprobs", "priority"):
            raise Refused(f"{flag}: --weight-transfer-config, --logprobs-mode or --scheduling-policy is not nanorl's; "
                          f"start it so: {SERVE} --port {port}")  # fmt: skip
        ours, theirs = json.loads(config.get_text_config().to_json_string(use_diff=False)), about["config"]
        for field in sorted((ours.keys() | theirs.keys()) - BESIDE):
            if ours.get(field) != theirs.get(field):
                raise Refused(f"{flag}: serves another model: {field} is {theirs.get(field)!r} there and "
                              f"{ours.get(field)!r} in --model; start it with the same --model")  # fmt: skip
        if about["room"] <= PROBE:
            raise Refused(f"{flag}: has room for {about['room']} tokens; start it with --max-model-len above {PROBE}")
        return about["room"]

    def connect(self) -> None:
        """Begin anew with this server, whatever it or an earlier trainer was doing: nothing staged, nothing proven.

        `publish` does so where it has to: at first, and after any publish that failed. Raises Failed, Lost.
        """
        self.leave()
        self.workers("nanorl_drop")
        self.connected = True

    def meet(self, device: str) -> None:
        """A process group with the server's workers. Raises Failed, Lost."""
        about, where = self.workers("nanorl_about"), httpx.URL(self.url)
        backend = "nccl" if {device, about[0]["device"]} == {"cuda"} else "gloo"
        size = 1 + len(about)
        try:
            address = transfer.address_towards(where.host, where.port or 80, self.timeout)
            store = transfer.meeting_point(address, size, self.timeout)
            meeting = {"backend": backend, "address": address, "port": store.port, "size": size,
                       "timeout": self.timeout}  # fmt: skip
            with ThreadPoolExecutor(1) as threads:
                group = threads.submit(transfer.Group, backend, store, 0, size, address, self.timeout)
                self.ask("/init_weight_transfer_engine", {"init_info": meeting})
                self.group = group.result()
        except (OSError, RuntimeError) as error:
            raise Failed(f"{self.url}: no process group with it ({first_line(error)})") from None

    def publish(self, weights: Weights, hold: Callable[[], None] = lambda: None, prove: bool = True) -> Took:
        """Bring this version to the server and prove that it generates with it.

        hold() is called when the weights are staged and agreed, before the server is paused: from there until this
        returns, tokens of the new version may come out of the server that are not proven yet. prove=False leaves the
        probe out, but not after `connect`.
        Raises Failed (the old version is whole and generates), Unproven (do not use the server: what it has answered
        since hold() and is of this version is worth nothing), Lost (it is gone or does not answer), Refused (the very
        first publish: trainer and server score the same weights differently).
        """
        try:
            if not self.connected:
                self.connect()
            seconds = self.stage(weights)
            hold()
            start = time.monotonic()
            self.load(weights.version)
            loaded = time.monotonic()
            mismatch = self.prove(weights) if prove or not self.proven else None
        except (Failed, Unproven, Lost):
            self.leave()
            raise
        size = sum(bucket.nbytes for bucket in weights.buckets)
        return Took(size, weights.copy, weights.digest, seconds, loaded - start, time.monotonic() - loaded, mismatch)

    def stage(self, weights: Weights) -> float:
        """The new version into the server's memory beside the old one. Raises Failed: the old one is untouched.

        Returns the seconds from the first byte until all digests agree.
        """
        if self.transport == "broadcast" and self.group is None:
            self.meet(weights.buckets[0].device.type)
        self.workers("nanorl_drop")
        self.ask("/start_weight_update")
        start, cut = time.monotonic(), None
        path = None if self.transport == "broadcast" else str(self.written(weights))
        update = {"tensors": transfer.describe(weights.tensors), "digests": weights.digests, "path": path}
        self.ask("/update_weights", {"update_info": update})
        if self.group is not None:
            try:
                for _ in self.group.broadcast(weights.buckets):
                    pass
            except RuntimeError as error:  # the server may know better what happened
                cut = Failed(f"{self.url}: version {weights.version} was cut off ({first_line(error)})")
                self.group = None
        self.agreed(weights.version, cut)
        return time.monotonic() - start

    def agreed(self, version: int, cut: Failed | None) -> None:
        """Wait until every worker has it all, and as it was sent. Raises Failed, with what a worker says went wrong."""
        end = time.monotonic() + self.timeout
        while True:
            reports = self.workers("nanorl_staged")
            for report in reports:
                if report["state"] == "failed":
                    raise Failed(f"{self.url}: version {version}: {report['why']}")
            if cut is not None:
                raise cut
            if all(report["state"] == "whole" for report in reports):
                return
            if time.monotonic() > end:
                raise Failed(f"{self.url}: version {version} has not all come within {self.timeout:g} s")
            time.sleep(0.005)

    def written(self, weights: Weights) -> Path:
        """The file of these weights for this server: whole under its name, whenever anybody looks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        where = httpx.URL(self.url)
        path = self.folder / f"{where.host}-{where.port or 80}.safetensors"
        save_file(weights.tensors, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        return path.absolute()

    def load(self, version: int) -> None:
        """What is staged replaces what generates; requests in flight go on, recomputed, under the new weights."""
        try:
            self.ask("/pause?mode=keep")  # by its default it clears the caches, also those of the requests it freezes
            try:
                self.ask("/finish_weight_update", {"weight_version": label(version)})
            except Failed as error:
                raise Unproven(f"{self.url}: version {version} was not loaded to the end ({error})") from None
        finally:
            self.resume()

    def resume(self) -> None:
        """Let it generate again, whatever became of the weights: who waits for an answer shall get one."""
        try:
            self.ask("/resume")
        except Failed as error:
            raise Lost(f"{self.url}: stays paused ({error})") from None

    def prove(self, weights: Weights) -> float:
        """Ask for the probe's log-probs by the way that samples take, and compare. Raises Unproven above the limit.

            mismatch = mean over the probe of |log π_server − log π_trainer|

        The mean, since of the same weights it hardly varies from publish to publish, where the largest difference does:
        so the limit can be near it, and one tensor that stays behind shows.
        """
        what = f"{self.url}: version {weights.version}"
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"token_ids": weights.probe.ids, "sampling_params": sampling, "priority": -1}  # before all that waits
        try:
            answer = self.ask("/inference/v1/generate", body)
        except Failed as error:
            raise Unproven(f"{what}: the probe failed ({error})") from None
        versions = {span["version"] for span in answer["choices"][0]["weight_versions"]}
        if versions != {label(weights.version)}:
            raise Unproven(f"{what}: the server says that it samples with {', '.join(sorted(versions))}")
        scored = zip(weights.probe.ids[1:], answer["prompt_logprobs"][1:])
        theirs = torch.tensor([by_id[str(token)]["logprob"] for token, by_id in scored], dtype=torch.float64)
        mismatch = float((theirs - torch.tensor(weights.probe.logp, dtype=torch.float64)).abs().mean())
        if self.first is None and not mismatch <= self.tolerance:  # NaN is not
            raise Refused(f"--servers {self.url}: trainer and server score the same weights differently, by "
                          f"{mismatch:.1e}, more than --mismatch {self.tolerance:g}; serve in the trainer's --dtype, "
                          "or allow more")  # fmt: skip
        if self.first is not None and not mismatch <= max(GROWTH * self.first, FLOOR):
            raise Unproven(f"{what}: its log-probs differ from the trainer's by {mismatch:.1e}, those of the first "
                           f"version by {self.first:.1e}")  # fmt: skip
        self.first = mismatch if self.first is None else self.first
        self.proven = True
        return mismatch

    def leave(self) -> None:
        """Leave the process group: whoever still receives in it ends."""
        self.group, self.connected, self.proven = None, False, False

    def close(self) -> None:
        """Leave, and close the connections. The server goes on with what it has."""
        self.leave()
        self.http.close()


def words(response: httpx.Response) -> str:
    """What an error response says, in one line: vLLM's message, or the text of whoever else answered."""
    text = response.text
    if response.headers.get("content-type", "").startswith("application/json"):
        body = response.json()
        text = body["error"]["message"] if isinstance(body, dict) and "error" in body else text
    return " ".join(text.split())[:300]
