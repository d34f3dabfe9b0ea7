"""Theorems about Countdown: every tree is read, only what uses each number once and hits the target is paid."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorl.countdown import MAX_DEPTH, countdown, evaluate, problem, readable

trees = st.recursive(st.integers(0, 99), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner), max_leaves=6)


def paid(text, target, numbers):
    return countdown("", text, (), (), f"target={target};numbers={','.join(map(str, numbers))}")


def worked_out(tree):
    """The value of a tree by Python's own fractions."""
    if isinstance(tree, int):
        return Fraction(tree)
    a, sign, b = worked_out(tree[0]), tree[1], worked_out(tree[2])
    return a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b


def text_of(tree, spelled):
    """The tree as text, with parentheses around every operation."""
    return str(tree) if isinstance(tree, int) else f"({text_of(tree[0], spelled)} {spelled[tree[1]]} {text_of(tree[2], spelled)})"


def leaves(tree):
    return [tree] if isinstance(tree, int) else leaves(tree[0]) + leaves(tree[2])


SPELLED = [dict(zip("+-*/", "+-*/")), dict(zip("+-*/", "+−×÷")), dict(zip("+-*/", ["+", "-", r"\times", r"\div"]))]


@given(tree=trees, spelled=st.sampled_from(SPELLED), frame=st.sampled_from(["<answer>{}</answer>", "Try 1+1.\n{}",
       r"\boxed{{{}}}", "<answer>1</answer> no: <answer> {} </answer><|im_end|>", "Answer: {}."]))  # fmt: skip
def test_an_expression_is_worth_what_fractions_say_and_each_number_counts_once(tree, spelled, frame):
    text, numbers = frame.format(text_of(tree, spelled)), leaves(tree)
    try:
        total = worked_out(tree)
    except ZeroDivisionError:
        assert evaluate(text_of(tree, spelled).replace("÷", "/")) is None
        return
    if total.denominator > 1:
        assert paid(text, int(total), numbers) == 0.0
        return
    assert paid(text, total, numbers[::-1]) == 1.0
    assert paid(text, total + 1, numbers) == paid(text, total, numbers + [7]) == 0.0
    assert paid(text, total, [n + (i == 0) for i, n in enumerate(numbers)]) == 0.0
    assert len(numbers) == 1 or paid(text, total, numbers[1:]) == 0.0


@given(a=st.integers(0, 99), b=st.integers(1, 99), c=st.integers(1, 99))
def test_multiplication_binds_closer_and_equal_signs_bind_from_the_left(a, b, c):
    assert evaluate(f"{a}-{b}-{c}")[0] == a - b - c and evaluate(f"{a}-{b}*{c}")[0] == a - b * c
    assert evaluate(f"{a}/{b}/{c}")[0] == Fraction(a, b * c) and evaluate(f"-({a})+{b}/{c}")[0] == -a + Fraction(b, c)


@pytest.mark.parametrize("text", [
    "57", "5 7", "5(7)", "(5)(7)", "5+", "+5+7", "(5+7", "5+7)", "()", "", "5^7", "5**7", "5.0+7", "5//7", "5!+7", "5%7",
    "__import__('os')", "5+7 or 12", "5+7, 12", "x+7", "5+7+", "5/(7-7)", "5_7", "٥+7", "5e7", "0x5", "5 if 7 else 1",
    "(" * (MAX_DEPTH + 1) + "5" + ")" * (MAX_DEPTH + 1), "1+" * 300 + "1", "5+7=13", "5+7=12=12", "5+7=x", "9" * 10,
])  # fmt: skip
def test_whatever_is_no_expression_earns_nothing(text):
    for target in (12, 35, 57, 5, 301):
        assert paid(f"<answer>{text}</answer>", target, [5, 7]) == 0.0


def test_depth_is_bounded():
    assert evaluate("(" * MAX_DEPTH + "5" + ")" * MAX_DEPTH) == (5, [5])
    assert evaluate("(" * (MAX_DEPTH + 1) + "5" + ")" * (MAX_DEPTH + 1)) is evaluate("-" * (MAX_DEPTH + 1) + "5") is None


@pytest.mark.parametrize(("text", "worth"), [
    ("<answer>5+7=12</answer>", 1.0), ("5 + 7", 1.0), ("5 + 7 = 12.", 1.0), ("So:\n7+5", 1.0), ("<answer>7+5", 1.0),
    ("<answer>5+7</answer> so <answer>5*7</answer>", 0.0), ("<answer>5+7</answer> <answer></answer>", 0.0),
    ("<answer>12</answer>", 0.0), ("The target is 12", 0.0), ("<answer>5+7+0</answer>", 0.0),
    ("<answer>5+7+5-5</answer>", 0.0), ("<answer>5+7</answer>\n" + "and on " * 999, 1.0),
])  # fmt: skip
def test_the_last_answer_counts(text, worth):
    assert paid(text, 12, [5, 7]) == worth


@pytest.mark.parametrize("answer", ["", "12", "target=12", "target=x;numbers=1", "target=1;numbers=", "numbers=1;target=1",
                                    "target=1;numbers=1,,2", "target=1;numbers=1;import"])
def test_a_gold_of_another_form_is_found_out_and_pays_nobody(answer):
    assert not readable(answer)
    assert countdown("", "<answer>1</answer>", (), (), answer) == 0.0


@given(st.integers(0, 10**6), st.booleans())
def test_problems_are_solvable_by_construction_and_no_problem_is_in_both_parts(key, held_out):
    numbers, target, solution = problem(str(key), held_out)
    assert paid(f"<answer>{solution}</answer>", target, numbers) == 1.0
    assert 3 <= len(numbers) <= 4 and 1 <= target <= 200 and min(numbers) >= 1
    assert problem(str(key), held_out) == (numbers, target, solution)
    other = problem(str(key), not held_out)
    assert (sorted(other[0]), other[1]) != (sorted(numbers), target)


@given(st.text(max_size=300))
def test_any_text_is_judged(text):
    assert paid(text, 12, [5, 7]) in (0.0, 1.0) and paid(f"<answer>{text}", 12, [5, 7]) in (0.0, 1.0)
