"""What runs with nothing to fetch: a tokenizer without loss, examples without leaks, a warm start made once and whole."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanorl import tiny
from nanorl.tasks import part, worked
from nanorl.tiny import CHARACTERS, END, PAD, WarmStart, examples, warm_started

WORDS = tiny.tokenizer()
SHORT = WarmStart(digits=2, steps=2, rows=4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ---- the tokenizer and the model


@given(st.text(CHARACTERS))
def test_every_text_of_its_characters_comes_back_one_token_a_character(text):
    ids = WORDS(text).input_ids
    assert len(ids) == len(text) and set(ids).isdisjoint(WORDS.all_special_ids)
    assert WORDS.decode(ids) == text
    assert WORDS.decode([*ids, WORDS.eos_token_id, WORDS.pad_token_id], skip_special_tokens=True) == text


def test_the_tokenizer_is_the_same_after_it_was_saved(tmp_path):
    WORDS.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = f"{CHARACTERS}{END}12"
    assert again(text).input_ids == WORDS(text).input_ids and again.decode(again(text).input_ids) == text
    assert (again.pad_token, again.eos_token, again.chat_template) == (PAD, END, None)


def test_model_and_tokenizer_agree():
    net = tiny.model(0)
    assert net.config.vocab_size == len(WORDS) == 2 + len(CHARACTERS)
    assert (net.config.pad_token_id, net.config.eos_token_id) == (WORDS.pad_token_id, WORDS.eos_token_id)
    assert net.get_output_embeddings().weight is net.get_input_embeddings().weight
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_the_seed_alone_decides_fresh_weights():
    state = torch.get_rng_state()
    torch.manual_seed(5)
    first = tiny.model(3)
    torch.manual_seed(6)
    assert equal(first, tiny.model(3)) and not equal(first, tiny.model(4))
    torch.set_rng_state(state)
    tiny.model(3)
    assert torch.equal(state, torch.get_rng_state())  # and nobody else's random numbers move


# ---- examples


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 50))
def test_labels_cover_the_answer_and_its_end_and_nothing_else(digits, seed, step):
    """Each row is an addition of the warm start's own part and a right answer, at once or worked; then padding."""
    ids, labels = examples(step, WarmStart(digits=digits, seed=seed, rows=6))
    assert ids.shape == labels.shape and len(ids) == 6
    for row, label in zip(ids.tolist(), labels.tolist()):
        told = WORDS.decode(row, skip_special_tokens=False)
        prompt, answer, padding = re.fullmatch(rf"(\d+\+\d+=)([^<]+{END})((?:{PAD})*)", told).groups()
        a, b = map(int, prompt[:-1].split("+"))
        assert len(str(a)) == len(str(b)) == digits and part(a, b) == "warm start"
        assert answer in (f"{a + b}{END}", f"{worked(a, b)}{END}")
        n, m = len(prompt), len(answer) - len(END) + 1
        assert label == [-100] * n + row[n : n + m] + [-100] * (len(row) - n - m)
        assert len(row) - n - m == len(padding) // len(PAD)
    assert not all(row[-1] == 0 for row in ids.tolist())  # as wide as the longest and no wider


def test_working_is_shown_as_often_as_asked_for():
    for share in (0.0, 0.5, 1.0):
        ids, _ = examples(0, WarmStart(working=share, rows=400))
        shown = ids.eq(WORDS.convert_tokens_to_ids("(")).any(1).float().mean().item()
        assert shown == share if share in (0.0, 1.0) else abs(shown - share) < 0.1


def test_step_and_seed_alone_decide_the_examples():
    first = examples(3, SHORT)
    assert all(torch.equal(a, b) for a, b in zip(first, examples(3, SHORT)))
    for other in (examples(4, SHORT), examples(3, WarmStart(digits=2, rows=4, seed=1))):
        assert other[0].shape != first[0].shape or not torch.equal(other[0], first[0])


# ---- the warm start


def test_the_warm_start_is_the_same_bitwise_whatever_the_global_generator_holds():
    torch.manual_seed(1)
    first = tiny.train(SHORT)
    torch.manual_seed(2)
    again = tiny.train(SHORT)
    assert equal(first, again) and not first.training
    assert not equal(first, tiny.model(SHORT.seed))
    assert not equal(first, tiny.train(WarmStart(digits=2, steps=2, rows=4, seed=1)))


def test_every_step_of_the_warm_start_is_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(tiny, "text_progress", lambda what, done, total, started: shown.append((what, done, total)))
    tiny.train(SHORT)
    assert shown == [("warm start", 1, 2), ("warm start", 2, 2)]


def test_the_warm_start_learns():
    """After 20 steps it writes answers better than chance, 17 tokens alike, could."""
    ids, labels = examples(99, WarmStart(digits=1, rows=64))
    loss = tiny.train(WarmStart(digits=1, steps=20, rows=16))(input_ids=ids, labels=labels).loss.item()
    assert loss < 2.0 < torch.tensor(17.0).log().item()


def test_a_warm_start_is_made_once_and_then_taken_from_the_cache(cache, monkeypatch, capsys):
    folder = warm_started(SHORT)
    assert folder.parent == cache and [p.name for p in cache.iterdir()] == [folder.name]
    assert equal(AutoModelForCausalLM.from_pretrained(folder), tiny.train(SHORT))
    assert AutoTokenizer.from_pretrained(folder)("1+2=").input_ids == WORDS("1+2=").input_ids
    monkeypatch.setattr(tiny, "train", lambda how: pytest.fail("it trains again"))
    assert warm_started(SHORT) == folder
    assert "cache" in capsys.readouterr().out


@pytest.mark.parametrize("other", [{"digits": 1}, {"seed": 1}, {"steps": 3}, {"rows": 5}, {"lr": 1e-3}, {"working": 0.4}, {"format": 2}])
def test_whatever_the_weights_depend_on_has_a_folder_of_its_own(cache, monkeypatch, other):
    monkeypatch.setattr(tiny, "train", lambda how: tiny.model(how.seed))
    assert warm_started(SHORT) != warm_started(replace(SHORT, **other))


@pytest.mark.parametrize("moment", ["training", "between the two saves", "renaming"])
def test_a_warm_start_that_is_killed_leaves_no_folder_under_its_name(cache, monkeypatch, moment):
    """And the next one begins anew and ends well."""

    class Killed(BaseException):
        pass

    def die(*given, **more):
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "training":
            patch.setattr(tiny, "text_progress", die)
        elif moment == "between the two saves":
            patch.setattr(tiny, "tokenizer", die)
        else:
            patch.setattr(tiny.Path, "rename", die)
        with pytest.raises(Killed):
            warm_started(SHORT)
    assert not list(cache.glob("warm-*"))
    folder = warm_started(SHORT)
    assert equal(AutoModelForCausalLM.from_pretrained(folder), tiny.train(SHORT))
    assert AutoTokenizer.from_pretrained(folder).eos_token == END


def test_a_run_that_comes_second_takes_the_folder_of_the_first(cache, monkeypatch):
    """Both made it at the same time; nothing of the second is left."""
    train = tiny.train

    def meanwhile(how):
        monkeypatch.setattr(tiny, "train", train)
        first.append(warm_started(how))  # the other run is done before this one
        monkeypatch.setattr(tiny, "train", meanwhile)
        return train(how)

    first = []
    monkeypatch.setattr(tiny, "train", meanwhile)
    assert warm_started(SHORT) == first[0]
    assert [p.name for p in cache.iterdir()] == [first[0].name]


def test_a_cache_that_cannot_be_written_says_so(cache, monkeypatch):
    """Whatever the reason why the folder cannot get its name, a folder that is not there is never returned."""

    def denied(*given):
        raise PermissionError("denied")

    monkeypatch.setattr(tiny.Path, "rename", denied)
    with pytest.raises(OSError):
        warm_started(SHORT)
