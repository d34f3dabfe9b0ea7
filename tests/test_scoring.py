"""Theorems about scoring in other processes: what they score, what they survive, what becomes of who has no score."""

import asyncio
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import evaluate, rollout
from nanorl.buffer import Buffer
from nanorl.config import Lost, Refused
from nanorl.engine import Completion
from nanorl.reward import label, split
from nanorl.sample import Group, Prompt, collate
from nanorl.scoring import LIMITS, MISTAKES, WINDOW, Scorer, Verdict, broken

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS limits no process's memory")
SECONDS, MEMORY, FIXED = 0.7, 128, -7.0

REWARDS = '''
import asyncio, os, re, signal, subprocess, sys, time, zlib
from nanorl.monitor import log

kept = []

def act(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """What the completion says."""
    what, _, argument = completion.partition(" ")
    if what == "sleep":
        time.sleep(float(argument))
    elif what == "spin":  # in C, where no Python code can interrupt it
        re.match("(a+)+$", "a" * 60 + "b")
    elif what == "handle":  # its own alarm clock, as libraries have; it sleeps through all that Python could do
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        signal.alarm(0)
        re.match("(a+)+$", "a" * 60 + "b")
    elif what == "take":
        return float(len(bytearray(int(argument) * 2**20)) > 0)
    elif what == "keep":
        kept.append(bytearray(int(argument) * 2**20))
    elif what == "raise":
        raise KeyError(argument)
    elif what == "end":
        sys.exit(3)
    elif what == "die":
        with open(argument, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "die_once":
        if not os.path.exists(argument):
            open(argument, "w").close()
            os._exit(9)
    elif what == "count":
        with open(argument, "a") as file:
            file.write("x")
        time.sleep(3600)
    elif what == "child":  # that nobody ends
        child = subprocess.Popen(["sleep", "3600"])
        with open(argument, "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    elif what == "print":
        print("noise" * 10**4)
        os.write(1, bytes(10**4))
    elif what == "pid":
        return os.getpid()
    elif what == "modules":
        return float(bool({"torch", "transformers", "numpy"} & sys.modules.keys()))
    elif what in ("none", "text", "nan", "inf"):
        return {"none": None, "text": "1", "nan": float("nan"), "inf": float("inf")}[what]
    else:
        return float(completion)
    return 1.0

def echo(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """A number that is another one wherever anything of the arguments is."""
    value = zlib.crc32(repr((prompt, completion, prompt_ids, completion_ids, answer, sorted(row.items()))).encode())
    log("odd", value % 2)
    return value

async def late(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """The same, and it waits."""
    await asyncio.sleep(0)
    return echo(prompt, completion, prompt_ids, completion_ids, answer, **row)

def length(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """Characters."""
    return len(completion)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file with rewards for every kind of trouble."""
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def make(file):
    """Scorers with such rewards, and closed at the end."""
    made = []

    def making(*names, workers=2, seconds=SECONDS, memory=MEMORY, on_error=str(FIXED)):
        made.append(Scorer(tuple(f"{file}:{name}" for name in names), workers, seconds, memory, on_error))
        return made[-1]

    yield making
    for scorer in made:
        scorer.close()


@pytest.fixture(scope="module")
def acting(make):
    """Two processes that do what a completion says."""
    return make("act")


@pytest.fixture(scope="module")
def echoing(make):
    """The same rewards in another process and here."""
    names = ("echo", "late=0.5", "length=-3")
    return make(*names), make(*names, workers=0)


def prompt(number=0, text="q", answer="", **row):
    """A prompt of this number."""
    return Prompt(number, (1, 2), text, answer, row)


async def together(scorer, completions):
    """Verdicts on completions, asked for at once."""
    return await asyncio.gather(*(scorer.score(prompt(i), text, (3,)) for i, text in enumerate(completions)))


def verdicts(scorer, *completions):
    """Verdicts on completions, asked for at once from this thread."""
    return asyncio.run(together(scorer, completions))


def alive(*pids):
    """Those processes that still are; who has ended and is only not yet buried is not."""
    said = subprocess.run(["ps", "-o", "pid=,stat=", "-p", ",".join(map(str, pids))], capture_output=True, text=True)
    return {int(line.split()[0]) for line in said.stdout.splitlines() if not line.split()[1].startswith("Z")}


def gone(*pids, seconds=20):
    """Wait until they are."""
    end = time.monotonic() + seconds
    while left := alive(*pids):
        assert time.monotonic() < end, f"{left} are still there"
        time.sleep(0.02)
    return True


# ---- what is scored

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
row = st.dictionaries(st.from_regex(r"\A[a-z]{6,8}_\Z"), st.one_of(text, st.integers(), st.booleans(), st.none(),
                                                                  st.floats(), st.lists(st.integers())))  # fmt: skip
sample = st.tuples(st.builds(Prompt, st.integers(0, 99), ids, text, text, row), text, ids)


@settings(max_examples=25)
@given(batch=st.lists(sample, max_size=6), data=st.data())
def test_another_process_scores_what_this_one_would_whoever_asks_and_in_whatever_order(echoing, batch, data):
    """Arguments, parts, sums, what was logged: from the main thread, on another thread, permuted."""
    there, here = echoing

    async def all_of(scorer, asked):
        return await asyncio.gather(*(scorer.score(*one) for one in asked))

    expected = asyncio.run(all_of(here, batch))
    assert asyncio.run(all_of(there, batch)) == expected
    permuted, result = data.draw(st.permutations(range(len(batch)))), []
    thread = threading.Thread(target=lambda: result.extend(asyncio.run(all_of(there, [batch[i] for i in permuted]))))
    thread.start()
    thread.join()
    assert result == [expected[i] for i in permuted]
    for verdict, (_, completion, _) in zip(expected, batch):
        echo, late, length = verdict.parts.values()
        assert echo == late and length == len(completion)
        assert verdict.value == pytest.approx(1.0 * echo + 0.5 * late - 3 * length, rel=1e-12)  # Σ weight·value
        odd = ("odd", echo % 2)
        assert verdict.notes == (odd, odd, ("reward/echo", echo), ("reward/late", late), ("reward/length", length))


def test_one_reward_is_logged_as_the_reward_and_not_once_more(acting):
    [verdict] = verdicts(acting, "0.25")
    assert verdict == Verdict(0.25, {"act": 0.25}, ())


def test_rewards_that_cannot_be_told_apart_are_refused(make):
    with pytest.raises(Refused, match=r"mine.py:echo: reward/echo is logged already"):
        make("echo", "echo=2")
    with pytest.raises(Refused, match=r"std: reward/std is logged already"):
        Scorer(("x.py:f", "y.py:std"), 2, 1.0, 9, "drop")


def test_a_spec_is_a_name_and_a_weight():
    assert [split(spec) for spec in ("f", "f=2", "a.py:f=-.5", "a=b.py:f")] == [
        ("f", 1.0), ("f", 2.0), ("a.py:f", -0.5), ("a=b.py:f", 1.0)]  # fmt: skip
    assert [label(spec) for spec in ("f", "f=2", "a.py:f=-.5", "a=b.py:f")] == ["f"] * 4


def test_fields_that_json_cannot_hold_stay_here(make):
    scorer = make("echo", workers=1)
    with_picture = asyncio.run(scorer.score(prompt(picture=object(), names=["a"]), "x", ()))
    assert with_picture == asyncio.run(scorer.score(prompt(names=["a"]), "x", ()))


def test_a_process_that_scores_has_no_library_that_is_slow_to_import(acting):
    assert verdicts(acting, "modules")[0].value == 0.0


def test_what_a_reward_prints_is_no_verdict(acting):
    assert [v.value for v in verdicts(acting, "print", "0.5", "print", "0.25")] == [1.0, 0.5, 1.0, 0.25]


# ---- limits


def test_three_that_hang_take_nothing_from_twenty_and_both_processes_are_replaced(acting):
    """One that waits, one that computes in C, one that has its own alarm clock: each has the fixed reward, and why."""
    before = {p.process.pid for p in acting.processes}
    completions = [str(i / 4) for i in range(20)]
    for place, what in ((1, "sleep 3600"), (9, "spin"), (10, "handle")):
        completions.insert(place, what)
    told = verdicts(acting, *completions)
    for completion, verdict in zip(completions, told):
        if completion in ("sleep 3600", "spin", "handle"):
            assert (verdict.value, verdict.fault) == (FIXED, "timeout")
        else:
            assert (verdict.value, verdict.fault) == (float(completion), None)
    scored_by = {int(v.value) for v in verdicts(acting, *["pid"] * 40)}
    while len(acting.processes) < 2:  # the second one's thread is between two processes
        time.sleep(0.01)
    after = {p.process.pid for p in acting.processes}
    assert gone(*before) and scored_by <= after == alive(*after) and len(after) == 2
    assert acting.lap()["reward/faults/timeout"] == 3


@pytest.mark.parametrize("what, fault, why", [
    ("raise gold", "exception", r"KeyError: 'gold' \(mine.py, line \d+\)"), ("end", "exception", "SystemExit: 3"),
    ("none", "none", "act gave None for prompt 0"), ("nan", "nan", "gave nan"), ("inf", "nan", "gave inf"),
    ("text", "nan", "gave '1' for prompt 0; it must be a finite number"), ("1e400", "nan", "gave inf"),
])  # fmt: skip
def test_a_reward_that_tells_no_number_is_told_by_its_kind(acting, what, fault, why):
    acting.lap()
    bad, good = verdicts(acting, what, "0.5")
    assert (bad.value, bad.fault, good.value, good.fault) == (FIXED, fault, 0.5, None)
    assert re.search(why, bad.why) and "\n" not in bad.why
    assert acting.lap() == {f"reward/faults/{fault}": 1} and acting.lap() == {}


@LINUX
def test_memory_is_limited_verdict_by_verdict(make):
    """What one takes another cannot miss; what is kept from verdict to verdict goes with its process."""
    scorer = make("act", workers=1)
    told = verdicts(scorer, f"take {MEMORY // 2}", f"take {MEMORY + 1}", f"take {MEMORY // 2}")
    assert [(v.value, v.fault) for v in told] == [(1.0, None), (FIXED, "memory"), (1.0, None)]
    told = verdicts(scorer, *["keep 40"] * 12, "pid")
    assert all(v.fault is None for v in told)
    assert scorer.lap() == {"reward/faults/memory": 1}


def test_a_process_that_dies_is_tried_once_more_and_one_that_is_late_is_not(acting, tmp_path):
    acting.lap()
    marks = [tmp_path / name for name in "abc"]
    told = verdicts(acting, f"die_once {marks[0]}", f"die {marks[1]}", f"count {marks[2]}", "0.5")
    assert [(v.value, v.fault) for v in told] == [(1.0, None), (FIXED, "died"), (FIXED, "timeout"), (0.5, None)]
    assert (marks[1].read_text(), marks[2].read_text()) == ("xx", "x")
    assert told[1].why == "the process that scored it was ended by SIGSEGV, twice"
    assert acting.lap() == {"reward/faults/died": 1, "reward/faults/timeout": 1}


def test_a_reward_that_has_started_a_process_takes_it_along(acting, tmp_path):
    assert verdicts(acting, f"child {tmp_path / 'pid'}")[0].fault == "timeout"
    assert gone(int((tmp_path / "pid").read_text()))


# ---- the end


def test_closing_ends_the_processes_and_whoever_waits_is_told(make):
    scorer = make("act", seconds=60.0)
    pids = [int(v.value) for v in verdicts(scorer, *["pid"] * 8)]

    async def closing():
        waiting = [asyncio.ensure_future(scorer.score(prompt(), "sleep 60", ())) for _ in range(4)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(scorer.close)
        return await asyncio.gather(*waiting, scorer.score(prompt(), "1", ()), return_exceptions=True)

    assert [str(error) for error in asyncio.run(closing())] == ["the run is over, so nothing is scored any more"] * 5
    assert gone(*pids) and not scorer.processes and not any(thread.is_alive() for thread in scorer.threads)


TRAINER = """
    import asyncio, os, sys
    from types import SimpleNamespace
    from nanorl.scoring import Scorer

    if sys.platform == "linux":  # on one core, so that the limit of computing is near
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    scorer = Scorer((sys.argv[1] + ":act",), 3, 0.3, 64, "drop")
    prompt = SimpleNamespace(number=0, text="", ids=(), answer="", row={}, rewards=())

    async def main():
        ask = lambda text: scorer.score(prompt, text, ())
        await ask("1")
        asked = [asyncio.ensure_future(ask(text)) for text in sys.argv[2:]]
        await asyncio.sleep(0.15)  # so that it is in the midst of them
        print(*(p.process.pid for p in scorer.processes), flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_trainer_however_that_ends(file, number):
    """Idle, waiting, computing in C where no thread of its own can see the end, and that with its alarm switched off."""
    script, doing = textwrap.dedent(TRAINER), ["sleep 3600"]
    if number == signal.SIGKILL:
        doing = ["spin", "handle"] if sys.platform == "linux" else ["spin"]
    trainer = subprocess.Popen([sys.executable, "-c", script, file, *doing], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(alive(*pids)) == 3
    trainer.send_signal(number)
    trainer.wait(30)
    trainer.stdout.close()
    assert gone(*pids)


def test_a_file_that_ends_its_process_while_it_is_imported_is_named(tmp_path, capfd):
    path = tmp_path / "ends.py"
    path.write_text("import os\nos._exit(5)\n")
    scorer = Scorer((f"{path}:f",), 1, 1.0, 64, "drop")
    with pytest.raises(Lost, match=r"a process that scores ended with status 5 while it imported .*ends.py:f"):
        verdicts(scorer, "1")
    scorer.close()


def test_a_name_that_is_not_in_the_file_is_told_in_its_own_words(file):
    scorer = Scorer((f"{file}:nobody",), 1, 1.0, 64, "drop")
    with pytest.raises(Lost, match=r"^--reward .*mine.py:nobody: .*mine.py has no function nobody$"):
        verdicts(scorer, "1")
    scorer.close()


# ---- what becomes of a sample without a score

faults = st.lists(st.sampled_from((None, None, None, *LIMITS, *MISTAKES)), max_size=WINDOW)


@given(recent=faults)
def test_broken_is_more_than_half_of_all_that_were_seen_or_for_limits_of_a_whole_window(recent):
    mistakes = limits = 0
    for fault in recent:
        mistakes += fault in ("exception", "none", "nan")
        limits += fault in ("timeout", "memory", "died")
    assert broken(recent) == (2 * mistakes > len(recent) or 2 * (mistakes + limits) > 64)


def settle(scorer, *faults):
    """Verdicts with these faults, one after the other, as the flag says."""
    return [scorer.settled(Verdict(None if fault else 1.0, {}, (), fault, "why"), i, None).value
            for i, fault in enumerate(faults)]  # fmt: skip


def test_drop_goes_on_until_half_have_no_score(make, capsys):
    """Each kind is told once, with its prompt; the limit is the loop's own count of the last WINDOW."""
    scorer = make("act", workers=0, on_error="drop")
    assert settle(scorer, None, "nan", "timeout", "nan", None) == [1.0, None, None, None, 1.0]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"warning: prompt {i} has no score ({fault}): why; it is left out of its group, and more of them are "
                    f"counted in reward/faults/{fault}" for i, fault in ((1, "nan"), (2, "timeout"))]  # fmt: skip
    settle(scorer, "none")
    with pytest.raises(Lost, match=r"^prompt 0 has no score \(none\): why; 5 of the last 7 samples have none; mend the"):
        settle(scorer, "none")


def test_a_reward_that_raises_at_once_ends_the_run_and_one_that_is_slow_at_once_does_not(make):
    settle(make("act", workers=0, on_error="drop"), *["timeout"] * (WINDOW // 2))
    for faults in (["exception"], [None, "none", "none"], ["timeout"] * (WINDOW // 2 + 1)):
        with pytest.raises(Lost, match="mend the reward"):
            settle(make("act", workers=0, on_error="drop"), *faults)


@pytest.mark.parametrize("fault", LIMITS + MISTAKES)
def test_stop_ends_the_run_at_the_first_and_a_number_never(make, fault):
    with pytest.raises(Lost, match=rf"^prompt 1 has no score \({fault}\): why; mend the reward \(--reward-workers 0"):
        settle(make("act", workers=0, on_error="stop"), None, fault)
    scorer = make("act", workers=0, on_error="-0.5")
    assert settle(scorer, *[fault] * 200, None) == [-0.5] * 200 + [1.0]
    assert scorer.lap() == {f"reward/faults/{fault}": 200}


def test_without_processes_the_reward_s_own_error_ends_the_run_with_its_traceback(make):
    with pytest.raises(KeyError, match="gold") as raised:
        verdicts(make("act", workers=0, on_error="drop"), "raise gold")
    assert raised.traceback[-1].name == "act"


class Numbered:
    """An engine whose answer is the number of the try in its group; later tries answer first."""

    version = 7

    async def generate(self, ids, sampling, images=()):
        number = sampling.key[3]
        for _ in range(9 - number):
            await asyncio.sleep(0)
        return Completion((number,), (-0.5,), (7,), "stop")


async def scores(prompt, completion, completion_ids):
    """The worth of a try; None: it has no score."""
    if (worth := prompt.row["worth"][completion_ids[0]]) is None:
        raise rollout.Unscored("timeout")
    return worth


def grouped(*worth):
    """The group of tries that are worth this much."""
    prompt = Prompt(0, (1, 2), "q", "", {"worth": [*worth]})
    sampling = rollout.Sampling(3, key=(0, rollout.TRAIN))
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    return asyncio.run(rollout.group(Numbered(), tokenizer, prompt, scores, sampling, len(worth)))


def test_a_group_is_what_it_would_be_had_the_sample_without_a_score_never_been():
    whole, less = grouped(1.0, 0.0, 0.5), grouped(1.0, None, 0.0, None, 0.5)
    assert [s.reward for s in less.samples] == [s.reward for s in whole.samples] == [1.0, 0.0, 0.5]
    assert len(collate([less, Group(less.prompt, less.samples[:1])])) == 4
    with pytest.raises(rollout.Unscored, match="prompt 0: none of its 2 tries has a score"):
        grouped(None, None)


def test_a_group_without_any_score_gives_its_place_back_and_a_lost_reward_ends_sampling():
    async def made(number):
        raise [rollout.Unscored("timeout"), Lost("mend the reward")][number]

    buffer = Buffer(1)
    rolling = rollout.Rollout(buffer, made)
    rolling.pump()
    with pytest.raises(Lost, match="mend the reward"):
        buffer.take(20, lambda: False)
    rolling.close()
    assert buffer.ended == {"failed": 1} and not buffer.recent and buffer.first is None


def test_what_has_no_score_does_not_pass_an_evaluation():
    """pass@k counts it as a try that was wrong; a prompt without any score, too."""
    held_out = [Prompt(i, (1, 2), "q", "", {"worth": worth}) for i, worth in enumerate(([None, 1.0], [None, None]))]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    how = rollout.Sampling(3)
    results, groups = asyncio.run(evaluate.evaluate(Numbered(), tokenizer, held_out, scores, how, 2, 0, 60.0, print))
    assert results["eval/pass@1"] == 1 / 4 and results["eval/pass@2"] == 1 / 2 and results["eval/greedy"] == 0
    assert [len(group.samples) for group in groups] == [1, 0]
