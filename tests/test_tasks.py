"""What is asked: disjoint parts, an order that needs no state, files that are read or refused by line, exact prompts."""

import asyncio
import itertools
import json
import re
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nanorl import reward, tasks, tiny
from nanorl.config import Config, Refused, resolved
from nanorl.faults import Scoring
from nanorl.files import read
from nanorl.monitor import collecting
from nanorl.reward import REWARDS, named
from nanorl.tasks import Problem, check_lengths, make_prompt, part, render, worked

SEEDS = range(3)


def paid(task, completion, problem, **row):
    """What the first reward of a task gives."""
    told = named(task.rewards[0])("", completion, (), (), problem.answer, **problem.row, **row)
    return asyncio.run(told) if asyncio.iscoroutine(told) else told


def numbers_of(problem):
    return tuple(map(int, problem.prompt.removesuffix("=").split("+")))


def arithmetic(digits=3, eval_problems=20, **flags):
    return tasks.load(resolved(Config(digits=digits, eval_problems=eval_problems, **flags)))


def write(folder, rows, name="rows.jsonl"):
    """A file of these rows, a line each; text is written as it stands."""
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def from_rows(folder, rows, **flags):
    return tasks.load(resolved(Config(**{"task": "jsonl", "data": write(folder, rows), "model": "any", **flags})))


def questions(n):
    return [{"prompt": f"question {i}?", "answer": str(i)} for i in range(n)]


# ---- arithmetic


def test_the_three_parts_are_disjoint_and_every_addition_of_two_digits_is_in_one():
    """With the shares that `part` names, within what chance does to 8,100 pairs."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    shares = Counter(part(a, b) for a, b in pairs)
    assert set(shares) == {"held out", "warm start", "training"}
    for name, share in (("held out", 1 / 16), ("warm start", 7 / 16), ("training", 8 / 16)):
        assert abs(shares[name] / len(pairs) - share) < 0.015
    assert all(part(a, b) == part(a, b) for a, b in pairs)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_held_out_problems_are_asked_neither_in_training_nor_in_the_warm_start(digits):
    """The same ones for every seed; every number has so many digits."""
    held_out = {numbers_of(p) for p in arithmetic(digits, eval_problems=200 if digits > 1 else 20).held_out}
    assert held_out and all(len(str(n)) == digits for pair in held_out for n in pair)
    trained, warm = set(), set()
    for seed in SEEDS:
        task = arithmetic(digits, seed=seed)
        assert {numbers_of(p) for p in task.held_out} <= held_out
        trained |= {numbers_of(task.train(number)) for number in range(1000)}
        for step in range(8):
            ids, labels = tiny.examples(step, tiny.WarmStart(digits=digits, seed=seed))
            asked = ["".join(tiny.tokenizer().convert_ids_to_tokens(row[label.eq(-100)])) for row, label in zip(ids, labels)]
            warm |= {tuple(map(int, re.match(r"(\d+)\+(\d+)=", text).groups())) for text in asked}
    assert all(len(str(n)) == digits for pair in trained | warm for n in pair)
    assert trained.isdisjoint(held_out) and warm.isdisjoint(held_out) and trained.isdisjoint(warm)


def test_as_many_problems_are_held_out_as_asked_for_each_once():
    task = arithmetic(3, eval_problems=512)
    assert len(task.held_out) == len({p.prompt for p in task.held_out}) == 512
    few = [pair for pair in itertools.product(range(1, 10), repeat=2) if part(*pair) == "held out"]
    assert sorted(numbers_of(p) for p in arithmetic(1, eval_problems=20).held_out) == few  # there are no more


def test_the_number_of_a_prompt_decides_its_problem_and_so_does_the_seed():
    one, again, other = arithmetic(seed=0), arithmetic(seed=0), arithmetic(seed=1)
    forward = [one.train(i) for i in range(200)]
    assert [again.train(i) for i in reversed(range(200))] == forward[::-1]  # in any order, and at once after a resume
    assert sum(a == b for a, b in zip(forward, map(other.train, range(200)))) < 3
    assert len({p.prompt for p in forward}) > 195


def test_every_addition_of_the_training_part_comes_as_often_as_any_other():
    """By Pearson's statistic, whose mean is their number less one, and whose variance twice that."""
    task, pairs = arithmetic(1), [p for p in itertools.product(range(1, 10), repeat=2) if part(*p) == "training"]
    drawn = Counter(numbers_of(task.train(i)) for i in range(200 * len(pairs)))
    assert set(drawn) == set(pairs)
    assert sum((n - 200) ** 2 / 200 for n in drawn.values()) < len(pairs) + 5 * (2 * len(pairs)) ** 0.5


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_working_is_the_addition_column_by_column_and_then_the_sum(a, b):
    """Read back: the digits give the numbers, each column's sum is its digits and the carry, the last is the result."""
    columns, result = re.fullmatch(r"\(([\d,]+)\)(\d+)", worked(a, b)).groups()
    carry, xs, ys, zs = 0, "", "", ""
    for column in columns.split(","):
        x, y, total = int(column[0]), int(column[1]), int(column[2:])
        assert len(column) == 4 and total == x + y + carry
        xs, ys, zs, carry = f"{x}{xs}", f"{y}{ys}", f"{total % 10}{zs}", total // 10
    assert (int(xs), int(ys)) == (a, b) and int(f"{carry}{zs}") == int(result) == a + b
    assert len(columns.split(",")) == max(len(str(a)), len(str(b))) and result == str(a + b)


@pytest.mark.parametrize("digits", [1, 3, 12])
def test_the_answer_is_right_with_and_without_working_and_the_length_limit_has_room_for_it(digits):
    task = arithmetic(digits)
    for problem in map(task.train, range(50)):
        a, b = numbers_of(problem)
        assert problem.answer == str(a + b)
        for completion, worth in ((worked(a, b), 1.0), (str(a + b), 1.0), (str(a + b + 1), 0.0), (worked(a, b + 1), 0.0)):
            with collecting() as notes:
                assert paid(task, completion, problem) == worth
            assert notes == [("worked", float("(" in completion))]
        assert len(tiny.tokenizer()(worked(a, b)).input_ids) + 1 <= resolved(Config(digits=digits)).max_new_tokens


def test_loading_a_task_logs_nothing():
    """What it logs would count in the first step's mean, and after a resume in that of the step that follows."""
    with collecting() as notes:
        arithmetic()
    assert notes == []


def test_too_many_digits_are_refused():
    for digits in (0, 13):
        with pytest.raises(Refused, match=f"^--digits {digits}: 1 to 12"):
            arithmetic(digits)


# ---- files


def test_every_epoch_is_a_permutation_of_the_training_rows_and_each_is_another(tmp_path):
    task = from_rows(tmp_path, questions(20), eval_problems=5)
    assert len(task.held_out) == 2  # a tenth
    epochs = [[task.train(18 * e + i).answer for i in range(18)] for e in range(4)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 18 for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert {p.answer for p in task.held_out}.isdisjoint(epochs[0]) and len({*epochs[0], *(p.answer for p in task.held_out)}) == 20
    again = from_rows(tmp_path, questions(20), eval_problems=5)
    assert [again.train(i).answer for i in reversed(range(72))] == sum(epochs, [])[::-1]
    other = from_rows(tmp_path, questions(20), eval_problems=5, seed=1)
    assert [other.train(i).answer for i in range(18)] != epochs[0]
    assert other.held_out == task.held_out  # every seed is judged by the same rows


@pytest.mark.parametrize(("rows", "asked", "held_out"), [(2, 512, 1), (10, 512, 1), (100, 512, 10), (100, 3, 3)])
def test_a_tenth_is_held_out_at_most_as_many_as_asked_for(tmp_path, rows, asked, held_out):
    assert len(from_rows(tmp_path, questions(rows), eval_problems=asked).held_out) == held_out


def test_rows_of_a_second_file_are_held_out_and_then_every_row_of_the_first_is_trained_on(tmp_path):
    evaluation = write(tmp_path, [{"prompt": f"other {i}", "answer": "x"} for i in range(9)], "eval.jsonl")
    task = from_rows(tmp_path, questions(20), eval_data=evaluation, eval_problems=4)
    assert [p.prompt for p in task.held_out] == [f"other {i}" for i in range(4)]
    assert {task.train(i).answer for i in range(20)} == {str(i) for i in range(20)}


MALFORMED = {
    "{not json": "not JSON", '["a list"]': 'needs an object with "prompt" and "answer"',
    '{"prompt": "q"}': 'needs an object with "prompt" and "answer"', '{"answer": "a"}': 'needs an object',
    '{"prompt": "", "answer": "a"}': "neither text nor a list", '{"prompt": 3, "answer": "a"}': "neither text nor a list",
    '{"prompt": [], "answer": "a"}': "neither text nor a list", '{"prompt": ["hi"], "answer": "a"}': "neither text nor a list",
    '{"prompt": [{"role": "user"}], "answer": "a"}': "neither text nor a list",
    '{"prompt": [{"role": "user", "content": 1}], "answer": "a"}': "neither text nor a list",
    '{"prompt": "q", "answer": null}': '"answer" is neither', '{"prompt": "q", "answer": true}': '"answer" is neither',
    '{"prompt": "q", "answer": [1]}': '"answer" is neither',
}  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_refused_by_file_and_number(tmp_path, line):
    """Blank lines are skipped, and still counted."""
    path = write(tmp_path, [questions(1)[0], "", "  ", line])
    with pytest.raises(Refused) as refused:
        read(path, "jsonl")
    assert str(refused.value).startswith(f"{path}, line 4: ") and MALFORMED[line] in str(refused.value)
    assert "\n" not in str(refused.value)


@given(text=st.text(min_size=1), more=st.dictionaries(st.sampled_from(["level", "é"]), st.text() | st.lists(st.integers())))
@example(text="a\u2028b\u2029c\x85d\x0be", more={})
def test_what_was_written_is_read(tmp_path_factory, text, more):
    """Escaped or as it is: what Python also calls the end of a line may stand in a JSON text. Numbers may be answers."""
    row = {"prompt": text, "answer": text, **more}
    lines = [json.dumps(row), json.dumps(row, ensure_ascii=False), json.dumps({**row, "answer": 7})]
    problem = Problem(text, text, more)
    assert read(write(tmp_path_factory.getbasetemp(), lines), "jsonl") == [problem, problem, Problem(text, "7", more)]


def test_a_missing_or_binary_file_and_a_folder_are_refused_by_flag(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        with pytest.raises(Refused, match=f"^--data {path}: cannot be read"):
            read(str(path), "jsonl")


def test_rows_whose_answer_the_verifier_cannot_read_are_dropped_and_counted(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "many"}, {"prompt": "c", "answer": "so 2\n#### 2"},
            {"prompt": "d", "answer": "3 or 4"}, {"prompt": "e", "answer": 5}]  # fmt: skip
    task = from_rows(tmp_path, rows, reward=("number",))
    assert {p.prompt for p in task.problems} == {"a", "c", "e"} and "left out: 2 whose answer" in task.says
    assert {p.prompt for p in from_rows(tmp_path, rows).problems} == set("abcde")  # exactly, any text can be judged
    with pytest.raises(Refused, match=r"^--data .*: 0 problems .*4 whose answer 'number' cannot read"):
        from_rows(tmp_path, [{"prompt": "a", "answer": "none"}] * 4, reward=("number",))
    with pytest.raises(Refused, match="0 problems to train on and 1 to hold out"):
        from_rows(tmp_path, questions(1))


@pytest.mark.parametrize("pays", [1.0, 0.0])
def test_a_reward_that_awaits_is_asked_what_the_right_answer_is_worth_like_any_other(monkeypatch, pays):
    async def patient(*args, **row):
        await asyncio.sleep(0)
        return pays * REWARDS["exact"](*args, **row)

    monkeypatch.setitem(REWARDS, "patient", patient)
    if pays:
        assert paid(arithmetic(reward=("patient",)), "12", Problem("", "12")) == 1.0
    else:
        with pytest.raises(Refused, match="^--reward (exact|patient): gives 0.0 to the right answer"):
            arithmetic(reward=("patient",))


def test_the_fields_of_a_row_reach_the_reward_by_name_and_none_shadows_what_it_gets_anyway(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": f"{i}", "level": i, "completion": "mine", "prompt_ids": [1], "after": "=>"} for i in range(4)]
    task = from_rows(tmp_path, rows)
    for i in range(3):
        problem = task.train(i)
        assert problem.row == {"level": int(problem.answer), "after": "=>"}
        assert paid(task, f"so => {problem.answer}", problem) == 1.0
        assert paid(task, f"so: {problem.answer}", problem) == 0.0


def test_gsm8k_asks_its_question_and_judges_the_number_after_its_mark(tmp_path):
    rows = [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"} for i in range(10)]
    task = from_rows(tmp_path, rows, task="gsm8k")
    problem = task.train(0)
    assert problem.prompt.startswith("What is") and "####" in task.suffix
    gold = problem.answer.rsplit("#### ")[-1]
    assert paid(task, f"It is\n#### {gold}", problem) == 1.0
    assert paid(task, f"It is\n#### {int(gold) + 1}", problem) == 0.0
    assert paid(task, task.answered(problem), problem) == 1.0
    assert from_rows(tmp_path, rows, task="gsm8k", prompt_suffix="").suffix == ""
    with pytest.raises(Refused, match='line 1: needs an object with "question"'):
        from_rows(tmp_path, questions(3), task="gsm8k")


def test_a_verifier_that_would_pay_nothing_for_the_right_answer_is_refused(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": "right", "after": "=>"} for i in range(3)]
    assert from_rows(tmp_path, rows).answered(Problem("q", "right", {"after": "=>"})) == "=>right"
    with pytest.raises(Refused, match="^--reward (exact|patient): gives 0.0 to the right answer"):
        from_rows(tmp_path, [row | {"answer": "a => b"} for row in rows])


# ---- rendering


CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]
TEMPLATE = ("<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip


def tokenizer(template=None):
    """One token a character; it puts <s> before every text, and the template writes an <s> too."""
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<s>", "</s>", *CHARACTERS])}, unk_token="\n"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template)


def read_back(ids):
    """The text of these ids, special tokens included."""
    return "".join(tokenizer().convert_ids_to_tokens(ids))


def test_without_a_template_a_prompt_is_its_text_and_suffix_with_one_bos():
    text, ids = render(Problem("1+1=", "2"), tokenizer(), None, " Think.")
    assert text == "1+1= Think." and read_back(ids) == "<s>1+1= Think."


def test_with_a_template_there_is_one_bos_too_although_template_and_tokenizer_both_write_it():
    words = tokenizer(TEMPLATE)
    assert words("<s>a").input_ids.count(0) == 2  # the trap
    text, ids = render(Problem("1+1=", "2"), words, None, " Think.")
    assert text == read_back(ids) == "<s>[user]1+1= Think.</s>[assistant]"
    assert ids.count(0) == 1


def test_chat_messages_keep_their_turns_and_the_last_gets_the_suffix():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "1+1="}]
    problem = Problem(messages, "2")
    text, ids = render(problem, tokenizer(TEMPLATE), None, "!")
    assert text == read_back(ids) == "<s>[user]hi</s>[assistant]ho</s>[user]1+1=!</s>[assistant]"
    assert messages[-1]["content"] == "1+1="  # the problem is as it was
    assert render(problem, tokenizer(TEMPLATE), None, "!") == (text, ids)


@pytest.mark.parametrize("own", [[], [{"role": "system", "content": "mine"}]])
def test_the_system_prompt_comes_first_and_replaces_the_rows_own(own):
    problem = Problem([*own, {"role": "user", "content": "q"}], "a")
    text, _ = render(problem, tokenizer(TEMPLATE), "Be brief.", "")
    assert text == "<s>[system]Be brief.</s>[user]q</s>[assistant]"
    assert render(Problem("q", "a"), tokenizer(TEMPLATE), "Be brief.", "")[0] == text


def test_chat_needs_a_template():
    for problem, system in ((Problem([{"role": "user", "content": "q"}], "a"), None), (Problem("q", "a"), "Be brief.")):
        with pytest.raises(Refused, match="chat template"):
            render(problem, tokenizer(), system, "")


def test_a_prompt_carries_number_answer_and_row(tmp_path):
    task = from_rows(tmp_path, [row | {"answer": "a", "level": 3} for row in questions(3)], prompt_suffix="!", system_prompt="S")
    cfg = Config(task="jsonl", system_prompt="S")
    prompt = make_prompt(task.train(41), 41, tokenizer(TEMPLATE), cfg, task)
    assert (prompt.number, prompt.answer, prompt.row) == (41, "a", {"level": 3})
    assert prompt.text == read_back(prompt.ids) == f"<s>[system]S</s>[user]{task.train(41).prompt}!</s>[assistant]"


def test_arithmetic_is_rendered_as_the_warm_start_shows_it():
    task = arithmetic()
    prompt = make_prompt(task.train(5), 5, tiny.tokenizer(), Config(), task)
    assert prompt.text == task.train(5).prompt == "".join(tiny.tokenizer().convert_ids_to_tokens(prompt.ids))


# ---- room


@pytest.mark.parametrize("long", ["trained on", "held out"])
@pytest.mark.parametrize("around", ["nothing", "suffix", "system prompt"])
def test_the_longest_prompt_just_fits_or_is_refused_wherever_it_stands(tmp_path, long, around):
    """Room for prompt and answer together, with all that is put around the prompt."""
    rows = questions(30)
    place = 1 if long == "held out" else 0
    chosen = [p.answer for p in from_rows(tmp_path, rows).held_out]
    row = rows[int(chosen[place])] if long == "held out" else next(r for r in rows if r["answer"] not in chosen)
    row["prompt"] = row["prompt"] + "!" * 280
    more = {"nothing": {}, "suffix": {"prompt_suffix": "?" * 400}, "system prompt": {"system_prompt": "S" * 400}}[around]
    words = tokenizer(TEMPLATE)
    task = from_rows(tmp_path, rows, **more)
    cfg = Config(task="jsonl", max_new_tokens=16, **more)
    longest = max(len(make_prompt(p, 0, words, cfg, task).ids) for p in task.problems)
    assert longest > 280 + (around != "nothing") * 400
    check_lengths(task, words, cfg, room=longest + 16)
    with pytest.raises(Refused, match=f"^--max-new-tokens 16: the model has room for {longest + 15} tokens .* takes {longest}; "):
        check_lengths(task, words, cfg, room=longest + 15)


def test_the_tiny_model_has_room_for_twelve_digits_and_not_for_any_limit():
    words, room = tiny.tokenizer(), 256
    check_lengths(arithmetic(12), words, resolved(Config(digits=12)), room)
    with pytest.raises(Refused, match="^--max-new-tokens 250"):
        check_lengths(arithmetic(), words, Config(max_new_tokens=250), room)


def test_a_question_that_is_held_out_is_not_trained_on_though_it_stands_in_the_file_twice(tmp_path):
    task = from_rows(tmp_path, questions(30) + questions(30))
    held_out = {problem.prompt for problem in task.held_out}
    assert held_out and not held_out & {task.train(number).prompt for number in range(200)}


# ---- countdown, mixtures, and the check at the start


def load(**flags):
    return tasks.load(resolved(Config(**{"model": "any", "eval_problems": 20, **flags})))


def test_countdown_is_solved_as_asked_and_its_held_out_problems_are_no_training_problems():
    task = load(task="countdown")
    trained = [task.train(n) for n in range(300)]
    for problem in (*trained[:50], *task.held_out):
        numbers = problem.answer.partition("numbers=")[2]
        assert paid(task, task.answered(problem), problem) == 1.0 and numbers.replace(",", ", ") in problem.prompt
    assert not {p.answer for p in trained} & {p.answer for p in task.held_out} and len(task.held_out) == 20
    assert task.train(7) == load(task="countdown", eval_problems=3).train(7) != load(task="countdown", seed=1).train(7)


def test_a_mixture_draws_each_prompts_task_by_its_number_and_keeps_what_each_asks_and_pays():
    alone = {name: load(task=name) for name in ("arithmetic", "countdown")}
    both = load(task="arithmetic=3,countdown")
    problems = [both.train(n) for n in range(400)]
    counted = Counter(p.task for p in problems)
    assert abs(counted["countdown"] / 400 - 0.25) < 4 * (0.25 * 0.75 / 400) ** 0.5
    for n, problem in enumerate(problems[:100]):
        own = alone[problem.task].train(n)
        assert problem.prompt == own.prompt + alone[problem.task].suffix and problem.rewards == alone[problem.task].rewards
        assert problem.answer == own.answer and named(problem.rewards[0])("", both.answered(problem), (), (), problem.answer, **problem.row) == 1.0
    assert Counter(p.task for p in both.held_out) == {"arithmetic": 15, "countdown": 5} and both.suffix == ""
    assert [load(task="arithmetic=3,countdown", eval_problems=9).train(n) for n in range(50)] == problems[:50]
    other = load(task="arithmetic=3,countdown", seed=1)
    assert [other.train(n).task for n in range(50)] != [p.task for p in problems[:50]]


@pytest.mark.parametrize("rewards", [("number",), ("number", "format=0.2"), ("format", "math", "length=0.1"), ("exact",), ("count",),
                                     ("geometry", "repetition")])  # fmt: skip
def test_an_answer_written_as_the_prompt_asks_earns_all_of_it(tmp_path, rewards):
    task = from_rows(tmp_path, [{"prompt": f"q{i}", "answer": f"{i}"} for i in range(4)], reward=rewards)
    problem, told = task.train(0), task.answered(task.train(0))
    assert ("<think>" in task.suffix) == ("<think>" in told) == any("format" in spec for spec in rewards)
    for spec in rewards:
        worth = named(spec)("", told, (), (), problem.answer)
        assert worth == (0.0 if reward.label(spec) in ("length", "repetition") else 1.0)


def test_choices_and_files_of_golds_are_written_as_their_verifier_reads_them(tmp_path):
    assert from_rows(tmp_path, [{"prompt": f"q{i}", "answer": "b"} for i in range(4)], reward=("choice",))
    rows = [{"prompt": f"q{i}", "answer": r"2\sqrt{5}" if i else "six of the boys"} for i in range(4)]
    assert "left out: 1 whose answer 'math' cannot read" in from_rows(tmp_path, rows, reward=("math",)).says


@pytest.mark.parametrize(("body", "rewards", "says"), [
    ("return 1.0", ("{}:own",), "the right answer, .* gets 1 and an empty one 1; choose"),
    ("return float(not completion)", ("exact=0.5", "{}:own"), "gets 0.5 and an empty one 1"),
    ("return float(bool(completion))", ("{}:own",), None), ("return float(not completion)", ("exact=2", "{}:own"), None),
])  # fmt: skip
def test_rewards_that_pay_an_empty_answer_as_much_are_refused(tmp_path, body, rewards, says):
    (tmp_path / "mine.py").write_text(f"async def own(prompt, completion, prompt_ids, completion_ids, answer, **row):\n    {body}\n")
    rewards = tuple(spec.format(tmp_path / "mine.py") for spec in rewards)
    if says is None:
        assert from_rows(tmp_path, questions(4), reward=rewards).rewards == rewards
    else:
        with pytest.raises(Refused, match=f"^--reward .*{says}"):
            from_rows(tmp_path, questions(4), reward=rewards)


def test_a_verifier_that_pays_an_empty_answer_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(REWARDS, "generous", lambda *args, **row: 1.0)
    with pytest.raises(Refused, match="^--reward generous: gives 1.0 to an empty answer"):
        arithmetic(reward=("generous",))


@pytest.mark.parametrize("body, why", [("while True: pass", "timeout.*--reward-seconds 1"), ("raise OSError('no judge')", "no judge"),
                                       ("pass", "none"), ("return 'high'", "nan")])  # fmt: skip
def test_a_reward_of_ones_own_that_gives_nothing_is_refused_before_any_work(tmp_path, body, why):
    """It hangs, raises, tells None or no number: one line, within the limits that the run would have."""
    (tmp_path / "mine.py").write_text(f"def own(prompt, completion, prompt_ids, completion_ids, answer, **row):\n    {body}\n")
    with pytest.raises(Refused, match=rf"^--reward .*mine.py:own: of the answer .*{why}"):
        from_rows(tmp_path, questions(20), reward=(f"{tmp_path / 'mine.py'}:own",), scoring=Scoring(reward_seconds=1.0))
