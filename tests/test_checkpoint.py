"""A run that was stopped goes on as if it had not been: checkpoint.py, theorem by theorem."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nanorl import checkpoint
from nanorl.checkpoint import MOMENTS, STATE, WEIGHTS, Part, best, broken, latest, need, prune, restore, save
from nanorl.config import Refused

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
CHARACTERS = "0123456789+-*/= ().\n"
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 20}  # fmt: skip


def tiny(seed=0, tied=True, dtype=torch.float32, **sizes):
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | sizes, tie_word_embeddings=tied)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def tokenizer():
    """One token a character."""
    whole = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="\n"))
    whole.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="\n", pad_token="\n")


def train(pair, steps):
    """An optimizer step for each number, on data that the number decides."""
    model, optimizer = pair
    for step in steps:
        ids = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return pair


def content(pair):
    """All that a step changes, by name: weights and the optimizer's state."""
    model, optimizer = pair
    moments = {(name, key): value for name, parameter in model.named_parameters() if parameter in optimizer.state
               for key, value in optimizer.state[parameter].items()}  # fmt: skip
    return {name: value.clone() for name, value in (model.state_dict() | moments).items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write(run, step, pair=None, score=None, keep=3, state=None):
    return save(run, step, [Part(*(pair or tiny()))], tokenizer(), state or {}, score, keep)


# restore ∘ save = identity


@pytest.mark.parametrize("tied", [True, False])
def test_a_restored_run_is_the_uninterrupted_one_bitwise(tmp_path, tied):
    whole = train(tiny(tied=tied), range(3))
    path = write(tmp_path, 3, whole, state={"next": 3, "lr": 0.1 + 0.2, "baseline": None})
    there = content(whole)
    other = train(tiny(seed=1, tied=tied), range(9, 14))  # weights, moments and step counts of its own
    assert not equal(content(other), there)
    assert restore(path, [Part(*other)]) == {"next": 3, "lr": 0.1 + 0.2, "baseline": None}
    assert equal(content(other), there)
    assert equal(content(train(other, range(3, 7))), content(train(whole, range(3, 7))))


def test_saving_changes_nothing(tmp_path):
    pair = train(tiny(), range(2))
    before = content(pair)
    write(tmp_path, 2, pair)
    assert equal(content(pair), before)


def test_moments_that_were_not_there_are_not_there_after(tmp_path):
    path = write(tmp_path, 0, tiny())  # before the first step AdamW has no state
    other = train(tiny(seed=1), range(2))
    restore(path, [Part(*other)])
    assert not other[1].state


def test_what_was_restored_does_not_live_in_the_file(tmp_path):
    pair, other = train(tiny(), range(2)), tiny(seed=1)
    path = write(tmp_path, 2, pair)
    restore(path, [Part(*other)])
    for name in (WEIGHTS, MOMENTS):
        with (path / name).open("r+b") as file:  # in place: a mapping of the file would change with it
            file.write(bytes((path / name).stat().st_size))
    assert equal(content(other), content(pair))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    path = write(tmp_path, 1, train(tiny(), range(1)))
    saved = checkpoint.load_file(path / WEIGHTS)
    assert ("lm_head.weight" in saved) + ("model.embed_tokens.weight" in saved) == 1
    model, optimizer = tiny(seed=1)
    restore(path, [Part(model, optimizer)])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train((model, optimizer), range(1, 2))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_model_whose_hub_format_has_other_names_is_restored(tmp_path):
    def experts():
        config = Qwen3MoeConfig(**SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
        model = Qwen3MoeForCausalLM(config)
        return model, torch.optim.AdamW(model.parameters())

    pair, other = train(experts(), range(1)), experts()
    restore(write(tmp_path, 1, pair), [Part(*other)])
    assert equal(content(other), content(pair))


def test_the_folder_opens_with_from_pretrained(tmp_path):
    model, optimizer = train(tiny(), range(3))
    model.generation_config.eos_token_id = [19, 3]
    path = write(tmp_path, 3, (model, optimizer))
    opened, ids = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)("12+3=").input_ids
    assert ids == [1, 2, 10, 3, 14]
    assert opened.generation_config.eos_token_id == [19, 3]
    assert torch.equal(opened.eval()(torch.tensor([ids])).logits, model.eval()(torch.tensor([ids])).logits)


def test_nothing_is_pickled(tmp_path):
    path = write(tmp_path, 1, train(tiny(), range(1)))
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    assert [json.loads(file.read_text()) for file in path.glob("*.json")]


# a run with a critic has two parts


def critic(seed=0, width=8):
    """A second network and its optimizer, as a part."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 1))
    return Part(module, torch.optim.AdamW(module.parameters(), lr=0.1), "critic.")


def regress(part, steps):
    """An optimizer step of a critic for each number, on data that the number decides."""
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        (part.module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        part.optimizer.step()
        part.optimizer.zero_grad()
    return part


def test_every_part_comes_back_bitwise_each_from_its_own_files(tmp_path):
    policy, value = train(tiny(), range(2)), regress(critic(), range(3))
    path = save(tmp_path, 2, [Part(*policy), value], tokenizer(), {}, None)
    there = content(policy), content(value[:2])
    assert need(policy[0], value.module) == need(policy[0]) + need(value.module)
    others = train(tiny(seed=1), range(5)), regress(critic(seed=1), range(6))
    restore(path, [Part(*others[0]), others[1]])
    assert equal(content(others[0]), there[0]) and equal(content(others[1][:2]), there[1])
    assert equal(content(regress(others[1], range(3, 6))[:2]), content(regress(value, range(3, 6))[:2]))
    assert AutoModelForCausalLM.from_pretrained(path)  # the critic's files are not in its way


@pytest.mark.parametrize("files, width, wrong", [
    ([WEIGHTS, MOMENTS], 8, f"critic.{WEIGHTS}: missing"), ([MOMENTS], 8, f"critic.{MOMENTS}: missing"),
    ([], 9, f"critic.{WEIGHTS}: 0.weight is torch.float32 (8, 6)"),
])  # fmt: skip
def test_a_checkpoint_without_this_critic_is_refused_in_one_line_and_nothing_has_changed(tmp_path, files, width, wrong):
    path = save(tmp_path, 1, [Part(*train(tiny(), range(1))), regress(critic(), range(1))], tokenizer(), {}, None)
    state = checkpoint.read(path)
    for name in files:  # as a run without a critic would have left it
        (path / f"critic.{name}").unlink()
        del state["files"][f"critic.{name}"]
    (path / STATE).write_text(json.dumps(state))
    policy, value = train(tiny(seed=1), range(2)), regress(critic(1, width), range(2))
    before = content(policy), content(value[:2])
    with pytest.raises(Refused) as refusal:
        restore(path, [Part(*policy), value])
    assert wrong in str(refusal.value) and "\n" not in str(refusal.value)
    assert equal(content(policy), before[0]) and equal(content(value[:2]), before[1])


def test_a_missing_file_of_the_critic_makes_latest_fall_back(tmp_path):
    parts = [Part(*train(tiny(), range(1))), regress(critic(), range(1))]
    one, two = (save(tmp_path, step, parts, tokenizer(), {}, None) for step in (1, 2))
    assert latest(tmp_path) == two
    (two / f"critic.{MOMENTS}").unlink()
    assert latest(tmp_path) == one


# what does not fit is refused, and nothing has changed


@pytest.mark.parametrize(
    "other, file, name",
    [
        ({"vocab_size": 21}, WEIGHTS, "model.embed_tokens.weight"),  # another shape
        ({"num_hidden_layers": 3}, WEIGHTS, "model.layers.2."),  # missing
        ({"num_hidden_layers": 1}, WEIGHTS, "model.layers.1."),  # left over
        ({"tied": False}, WEIGHTS, "lm_head.weight"),  # missing, and not to be made up from the embedding
        ({"dtype": torch.bfloat16}, WEIGHTS, "torch.bfloat16"),  # would be rounded
    ],
)
def test_another_model_is_refused_and_left_alone(tmp_path, other, file, name):
    path = write(tmp_path, 1, train(tiny(), range(1)))
    pair = train(tiny(seed=1, **other), range(2))
    before = content(pair)
    with pytest.raises(Refused) as refusal:
        restore(path, [Part(*pair)])
    message = str(refusal.value)
    assert file in message and name in message and "\n" not in message
    assert equal(content(pair), before)


def test_untied_weights_do_not_go_into_a_tied_model(tmp_path):
    path = write(tmp_path, 1, train(tiny(tied=False), range(1)))
    with pytest.raises(Refused, match="model.safetensors: .* has no place of its own"):
        restore(path, [Part(*tiny(tied=True))])


def test_moments_of_a_parameter_that_is_not_trained_are_refused(tmp_path):
    path = write(tmp_path, 1, train(tiny(), range(1)))
    model, _ = pair = tiny(seed=1)
    before = content(pair)
    with pytest.raises(Refused, match="optimizer.safetensors: model.norm.weight is not trained"):
        others = [p for name, p in model.named_parameters() if name != "model.norm.weight"]
        restore(path, [Part(model, torch.optim.AdamW(others))])
    assert equal(content(pair), before)


# which checkpoint?


def hollow(run, step, score=None, name=None):
    """A checkpoint with no other file than its state."""
    path = run / "checkpoints" / (name or f"step-{step}")
    path.mkdir(parents=True)
    (path / STATE).write_text(json.dumps({"step": step, "score": score, "state": {}, "files": {}}))
    return path


def test_steps_are_numbers(tmp_path):
    assert latest(tmp_path) is None
    for step, name in [(9, "step-9"), (10, "step-10"), (100, "step-000100"), (11, "step-11")]:
        path = hollow(tmp_path, step, name=name)
        assert (latest(tmp_path) == path) == (step != 11)
    hollow(tmp_path, 999, name="step-999.bak")
    hollow(tmp_path, 999, name=".writing-999")
    assert latest(tmp_path).name == "step-000100"


def test_a_missing_or_torn_file_makes_latest_fall_back(tmp_path, capsys):
    previous, newest = write(tmp_path, 1), write(tmp_path, 2)
    files = [file for file in newest.rglob("*") if file.is_file()]
    assert len(files) >= 6
    capsys.readouterr()  # transformers' progress
    for file in files:
        data = file.read_bytes()
        for damage in (file.unlink, lambda: file.write_bytes(data[:-1]), lambda: file.write_bytes(b"")):
            damage()
            assert latest(tmp_path) == previous
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and str(newest) in said and file.name in said
            with pytest.raises(Refused, match=file.name):
                restore(newest, [Part(*tiny())])
            file.write_bytes(data)
            assert latest(tmp_path) == newest
    assert capsys.readouterr().err == ""
    (previous / WEIGHTS).unlink(), (newest / MOMENTS).unlink()
    assert latest(tmp_path) is None and best(tmp_path) is None


def test_every_prefix_of_the_state_is_torn(tmp_path):
    path = write(tmp_path, 1)
    text = (path / STATE).read_text()
    for length in range(len(text)):
        (path / STATE).write_text(text[:length])
        assert broken(path) == "state.json is torn"


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_and_the_best_are_kept_whatever_the_scores(tmp_path, keep):
    for scores in itertools.product([None, math.nan, 0.25, 0.5], repeat=keep + 2):
        run = tmp_path / "-".join(map(str, scores))
        for step, score in enumerate(scores):
            prune(run, hollow(run, step, score), keep)
        real = [(score, -step) for step, score in enumerate(scores) if score is not None and score == score]
        expected = set(range(len(scores))[-keep:]) | ({-max(real)[1]} if real else set())
        assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{step}" for step in expected}
        assert best(run) == (run / "checkpoints" / f"step-{-max(real)[1]}" if real else None)


def test_the_one_just_written_is_kept_even_beside_later_ones(tmp_path):
    paths = [hollow(tmp_path, step) for step in range(3)]
    prune(tmp_path, paths[0], keep=1)
    assert [path.exists() for path in paths] == [True, False, True]


def test_broken_checkpoints_do_not_count_as_kept(tmp_path):
    paths = [hollow(tmp_path, step) for step in range(4)]
    (paths[2] / STATE).unlink()
    prune(tmp_path, paths[3], keep=2)
    assert [path.exists() for path in paths] == [False, True, False, True]


def test_save_prunes(tmp_path):
    pair = tiny()
    for step, score in [(1, 0.9), (2, None), (3, 0.5), (10, 0.1)]:
        path = write(tmp_path, step, pair, score, keep=1)
    assert latest(tmp_path) == path
    assert best(tmp_path).name == "step-1"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-1", "step-10"}


# saving


def test_saved_again_at_the_same_step_it_stays_and_its_score_is_renewed(tmp_path):
    pair = train(tiny(), range(1))
    path = write(tmp_path, 1, pair, state={"a": 1})
    inode = (path / WEIGHTS).stat().st_ino
    for score, expected in [(None, None), (0.5, 0.5), (None, 0.5), (0.6, 0.6)]:
        assert write(tmp_path, 1, pair, score, state={"a": score}) == path
        assert checkpoint.read(path)["score"] == expected
        assert restore(path, [Part(*tiny(seed=1))]) == {"a": score}
    assert (path / WEIGHTS).stat().st_ino == inode  # at no moment was there none
    assert sorted(checkpoint.read(path)["files"]) == sorted(f.name for f in path.iterdir() if f.name != STATE)


def test_a_broken_checkpoint_of_the_same_step_is_written_anew(tmp_path):
    pair = train(tiny(), range(1))
    path = write(tmp_path, 1, pair)
    (path / WEIGHTS).write_bytes(b"")
    other = tiny(seed=1)
    restore(write(tmp_path, 1, pair), [Part(*other)])
    assert equal(content(other), content(pair))


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    pair = train(tiny(), range(1))
    path = write(tmp_path, 1, pair)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=need(pair[0]) - 1))
    with pytest.raises(Refused, match="free; make room") as refusal:
        write(tmp_path, 2, pair)
    assert "\n" not in str(refusal.value) and [path] == list((tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=need(pair[0])))
    assert write(tmp_path, 2, pair).exists()


@pytest.mark.parametrize("tied", [True, False])
def test_need_is_what_a_checkpoint_takes(tmp_path, tied):
    pair = train(tiny(tied=tied, hidden_size=64), range(1))
    path = write(tmp_path, 1, pair)
    taken = (path / WEIGHTS).stat().st_size + (path / MOMENTS).stat().st_size
    assert need(pair[0]) <= taken <= 1.05 * need(pair[0])


def test_all_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events, flush, rename = [], checkpoint.flush, os.rename
    monkeypatch.setattr(checkpoint, "flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("renamed"), rename(a, b)))
    path = write(tmp_path, 7)
    at = events.index("renamed")
    assert set(events[:at]) == {file.name for file in path.iterdir()} | {".writing-7"}
    assert events[at + 1 :] == ["checkpoints"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("again", [False, True])
def test_killed_before_any_operation_on_the_disk_the_run_can_go_on(tmp_path, monkeypatch, again):
    """The k-th flush, rename or deletion does not happen, nor anything after it, for each k until a save ends."""
    one, two = train(tiny(), range(1)), train(tiny(seed=1), range(2))
    modules = {"flush": checkpoint, "rename": os, "replace": os, "rmtree": shutil, "unlink": os}
    for k in itertools.count():
        run, left = tmp_path / str(k), itertools.count(k, -1)
        write(run, 1, one, 0.5)
        if again:
            write(run, 2, two)
        with monkeypatch.context() as patch:
            for name, module in modules.items():

                def operation(*args, real=getattr(module, name), **kwargs):
                    if next(left) <= 0:
                        raise Killed
                    return real(*args, **kwargs)

                patch.setattr(module, name, operation)
            try:
                write(run, 2, two, 0.25, keep=1)
                finished = True
            except Killed:
                finished = False
        path, other = latest(run), tiny(seed=2)
        restore(path, [Part(*other)])
        assert equal(content(other), content({"step-1": one, "step-2": two}[path.name]))
        assert path.name == "step-2" or not again
        assert best(run).name == "step-1"
        assert write(run, 3, two).exists() and not list((run / "checkpoints").glob(".writing-*"))
        if finished:
            break
    assert k >= (3 if again else 8)


VICTIM = '''
import os, random, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Part, latest, restore, save, tiny, tokenizer, train
from nanorl.checkpoint import read

def fill(model, optimizer, step):
    with torch.no_grad():
        for parameter in model.parameters():
            for tensor in (parameter, *optimizer.state[parameter].values()):
                tensor.fill_(step)

run, (model, optimizer), words, torn, last = Path(sys.argv[1]), train(tiny(), range(1)), tokenizer(), 0, 0
begin = time.perf_counter()
save(run, 0, [Part(model, optimizer)], words, {}, 1.0)  # the best, to be kept
takes = time.perf_counter() - begin
chance = random.Random(0)
for kill in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        for step in range(last + 1, 10**9):
            fill(model, optimizer, step)
            save(run, step, [Part(model, optimizer)], words, {"of": step}, None)
    time.sleep(takes * chance.uniform(0.5, 4))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    torn += any((run / "checkpoints").glob(".writing-*"))
    path = latest(run)
    state, step = restore(path, [Part(model, optimizer)]), read(path)["step"]
    assert step >= last and (step == 0 or state == {"of": step})
    assert step == 0 or all((t == step).all() for p in model.parameters() for t in (p, *optimizer.state[p].values()))
    last = step
print(torn, last)
'''


def test_kill_9_at_any_moment_leaves_one_whole_moment_of_the_run(tmp_path):
    """Every number of step N's checkpoint is N, so that a mixture of two steps would show."""
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", VICTIM, tmp_path, here, "12"], cwd=here.parent, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    torn, last = map(int, done.stdout.split())
    assert torn > 0 and last > 0  # it was killed while writing, and it got on
    assert best(tmp_path).name == "step-0"
