"""Theorems about verifiers: what one number is called in many ways, what must never be paid, what must be loud."""

import asyncio
import doctest
import functools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import countdown, numeral, reward, verifiers
from nanorl.config import Refused
from nanorl.numeral import MAX_DIGITS, value
from nanorl.reward import exact, gold, label, named, number, score, split
from nanorl.sample import Prompt


def paid(completion, answer):
    return number("", completion, (), (), answer)


# ---- number: one value, many spellings

FRAMES = ["#### {}", "2+2=4, 7 more\n#### {}\nThanks.", "####{}", "#### {} apples.", "#### {}</answer><|im_end|>",
          "#### **{}**", r"\boxed{{{}}}", r"\boxed{{1}}, no: \boxed{{{}}}.", r"\fbox{{{}}}", r"\(\boxed{{x = {}}}\)",
          r"\boxed{{{}\text{{ cm}}^2}}", r"\boxed{{\text{{{}}}}}", r"<answer>\boxed{{{}}}</answer>",
          r"$\boxed{{{}\,\mathrm{{kg}}}}$", "so he needs {} of them.", "Final answer: **{}**",
          "3 boxes, 4 rows.\nAnswer: {}", "which makes {}!", r"\[ x = {} \]"]  # fmt: skip


def spellings(n):
    """Ways to write an integer."""
    sign, comma = "-" * (n < 0), f"{abs(n):,}"
    latex = comma.replace(",", "{,}")
    return [f"{n}", f"{n:,}", f"{n}.00", f"{sign}{latex}", f"{sign}${comma}", rf"{sign}\${abs(n)}.0",
            f"${sign}{comma}$", f"{n}%", rf"{n}\%", f"{sign}00{abs(n)}", f"{n:+}", f"−{abs(n)}" if n < 0 else f"€{n}",
            rf"{sign}\frac{{{2 * abs(n)}}}{{2}}"]  # fmt: skip


@given(n=st.integers(-(10**9), 10**9), frame=st.sampled_from(FRAMES), data=st.data())
def test_every_spelling_of_an_integer_in_every_frame_is_that_integer(n, frame, data):
    completion = frame.format(data.draw(st.sampled_from(spellings(n))))
    assert value(completion) == n
    assert paid(completion, data.draw(st.sampled_from(spellings(n)))) == 1.0
    assert paid(completion, str(n + 1)) == 0.0
    assert paid(completion, str(-n)) == float(n == 0)


@given(p=st.integers(-99, 99), q=st.integers(1, 99), frame=st.sampled_from(FRAMES), data=st.data())
def test_every_spelling_of_a_fraction_is_that_fraction(p, q, frame, data):
    sign, (whole, rest) = "-" * (p < 0), divmod(abs(p), q)
    ways = [f"{p}/{q}", rf"\frac{{{p}}}{{{q}}}", rf"{sign}\dfrac{{{abs(p)}}}{{{q}}}",
            rf"{sign}{whole}\frac{{{rest}}}{{{q}}}",
            f"{sign}{whole} {rest}/{q}"]  # fmt: skip
    if abs(p) < 10 and q < 10:
        ways.append(rf"{sign}\frac{abs(p)}{q}")
    if 100 % q == 0:
        ways.append(str(Fraction(p, q).__float__()))
    completion = frame.format(data.draw(st.sampled_from(ways)))
    assert value(completion) == Fraction(p, q)
    assert paid(completion, f"{p}/{q}") == 1.0
    assert paid(completion, f"{p + 1}/{q}") == 0.0
    assert paid(completion, str(p)) == float(q == 1 or p == 0)  # a fraction is not its numerator


@given(n=st.integers(0, 10**6), d=st.integers(1, 999))
def test_equality_is_of_fractions_and_not_of_floats(n, d):
    assert paid(f"#### 0.{n:06}{d:020}", f"0.{n:06}{d:020}") == 1.0
    assert paid(f"#### 0.{n:06}{d:020}", f"0.{n:06}{d + 1:020}") == 0.0
    assert paid(f"#### {10**30 + n}", str(10**30 + n + d)) == 0.0


@given(n=st.integers(-9999, 9999), tail=st.text(st.characters(exclude_characters="#\\", codec="utf-8"), max_size=60))
def test_text_behind_the_mark_changes_nothing(n, tail):
    assert paid(f"1+1=2\n#### {n}\n{tail}", str(n)) == 1.0
    assert paid(rf"2+40=42, so \boxed{{{n}}} {tail}", str(n)) == 1.0


@pytest.mark.parametrize("tail", [" " + "It follows from the 3 sums above, 12 in all. " * 20, ". There were 7 more.",
                                  "\n" * 999])
def test_length_of_the_text_behind_changes_nothing(tail):
    assert paid("#### 42\n" + tail, "42") == paid("#### 42. " + tail, "42") == paid(r"\boxed{42}" + tail, "42") == 1.0


@pytest.mark.parametrize(("completion", "answer"), [
    (r"So \boxed{7}. \boxed{8}", "8"),  # the last box
    ("#### 7\n" + r"\boxed{8}", "7"),  # a mark goes before a box, a box before bare numbers
    (r"\boxed{7} and 8", "7"), ("#### 7\n#### 8", "8"), ("##### 7\nIt is 8", "8"),
    ("#### Step 2\n" + r"\boxed{7}", "7"),  # headings are no marks
    ("<think>Is it 5?</think>\nIt is 42", "42"), ("That leaves 42, all in all.", "42"),
    ("A wall of 3x14 bricks takes 42", "42"),
    ("There are 42 tons of CO2 at level-5 in x1.", "42"),  # digits of a name are no number
    (r"\(7^{8^{9}}\) ends in \boxed{007}", "7"),
    (r"\boxed{42} and again \boxed{42}", "42"),  # not 4242
    (r"\boxed{45^\circ}", "45"), (r"\boxed{45^{\circ}}", "45"), (r"\boxed{10\,000}", "10000"),
    (r"\boxed{10,\!000}", "10000"), ("60 miles/hour", "60"), ("12km", "12"), ("It has 25 cm^2.", "25"),
    ("5 m²", "5"), ("2 + 2 = **4**", "4"), ("* 42", "42"), ("48/2 = 24", "24"), ("at $5/hour", "5"),
    ("Step 2: 42", "42"), ("1. 42", "42"), ("Answer - 42", "42"), ("答案是42元。", "42"),
    ("#### 42 I think, that's it", "42"), ("#### 42!", "42"), ("#### \n42", "42"), ("x = .5", "1/2"),
    ("takes 2  1/2 hours", "5/2"), ("that is 7 dozen eggs", "7"),
])  # fmt: skip
def test_right_answers_as_models_write_them(completion, answer):
    assert paid(completion, answer) == 1.0


# ---- number: what must never be paid

HEDGES = [r"\boxed{3 or 4}", r"\boxed{3, 4}", r"\boxed{3,4}", r"\boxed{3 \text{ or } 4}", r"\boxed{(3, 4)}",
          r"\boxed{x=3, y=4}", "#### 3 or 4", "#### 3, 4", "#### 3/4 or 3 or 4", "#### 4 or maybe 3",
          "#### 3 apples or four", "<answer>3 or 4</answer>", "3 apples or 4", "It is 4 or so", r"\boxed{3:4}",
          r"\boxed{3-4}", r"\boxed{3}{4} \boxed{3 4}", r"\boxed{\frac{3}{4} 3}"]  # fmt: skip


@pytest.mark.parametrize("hedge", HEDGES)
def test_a_hedge_is_paid_for_no_answer(hedge):
    assert [paid(hedge, answer) for answer in ("3", "4", "3/4", "34", "7", hedge)] == [0.0] * 6


@pytest.mark.parametrize(("completion", "answer"), [
    (r"\boxed{12} ... \boxed{", "12"), (r"\boxed{12} ... \boxed{12", "12"), (r"\boxed{12} ... \boxed", "12"),
    ("12\n####", "12"), (r"\boxed{2}, or rather \boxed{3}", "2"), (r"\boxed{4\sqrt{2}}", "4"),
    (r"\boxed{4\sqrt{2}}", "2"), (r"4\sqrt{2}", "2"), (r"\boxed{3x}", "3"), (r"\boxed{3 x}", "3"),
    (r"\boxed{2\pi}", "2"), ("2π", "2"), ("2 pi", "2"), (r"\boxed{10²}", "10"), (r"\boxed{2½}", "2"), ("5k", "5"),
    ("1e5", "5"), (r"\boxed{42!}", "42"), (r"\boxed{1/20!}", "1/20"), (r"\boxed{\pm 3}", "3"), (r"\pm 3", "3"),
    (r"\boxed{x \ne 3}", "3"), (r"\boxed{x > 3}", "3"), (r"\boxed{3 + x}", "3"), (r"\boxed{f(3)}", "3"),
    (r"\boxed{|3|}", "3"), (r"\boxed{-x = 3}", "3"), ("minus 3", "3"), ("negative 3", "3"), ("= - 3", "3"),
    ("less than 3", "3"), ("not 3", "3"), ("it is 52 - 10", "10"), ("it is 52-10", "10"), ("52 -10", "-10"),
    ("6*7", "7"), ("6 * 7", "7"), ("6 × 7", "7"), ("2^10", "10"), ("2**10", "10"), ("10^{10^{10}}", "10"),
    ("at 3:30", "30"), ("3.1.2", "3.1"), ("1,2345", "1"), ("1,2,3", "3"), ("100 000", "0"), ("12x15", "12"),
    ("1/0", "0"), ("1/0", "1"), ("2 and a half", "2"), (r"\frac{1}{2}3", "3"),
    ("1/2/3", "3"), (r"\frac{1}{-2}", "2"), ("I don't know.", "0"), ("", "0"), (r"It comes \boxed later", "5"),
    (r"\boxed{}", "0"), (r"\boxed{eight}", "8"), ("28%", "0.28"), ("0.333", "1/3"), ("#### -3", "3"),
    ("#### 3", "-3"), (r"\boxed{\frac{2}{7}}", "3/7"), (r"It is \boxed{x = 12", "12"), (r"12 \boxed{", "12"),
    ("52  -  10", "10"), ("12by15", "12"), ("10²", "10"), ("2½", "2"), ("which is 3 x", "3"), ("(7 + 1) -3", "-3"),
])  # fmt: skip
def test_wrong_and_unreadable_answers_earn_nothing(completion, answer):
    assert gold("number", answer)
    assert paid(completion, answer) == 0.0


UNUSABLE = ["", "six", "three of the boys", r"\pm 20", "(0, 1)", r"2+\frac{1}{e}", "2x+y=0", "3 or 4",
            "1,2,3", "42!", "1/20!", "He has 3, then 4", r"\boxed{12", "1/0", "4x", "9" * (MAX_DIGITS + 1)]  # fmt: skip


@pytest.mark.parametrize("answer", UNUSABLE)
def test_an_unusable_gold_is_found_out_and_pays_nobody(answer):
    assert not gold("number", answer)
    for completion in (answer, rf"\boxed{{{answer}}}", f"#### {answer}", "1", "20", r"\boxed{5}", "#### 0"):
        assert paid(completion, answer) == 0.0


@pytest.mark.parametrize(("answer", "n"), [("He had 5, 8 less are 5-8=<<5-8=-3>>-3 #### -3", -3),
                                           ("#### 1,234", 1234), ("$18", 18), (r"so $n=5$, \boxed{-7}", -7),
                                           ("18 dollars", 18), ("The total is 72.", 72)])  # fmt: skip
def test_a_gold_is_read_by_the_same_rules(answer, n):
    assert gold("number", answer)
    assert (paid(f"#### {n}", answer), paid(f"#### {-n}", answer), paid(f"#### {n + 1}", answer)) == (1.0, 0.0, 0.0)


NASTY = st.lists(st.sampled_from([*"0123456789.,/-+$%^{}()*#! x\n", "####", "#### ", r"\boxed{", r"\frac{", r"\text{",
                                  r"\%", " or ", "1,000"]))


@given(NASTY.map("".join))
def test_a_text_that_can_be_a_gold_agrees_with_itself_and_no_other_is_paid(text):
    assert paid(text, text) == float(gold("number", text))


@pytest.mark.parametrize("unit", ["9", "(", "{", " ", ",000", "1,", "1.", "1/", "1 ", "*", "#", "#### ", "<a", "-",
                                  "a-", "\n", "$", "\\", "^", "10^{", r"\boxed{", r"\text{", r"\frac{1",
                                  "9 1/", "ab^", "+ ", "1 or "])  # fmt: skip
def test_long_repetitions_end(unit):
    """Work that grew with the square of the length would take minutes here."""
    long = unit * (50_000 // len(unit))
    for text in ("1" + long + "1", long, rf"\boxed{{{long}", long + "\n#### 7"):
        assert paid(text, "7") == float(text.endswith("#### 7"))


def test_numerals_longer_than_anyone_means_are_not_read():
    limit = "9" * MAX_DIGITS
    assert paid(f"#### {limit}", limit) == 1.0
    for long in (limit + "9", "9" * 5000, "1/" + "9" * 5000, "0." + "9" * 5000):
        assert paid(f"#### {long}", "9") == 0.0 and not gold("number", long)


# ---- exact

@given(st.integers(100, 999), st.integers(100, 999), st.integers(-2, 2))
def test_exact_on_sums_with_and_without_working(a, b, off):
    work = f"({(a % 10) + (b % 10)},{a // 10 + b // 10})"
    for told in (f"{a + b + off}", f"{work}{a + b + off}", f"{work}{work} {a + b + off}\n"):
        assert exact(f"{a}+{b}=", told, (), (), str(a + b), after=")", other=1) == float(off == 0)


@pytest.mark.parametrize(("completion", "answer", "row", "worth"), [
    ("1533 ", " 1533", {}, 1.0), ("(1)1533", "1533", {}, 0.0), ("1533)", "1533", {"after": ")"}, 0.0),
    ("01533", "1533", {}, 0.0), ("x)1)1533", "1533", {"after": ")"}, 1.0), ("1533)x", "1533", {"after": ")"}, 0.0),
    ("A or B or C", "B", {}, 0.0), ("b", "B", {}, 0.0), ("<a>1<a>2", "2", {"after": "<a>"}, 1.0),
    ("1533", "1533", {"after": ""}, 1.0), ("15 33", "1533", {}, 0.0),
])  # fmt: skip
def test_exact_is_equality_of_what_follows_the_last_after(completion, answer, row, worth):
    assert exact("", completion, (), (), answer, **row) == worth


def test_gold_of_exact_is_any_text():
    assert gold("exact", "any text") and not gold("exact", " \n")


# ---- the short verifiers

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
         "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"]  # fmt: skip


def judged(name, completion, answer=""):
    return named(name)("", completion, (), (), answer)


@given(st.integers(0, 20), st.sampled_from(["{}", "There are {}.", "<answer>{}</answer>", "2 cubes and 1 ball:\n{} things",
                                            r"\boxed{{{}}}", "Answer: {}", "**{}**"]), st.booleans())  # fmt: skip
def test_a_count_is_read_in_digits_and_in_words(n, frame, upper):
    word = NAMES[n].capitalize() if upper else NAMES[n]
    for text in (frame.format(n), frame.format(word)):
        assert (judged("count", text, str(n)), judged("count", text, str(n + 1))) == (1.0, 0.0)


@pytest.mark.parametrize("text", ["", "twenty-three", "3 or 4", "<answer>3 or 4</answer>", "2.5", "some", "<answer>3, 4</answer>", "minus 3",
                                  "phone", "<answer></answer> 3", "-3"])
def test_what_is_no_count_earns_nothing(text):
    assert [judged("count", text, n) for n in ("3", "4", "20", "1", "2")] == [0.0] * 5
    assert not gold("count", "2.5") and not gold("count", "few") and gold("count", "three")


FORMS = ["{}", "({})", "{}.", "**{}**", r"\boxed{{{}}}", r"\boxed{{\text{{({})}}}}", "<answer>{}</answer>", "<answer> ({}) </answer>",
         "The answer is {}.", "So the answer is ({})", "Answer: {}", "answer: **{}**", "Not A.\nAnswer: {}", "A or B?\n({})",
         "the correct option is {}", "First I took A.\n\n{}", "The answer is {}<|im_end|>", "{}) Paris", "Final answer: {}"]  # fmt: skip


@given(st.sampled_from("ABCDE"), st.sampled_from(FORMS), st.booleans())
def test_a_choice_is_read_in_the_usual_forms_and_in_either_case(letter, form, lower):
    text = form.format(letter.lower() if lower else letter)
    assert [judged("choice", text, other) for other in "ABCDE"] == [float(other == letter) for other in "ABCDE"]


@pytest.mark.parametrize("text", [
    "<answer>A or B or C</answer>", "A or B", "A, B", r"\boxed{A, B}", r"\boxed{A \text{ or } B}", "The answer is A or B.", "", "A B", "AB",
    "Answer: both", "The answer is a matter of taste", "<answer>A/B</answer>", "<answer></answer>", "I think so", "Answer: A and B", r"\boxed{",
    "<answer>a, b</answer>", "A man walks in", "F", "<answer>all</answer>", "(A) or (B)", "Answer: (A) (B)",
])  # fmt: skip
def test_a_hedge_or_no_letter_chooses_nothing(text):
    assert [judged("choice", text, letter) for letter in "ABCDE"] == [0.0] * 5
    assert not gold("choice", "AB") and not gold("choice", "42") and gold("choice", "(b)")


@given(st.text(min_size=1), st.text(min_size=1), st.permutations(["<think>", "</think>", "<answer>", "</answer>"]), st.integers(0, 3))
def test_format_wants_each_tag_once_in_order_around_text(thought, told, tags, at):
    right = f"<think>\n{thought}\n</think>\n<answer>{told}</answer>"
    filled = bool(thought.strip() and told.strip()) and not any(tag in thought + told for tag in tags)
    assert judged("format", right) == judged("format", f" {right}<|im_end|>\n") == float(filled)
    assert judged("format", right.replace(tags[at], "", 1)) == judged("format", right + tags[at]) == judged("format", tags[at] + right) == 0.0
    assert judged("format", f"{right} 9") == judged("format", f"So {right}") == judged("format", right.replace("</think>\n", "</think> 9 ")) == 0.0
    mixed = f"{tags[0]}1{tags[1]}{tags[2]}2{tags[3]}"
    assert judged("format", mixed) == float(tags == ["<think>", "</think>", "<answer>", "</answer>"])


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_repetition_is_the_share_of_runs_that_came_before(words):
    runs, again = [words[i : i + 4] for i in range(len(words) - 3)], 0
    for i in range(len(runs)):
        again += runs[i] in runs[:i]
    assert judged("repetition", " ".join(words)) == pytest.approx(-again / len(runs) if runs else 0, abs=1e-12)
    assert named("length")("", "", (), words, "") == -len(words) / 1000


# ---- names

def test_a_file_of_your_own_is_named_by_path_and_function_and_run_once(tmp_path):
    file = tmp_path / "a=b.py"
    file.write_text("open(__file__ + '.log', 'a').write('.')\ndef paid(p, completion, pi, ci, answer, **row):\n    return 0.7\n")
    assert named(f"{file}:paid=0.5")("", "", (), (), "") == named(f"{file}:paid")("", "", (), (), "") == 0.7
    assert (tmp_path / "a=b.py.log").read_text() == "."
    assert split(f"{file}:paid") == (f"{file}:paid", 1.0) and split(f"{file}:paid=0.5") == (f"{file}:paid", 0.5)
    assert label(f"{file}:paid=0.5") == "paid" and label("format=0.2") == label("format") == "format"
    assert named("number=3") is number


@pytest.mark.parametrize(("spec", "says"), [
    ("nobody", "no such verifier; there are exact, number"), ("{}/none.py:f", "there is no file"), ("{}/mine.py:g", "has no function g"),
    ("{}/mine.py:LEVEL", "has no function LEVEL"), ("{}/broken.py:f", "cannot be imported .*no such thing"), ("{}/exits.py:f", "cannot be imported"),
])  # fmt: skip
def test_a_reward_that_is_not_there_is_refused_in_one_line(tmp_path, spec, says):
    (tmp_path / "mine.py").write_text("LEVEL = 3\ndef f(*args, **row):\n    return 1.0\n")
    (tmp_path / "broken.py").write_text("raise OSError('no such thing')")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(1)")
    with pytest.raises(Refused, match=says) as refused:
        named(spec.format(tmp_path))
    assert "\n" not in str(refused.value) and str(refused.value).startswith("--reward ")


GOLDS = st.integers(0, 10**6).map(lambda n: n * 7 - 10**6)


@given(GOLDS, st.integers(1, 10**6))
def test_gsm8k_golds_verify_in_five_written_forms_and_never_against_another(n, off):
    """The same over all 1,319 answers of GSM8K's test set is done by hand; the data is not part of this repository."""
    gold_text = f"She has {abs(n)} + 1 and then <<{n}+0={n}>>{n:,} left.\n#### {n:,}"
    for form in ("We add 1 and 2.\n#### {}", r"Thus \boxed{{{}}}.", "The answer is {}.", "Final Answer: **{}**", r"\[ x = {} \]"):
        assert paid(form.format(f"{n:,}"), gold_text) == 1.0 and paid(form.format(f"{n + off:,}"), gold_text) == 0.0


# ---- calling a reward

PROMPT = Prompt(number=17, ids=(1, 2), text=r"Answer 4, as \boxed{4} or #### 4", answer="4", row={"level": 3})


@pytest.mark.parametrize("name", ["exact", "number", "math", "geometry", "count"])
def test_what_stands_in_the_prompt_earns_nothing(name):
    assert asyncio.run(score(named(name), PROMPT, "as asked: 5", (9,))) == 0.0
    assert asyncio.run(score(named(name), PROMPT, "4", (9,))) == 1.0


def test_a_reward_gets_all_it_was_promised_sync_and_async():
    seen = []

    def plain(prompt, completion, prompt_ids, completion_ids, answer, level):
        seen.append((prompt, completion, prompt_ids, completion_ids, answer, level))
        return 0.25

    async def waiting(*args, **row):
        await asyncio.sleep(0)
        return plain(*args, **row)

    for f in (plain, waiting, functools.partial(plain)):
        assert asyncio.run(score(f, PROMPT, "out", (9, 8))) == 0.25
    assert seen == [(PROMPT.text, "out", PROMPT.ids, (9, 8), "4", 3)] * 3


@pytest.mark.parametrize("told", [True, 1, np.float32(1), np.bool_(True), np.array(1), torch.tensor(1.0), Fraction(1)])
def test_whatever_is_a_number_becomes_a_float(told):
    worth = asyncio.run(score(lambda *args, **row: told, PROMPT, "", ()))
    assert type(worth) is float and worth == 1.0


@pytest.mark.parametrize("told", [None, float("nan"), float("inf"), -float("inf"), "1", 10**400, 1j, [1.0],
                                  np.ones(1), np.array("1"),
                                  torch.tensor(float("nan")), torch.ones(2)], ids=repr)  # fmt: skip
@pytest.mark.parametrize("wait", [False, True])
def test_a_reward_that_is_no_number_is_named_and_never_0(told, wait):
    def broken(*args, **row):
        return told

    async def waiting(*args, **row):
        return told

    waiting.__name__ = "broken"
    with pytest.raises(ValueError, match="reward broken .* prompt 17"):
        asyncio.run(score(waiting if wait else broken, PROMPT, "", ()))


def test_an_error_of_the_reward_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(score(lambda *args, **row: 1 / 0, PROMPT, "", ()))


@given(st.permutations(["#### 4", "I don't know.", "", r"\boxed{4}", "#### 5"]))
def test_each_sample_has_one_score_and_it_is_its_own(texts):
    async def batch():
        return await asyncio.gather(*(score(number, PROMPT, text, ()) for text in texts))

    assert asyncio.run(batch()) == [float("4" in text) for text in texts]


# ---- the file

def test_scoring_imports_neither_torch_nor_transformers():
    slow = "{'torch', 'transformers', 'numpy', 'nanorl.sample'}"
    program = f"import sys, nanorl.reward; print(sorted({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("module", "examples"), [(reward, 4), (verifiers, 4), (numeral, 2), (countdown, 2)])
def test_examples_in_docstrings(module, examples):
    assert doctest.testmod(module) == (0, examples)
