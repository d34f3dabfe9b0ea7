"""What is it worth? Verifiers, and one safe way to call a reward.

A reward is any function, sync or async, called positionally with what was asked and what was answered:

    reward(prompt, completion, prompt_ids, completion_ids, answer, **row) → float

`row` holds the problem's other fields. Two verifiers are here: `exact` compares text, `number` compares numbers the
way GSM8K writes them. They read the completion and never the prompt, evaluate no code, and when in doubt pay nothing:
a wrong answer that is paid is learned. Symbolic mathematics is not theirs. Only the standard library is imported, so
that a process that scores starts at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import reprlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanorl.sample import Prompt

MAX_DIGITS = 1000  # a longer numeral is no answer; Python itself refuses to read more than 4300

# What makes LaTeX and Markdown plain, in this order. Every repetition is bounded or starts at a fixed mark, so that
# the work grows with the length of the text and no faster.
PLAIN = [(re.compile(pattern, re.MULTILINE), new) for pattern, new in (
    (r"[−–]", "-"),
    (r"<\|?/?[A-Za-z][^<>\n]{0,30}>|`", " "),  # tags, special tokens
    (r"(?<![\w)}*])\*{1,3}(?=[^\s*])|(?<=[^\s*])\*{1,3}(?![\w({\\*])", ""),  # **bold**, not 6*7
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})", ","),
    (r"\\\\|\\[()\[\],;: ]|\\q?quad\b|\\approx\b", " "),
    (r"\^ ?(?:\\circ|\{\\circ\})", " degrees "),
    (r"([-+])\\?[$€£¥] ?(?=[.0-9])", r"\1"),
    (r"\\?[$€£¥]", " "),  # currency, and LaTeX's delimiter
    (r"([0-9]) *(?=\\[dtc]?frac)", r"\1 "),  # 2\frac{1}{2} is two and a half
    (r"\\[dtc]?frac *(?:\{ *([-+]?[0-9.,]+) *\}|([0-9])) *(?:\{ *([0-9.,]+) *\}|([0-9]))(?! *[0-9])", r"\1\2/\3\4"),
    (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox) *\{([^{}]*)\}", r" \1 "),
    (r"(?:(?<=[A-Za-z]{2})|(?<=\bm)) ?\^ ?(?:[23]|\{[23]\})|(?<=[A-Za-z])[²³]", ""),  # cm^2: a unit, not a power
    (r"(?<=[0-9A-Za-z])/(?=[A-Za-z]{2})", " per "),
    (r"[^\S\n]+", " "),
    (r"^ ?[*+•] ", ""),
)]  # fmt: skip

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(  # 1,234.50   -3   .5   3/4   2 1/2   28%; digits that belong to a name (x1, CO2, top-5) are none
    r"(?<![A-Za-z0-9_.])(?<![A-Za-z_]-)(?<![0-9],)(?P<sign>(?<![0-9)}%] )[-+])?"
    rf"(?:(?P<whole>{INTEGER}) (?={INTEGER}/[0-9]))?"
    rf"(?P<top>{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:/(?P<bottom>{INTEGER}(?:\.[0-9]+)?))?(?: ?\\?%)?"
)
# A number with one of these beside it is part of something else: a sum, a power, a list, a clock time, a hedge.
LEFT = re.compile(r"(?:[-+^/*√_{}\\×÷·±|]|[+^/*√×÷·±] |[0-9] |[0-9)}=%] ?- |[0-9]:|\\[A-Za-z]{1,12} ?"
                  r"|\b(?:or|minus|negative|not|than) )$", re.IGNORECASE)  # fmt: skip
RIGHT = re.compile(r"(?![mgshL]\b)[A-Za-z](?![A-Za-z])|[A-Za-z]{1,9}[0-9]|[_²³½¼¾⅓⅔]|[.,:/-]?[0-9]"
                   r"| ?[\^*/+×÷·±√π\\{]| [xyz]\b|[ -]?(?:pi|or|and a half)\b")
# Around the one number of a short answer words may stand, an = before it, but no algebra: 5 m, not 5 x.
LEAD = re.compile(r"[0-9\\^_*/!<>()\[\]{}|+±×÷√-]")
TAIL = re.compile(r"^!|[0-9\\^*+/<>{}|=±×÷√²³½¼¾⅓⅔π∞]|\bor\b"
                  r"|(?<![\w'’])(?![aAIgmhsLCFJKNVW]\b)[A-Za-z](?![\w'’])")  # fmt: skip
MARK = re.compile(r"(?<!#)####\s*(?=[-+]?\.?[0-9]|\Z)")  # "#### Step 2" is a heading
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|\Z)")


def exact(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str, *,
          after: str = "", **row: Any) -> float:  # fmt: skip
    """1 if the completion is the answer, but for white space around it; else 0.

    A row with a field `after` lets the completion show its working: what follows the last `after` counts, or the
    whole completion where there is none.

    >>> exact("587+946=", "(7613,8413,5915)1533", (), (), "1533", after=")")
    1.0
    """
    told = completion.rpartition(after)[2] if after else completion
    return float(told.strip() == answer.strip())


def number(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
           **row: Any) -> float:  # fmt: skip
    r"""1 if the number that the completion ends on equals the answer's, as exact fractions; else 0.

    The completion's number is, in this order, what follows the last `####`, what the last \boxed{} holds, or the last
    number in the text. Text behind it changes nothing, but a sentence after `####` or a box with a second number or
    an "or" is a hedge and earns 0, as an unfinished last box does. Signs, thousands separators, fractions and mixed
    numbers are read; currency and units are ignored (7 dozen is 7), and so is a percent sign (28% is not 0.28).
    The answer (gold) is read by the same rules, but has to be one number in all, for no number may be picked out of it.

    >>> number("", r"So it is \boxed{$9{,}500}.", (), (), "He earns 19*500=9500 #### 9,500.00")
    1.0
    """
    gold_value = value(answer, bare=True)
    return float(gold_value is not None and gold_value == value(completion))


def value(text: str, bare: bool = False) -> Fraction | None:
    """The number that a text gives as its answer, None if there is not exactly one. `bare`: with no mark in it the
    text has to be the answer itself, not prose that ends on it."""
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    if mark := last(MARK, text):
        return single(re.split(r"\n|[.!?;](?=\s|$)", text[mark.end() :], maxsplit=1)[0])
    if box := last(BOX, text):
        depth = 1
        for brace in re.compile(r"[{}]").finditer(text, box.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return single(text[box.end() : brace.start()])
        return None  # cut off inside the box; an earlier box is not what the text ends on
    if bare:
        return single(text)
    found = last(NUMBER, text)
    return lone(text, found) if found else None


def last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match, searched from the left, so that the matches before it are whole."""
    found = None
    for found in pattern.finditer(text):
        pass
    return found


def single(text: str) -> Fraction | None:
    """The value of the one number in a short answer; None if there is a second one, or algebra around it."""
    found = NUMBER.search(text)
    if found is None or LEAD.search(text[: found.start()]) or TAIL.search(text[found.end() :]):
        return None
    return lone(text, found)


def lone(text: str, found: re.Match[str]) -> Fraction | None:
    """The value of a number that NUMBER found; None if it is part of a larger expression or too long to be meant."""
    before = text[max(0, found.start() - 16) : found.start()]
    if LEFT.search(before) or RIGHT.match(text, found.end()) or len(found[0]) > MAX_DIGITS:
        return None
    whole, top, bottom = (Fraction((found[part] or default).replace(",", ""))
                          for part, default in (("whole", "0"), ("top", ""), ("bottom", "1")))  # fmt: skip
    if bottom == 0:
        return None
    return (whole + top / bottom) * (-1 if found["sign"] == "-" else 1)


def gold(name: str, answer: str) -> bool:
    """Can this verifier judge against this answer at all? Rows for which it cannot are dropped before training."""
    return value(answer, bare=True) is not None if name == "number" else bool(answer.strip())


def arithmetic(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
               **row: Any) -> float:  # fmt: skip
    """`exact`, for additions; it logs beside it whether the completion shows its working."""
    from nanorl.monitor import log  # monitor.py reads config.py, which reads this file

    log("worked", "(" in completion)
    return REWARDS["exact"](prompt, completion, prompt_ids, completion_ids, answer, **row)


REWARDS: dict[str, Callable[..., float]] = {"exact": exact, "number": number, "arithmetic": arithmetic}


def split(spec: str) -> tuple[str, float]:
    """A reward and its weight, 1 where none is given.

    >>> split("number"), split("mine.py:format=0.2"), split("a=b.py:f")
    (('number', 1.0), ('mine.py:format', 0.2), ('a=b.py:f', 1.0))
    """
    name, _, weight = spec.rpartition("=")
    try:
        return (name, float(weight)) if name else (spec, 1.0)
    except ValueError:
        return spec, 1.0


def label(spec: str) -> str:
    """The name under which a reward is logged.

    >>> label("number"), label("mine.py:format=0.2")
    ('number', 'format')
    """
    return split(spec)[0].rpartition(":")[2]


def named(spec: str) -> Callable[..., Any]:
    """The function that a name of REWARDS or FILE.py:NAME stands for. Raises Refused, in one line."""
    from nanorl.config import Refused  # config.py reads this file

    path, _, name = spec.rpartition(":")
    if not path:
        if name not in REWARDS:
            raise Refused(f"--reward {spec}: no such verifier; there are {', '.join(REWARDS)}, or FILE.py:NAME")
        return REWARDS[name]
    try:
        found = importlib.util.spec_from_file_location(f"nanorl_reward_{Path(path).stem}", path)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    except Exception as error:
        raise Refused(f"--reward {spec}: {path} cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(getattr(module, name, None)):
        raise Refused(f"--reward {spec}: {path} has no function {name}")
    return getattr(module, name)


class Unusable(ValueError):
    """A reward told no finite number. `kind`: "none" where it told None, else "nan"."""

    def __init__(self, line: str, kind: str):
        super().__init__(line)
        self.kind = kind


def finite(told: Any, name: str, number: int) -> float:
    """What reward `name` told of prompt `number`, as a float. Raises Unusable unless that is a finite number."""
    if getattr(told, "shape", None) == ():  # numpy's and torch's scalars
        told = told.item()
    if not (isinstance(told, Real) and abs(told) <= sys.float_info.max):  # NaN is never below anything
        kind = "none" if told is None else "nan"
        raise Unusable(f"reward {name} gave {reprlib.repr(told)} for prompt {number}; it must be a finite number", kind)
    return float(told)


async def score(reward: Callable[..., float | Awaitable[float]], prompt: Prompt, completion: str,
                completion_ids: Sequence[int]) -> float:  # fmt: skip
    """What the reward says of one completion, as a finite float.

    Raises Unusable for None, NaN, ±inf and whatever else is no number: a broken reward must not pass for a low one.
    """
    told = reward(prompt.text, completion, prompt.ids, completion_ids, prompt.answer, **prompt.row)
    if inspect.isawaitable(told):
        told = await told
    return finite(told, getattr(reward, "__name__", repr(reward)), prompt.number)
