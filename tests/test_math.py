"""Theorems about symbolic answers: one formula in many spellings, what only looks alike, and what must never take long."""

import doctest
import resource
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import notation, symbolic
from nanorl.notation import allowed, clean
from nanorl.numeral import value
from nanorl.reward import gold, named, number
from nanorl.symbolic import geometry, math, readable


def paid(completion, answer, verifier=math):
    return verifier("", completion, (), (), answer)


def boxed(text):
    return rf"Hence \boxed{{{text}}}."


# Classes of equal answers: any member against any other of its class is right, against any of another class wrong.
CLASSES = {
    "root": [r"2\sqrt{5}", r"\sqrt{20}", r"2\sqrt5", r"\sqrt{4 \cdot 5}", "2√5", r"\frac{10}{\sqrt{5}}", r"20^{1/2}"],
    "root with a unit": [r"3\sqrt{7}\text{ cm}", r"3\sqrt{7} cm", r"3 \sqrt{7}\,\mathrm{cm}^2", r"\sqrt{63}", r"3\sqrt{7} units"],
    "half of π": [r"\frac{\pi}{2}", r"\dfrac{\pi}2", r"\pi/2", "π/2", r"0.5\pi", r"\frac{1}{2}\pi", r"$\tfrac{1}{2} \pi$"],
    "square": [r"x^2+6x+9", r"(x+3)^2", r"9 + 6x + x^{2}", r"(x+3)(x+3)", "f(x)=(3+x)^2", r"f(x) = x^2+6x+9"],
    "two roots": [r"\pm 4", "4,-4", "-4, 4", r"x = \pm 4", r"4 \text{ or } -4", r"\{-4, 4\}", r"x=4 \text{ or } x=-4",
                  r"\left\{ 4,\, -4 \right\}", "4 and -4"],
    "a pair": ["(4,-4)", r"\left(4, -4\right)", r"(\frac{8}{2}, -4.0)", "(x,y) = (4,-4)"],
    "half open": ["[2,7)", r"\left[2, 7\right)", r"2 \le x < 7", r"x \in [2,7)", r"7 > x \geq 2"],
    "open": ["(2,7)", r"2 < x < 7"],
    "ray": [r"(-\infty,7]", r"x \leq 7", r"7 \geq x", r"x ≤ 7", r"x \in (-\infty, 7]"],
    "union": [r"(1,2)\cup(3,5)", r"(3, 5) \cup (1, 2)"],
    "line": ["2x+3y-7=0", "7 = 2x + 3y", "4x+6y=14", r"2x = 7 - 3y"],
    "matrix": [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&\frac82\end{bmatrix}"],
    "its transpose": [r"\begin{pmatrix}1 & 3 \\ 2 & 4\end{pmatrix}"],
    "word": [r"\text{Friday}", "Friday", r"\mathrm{friday}", r"\textbf{Friday}"],
    "clock": ["3:45"], "ratio": ["3 : 4", "3:4"], "base three": ["1201_3", "1201_{3}"], "base four": ["1201_4"],
    "infinite": [r"\infty", "∞"], "minus infinite": [r"-\infty"],
    "trigonometry": [r"\sin^2 t + y", r"1 - \cos^2 t + y"], "complex": ["3-2i", "-2i + 3"],
    "tiny π": [r"\pi/2011!", r"\frac{\pi}{2011!}"], "tinier π": [r"\pi/2012!"],
    "tiny": [r"1/2011!", r"\frac{1}{2011!}"], "tinier": ["1/2012!"],
    "sum of two": [r"1+\frac{1}{e}", r"1+e^{-1}"], "their difference": [r"1-\frac{1}{e}"],
    "product": ["2ab", "2ba", r"2a \cdot b"], "other product": ["2ac"], "strict": ["x+y<3", "3 > y+x", "2x+2y<6"],
    "the other way": ["x+y>3"], "big": [r"70{,}000\pi", r"70,000\pi", r"70000\pi", r"7 \times 10^4 \pi"],
}  # fmt: skip
EACH = [(name, text) for name, texts in CLASSES.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), EACH)
def test_every_spelling_of_one_answer_is_paid_against_every_other_and_no_other_answer(name, text):
    assert readable(text)
    for other, gold_text in EACH:
        same = other == name
        if (same and text != gold_text) or gold_text == CLASSES[other][0]:
            assert paid(boxed(text), gold_text) == float(same), gold_text


def test_what_cancels_is_0_and_what_is_small_is_not():
    zero = r"\sqrt{2}\sqrt{3}-\sqrt{6}"
    assert paid(boxed(zero), "0") == paid(boxed(zero), r"\sin^2 x+\cos^2 x-1") == 1.0
    assert paid(boxed(r"\pi \cdot 10^{-200}"), "0") == paid(boxed(zero), r"\frac{\sqrt{2}}{10^{90}}") == 0.0


@given(p=st.integers(-99, 99), q=st.integers(1, 99), r=st.sampled_from([2, 3, 5, 6, 7, 10]))
@settings(max_examples=10)
def test_a_multiple_of_a_root_is_itself_and_no_neighbour(p, q, r):
    text = rf"\frac{{{p}\sqrt{{{r}}}}}{{{q}}}"
    assert paid(boxed(text), rf"\frac{{{p}}}{{{q}}}\sqrt{{{r}}}") == 1.0
    assert paid(boxed(rf"\frac{{{p + 1}\sqrt{{{r}}}}}{{{q}}}"), text) == 0.0
    assert paid(boxed(f"{p / q * r**0.5:.9f}"), text) == float(p == 0)  # decimals are not the root


@given(n=st.integers(-(10**6), 10**6), form=st.sampled_from(["#### {}", r"\boxed{{{}}}", "so it is {}.", "<answer>{}</answer>"]))
def test_where_both_are_numbers_math_is_number(n, form):
    for answer in (str(n), f"{n}.00", f"{n + 1}"):
        assert paid(form.format(f"{n:,}"), answer) == paid(form.format(f"{n:,}"), answer, number)


@pytest.mark.parametrize(("completion", "answer"), [
    (r"\boxed{3\sqrt{2}}", "3"), (r"\boxed{3\sqrt{2}}", "2"), (r"\boxed{3\sqrt{2", r"3\sqrt{2}"), (r"\boxed{3\sqrt{2}} \boxed{", r"3\sqrt{2}"),
    (r"\boxed{\sqrt{2} or \sqrt{3}}", r"\sqrt{2}"), (r"\boxed{n=4,5,6}", "n=3,4,5"), (r"\boxed{10^{-300}}", "0"),
    (r"\boxed{x=5}", "y=x+5"), (r"\boxed{x=1,y=2}", "x=2,y=1"), (r"\boxed{x \ne 3}", "3"), (r"\boxed{\sqrt{x^2}}", "x"), (r"\boxed{x'}", "x"),
    (r"\boxed{\frac{1}{0}}", r"\frac{1}{0}"), (r"\boxed{nan}", "nan"), (r"\boxed{A+b}", "a+B"), (r"\boxed{1,2}", "1,2,2"),
    (r"\boxed{1,1,2}", "1,2,2"), (r"$\sqrt{2}$ is 1.41", r"\sqrt{2}"),
    (r"\boxed{0=0}", "x=x"), (r"\boxed{3x+4y+14=0}", "0"), (r"\boxed{2x}", r"2^x"), (r"\boxed{[1,2]}", "(1,2)"),
    ("It is 5.", r"\sqrt{25}+x"), (r"I put it in \boxed", r"\sqrt{2}"), ("", "x"), ("x", "x"), (r"\boxed{}", "x"),
    (r"\boxed{\sqrt{2}}, no: \boxed{\sqrt{3}}", r"\sqrt{2}"), ("four towers instead of two", "four towers instead of two"),
])  # fmt: skip
def test_what_only_looks_like_the_answer_earns_nothing(completion, answer):
    assert paid(completion, answer) == 0.0


@pytest.mark.parametrize("completion", [
    r"#### 2\sqrt{5}", "#### Step 1\n" + r"so \boxed{\sqrt{20}}", r"<answer>2\sqrt{5}</answer><|im_end|>", r"The answer is $2\sqrt{5}$.",
    r"Answer: 2\sqrt{5}", r"First 7 tries, then \[x = 2\sqrt{5}\]", r"We get \(\sqrt{20}\) in the end.",
    "<think>Answer: 5</think>\nAnswer: " + r"$\sqrt{20}$", r"\boxed{2\sqrt{5}} and 8 words, 9 in all",
])  # fmt: skip
def test_where_the_answer_is_read(completion):
    assert paid(completion, r"2\sqrt{5}") == 1.0 and paid(completion, r"2\sqrt{6}") == 0.0


@pytest.mark.parametrize("answer", ["", " ", "six of the boys", "9" * 300 + "x", r"\sqrt{2", "x+)", "nan", "He has 3, then 4",
                                    "x^" * 9 + "2", r"\input{file}" + "z" * 500])  # fmt: skip
def test_a_gold_that_cannot_be_judged_by_is_found_out(answer):
    assert not gold("math", answer)
    assert paid(boxed(answer), answer) == 0.0


@pytest.mark.parametrize(("completion", "answer", "worth"), [
    (r"\boxed{AB = 2\sqrt{221}}", r"2 \sqrt { 221 }", 1.0), (r"\boxed{2\sqrt{221}\text{ units}}", r"2\sqrt{221}", 1.0),
    (r"\boxed{29.73}", r"2\sqrt{221}", 0.0), (r"\boxed{m\angle A = 35^\circ}", "35", 1.0), ("<answer>x = 5.6</answer>", "5.6", 1.0),
    ("#### 40 degrees", "40", 1.0), (r"\boxed{35 or 45}", "35", 0.0), ("The angle is 41", "40", 0.0), ("", "40", 0.0),
])  # fmt: skip
def test_geometry(completion, answer, worth):
    assert paid(completion, answer, geometry) == worth


# ---- hard inputs

M = 40_000  # the length of the long ones
HARD = [r"\boxed{5^{5^{5^{5^5}}}}", r"\boxed{9^{9^9}}", r"\boxed{(9^{999})^{999}}", r"\boxed{((9!)!)!}", r"\boxed{99999!}", r"\boxed{9!!!!}",
        r"\boxed{\binom{999999}{499999}}", r"\boxed{10^{999999999}}", r"\boxed{2^{99}^{99}^{99}}", r"\boxed{\sqrt{10^{9999}+7}}",
        r"\boxed{1e999999999}", r"\boxed{x^{9^{9}}}", r"\boxed{\int_0^1 e^{-x^2} dx}", r"\boxed{\sum_{k=1}^{10^9} k}",
        r"\boxed{\sin(\sin(\sin(\sin(10^{300}))))}", r"\boxed{\frac{1}{\frac{1}{\frac{1}{\frac{1}{\frac{1}{x}}}}}}",
        r"\boxed{" + "(" * 10 + "x" + ")" * 10 + "}", r"\boxed{" + "+".join(["\\sqrt{x}"] * 20) + "}", "\\boxed{" * (M // 14),
        "\\boxed{" * (M // 14) + "7" + "}" * (M // 14), "{" * M, "(" * M, r"\boxed{" + "9" * M + "}", "$" * M,
        "x=" * (M // 2), "1," * (M // 2), r"\boxed{" + "1," * 190 + "1}", "\\(" * (M // 2), "\\frac" * (M // 5), "<answer>" * (M // 8),
        "answer: " * (M // 8), "٣٤", r"\boxed{٣\sqrt{٤}}", "\x00" * 1000, "\\boxed{\x00}", r"\boxed{\infty-\infty}", r"\boxed{0^0}",
        r"\boxed{\log 0}", r"\boxed{x_{" + "1" * 150 + "}}", r"\boxed{" + "-" * 190 + "x}", "####" * (M // 4), "#### " + "\\" * M]  # fmt: skip


LIMITS = {"choice": "B", "countdown": "target=7;numbers=3,4"}


@pytest.mark.parametrize("text", HARD, ids=lambda text: text[:24].replace("\x00", "NUL"))
def test_hard_input_is_judged_by_every_verifier_and_no_power_tower_is_built(text):
    """The limits that a worker enforces are 2 s and 512 MiB; nothing here may come near."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for name in ("math", "geometry", "number", "count", "choice", "format", "countdown", "repetition"):
        assert named(name)("", text, (), (), LIMITS.get(name, "7")) <= 1.0
    assert time.process_time() - start < 2 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


@pytest.mark.parametrize("name", ["math", "count"])
def test_a_megabyte_is_judged_too(name):
    start = time.process_time()
    assert named(name)("", "x=(" * 350_000 + "\n#### 7", (), (), "7") == 1.0 and time.process_time() - start < 2


PIECES = st.lists(st.sampled_from([*"0123456789xyeiABn+-*/^_(){}[],.<>=|!&; ", r"\frac", r"\sqrt", r"\boxed{", r"\pm", r"\cup", r"\{", r"\}",
                                   r"\infty", r"\text{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\sin", r"\log", r"\pi", " or ", "∞",
                                   "½", "²", r"\circ", r"\binom", r"\in", r"\le"]), max_size=14).map("".join)  # fmt: skip


@given(PIECES, PIECES)
@settings(max_examples=30, deadline=2000)
def test_any_two_formulas_are_judged_the_same_either_way_round(a, b):
    forward = paid(boxed(a), b)
    assert forward in (0.0, 1.0)
    if readable(a) and readable(b) and "\\boxed" not in a + b and a and b:
        assert value(a, bare=True) is not None or value(b, bare=True) is not None or forward == paid(boxed(b), a)


@given(st.text(max_size=200))
@settings(max_examples=30, deadline=2000)
def test_any_text_is_judged(text):
    assert paid(text, r"\sqrt{2}") in (0.0, 1.0) and paid(boxed(text), text) in (0.0, 1.0)


def test_the_same_verdict_in_a_thread():
    """A parser that limits its time by a signal raises here, and scores 0 for a whole run."""
    found = []
    thread = threading.Thread(target=lambda: found.append(paid(boxed(r"\sqrt{18}+k"), r"3\sqrt{2}+k")))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(("text", "may"), [("2^{100}", True), ("2^{3^{2}}", False), ("e^{x^2}", True), ("(2^{9})^{99}", True),
                                           ("(2^{999})^{999}", False), ("5!", True), ("5!!", False), ("(5!)!", False), ("10000!", False),
                                           (r"\sqrt{2}^{10}", True), (r"\foo{2}", False), ("3 4", False), ("(1", False), ("1)", False)])  # fmt: skip
def test_what_may_be_parsed_is_bounded_before_it_is(text, may):
    assert allowed(clean(text)) == may


@pytest.mark.parametrize(("module", "examples"), [(notation, 2), (symbolic, 2)])
def test_examples_in_docstrings(module, examples):
    assert doctest.testmod(module) == (0, examples)


def test_memory_that_runs_out_is_no_verdict_and_is_not_kept_as_one(monkeypatch):
    """The scorer counts it as a fault; a formula that the parser merely cannot read earns 0."""
    formula = r"\boxed{\sqrt{11}+\sqrt{13}}"
    for error in (MemoryError, ValueError):
        def fails(*given, **named):
            raise error()
        with monkeypatch.context() as patched:
            patched.setattr(symbolic, "latex2sympy", fails)
            if error is MemoryError:
                with pytest.raises(MemoryError):
                    symbolic.math("", formula, (), (), r"\sqrt{13}+\sqrt{11}")
            else:
                symbolic.values.cache_clear()
                assert symbolic.math("", formula, (), (), r"\sqrt{13}+\sqrt{11}") == 0.0
        symbolic.values.cache_clear()
        assert symbolic.math("", formula, (), (), r"\sqrt{13}+\sqrt{11}") == 1.0
