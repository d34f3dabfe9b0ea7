"""What is it worth? Verifiers, and one safe way to call a reward.

A reward is any function, sync or async, called positionally with what was asked and what was answered:

    reward(prompt, completion, prompt_ids, completion_ids, answer, **row) → float

`row` holds the problem's other fields. The short verifiers are here; `math` and `geometry` (`symbolic.py`) and
`countdown` (`countdown.py`) are imported when they are named. All read the completion and never the prompt, evaluate
no code, and when in doubt pay nothing: a wrong answer that is paid is learned. Only the standard library is imported,
so that a process that scores starts at once. `notes/rewards.md` says how rewards fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import reprlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nanorl.numeral import boxed, last, value

if TYPE_CHECKING:
    from nanorl.sample import Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SPECIAL = re.compile(r"(?:\s|<\|[^<>|\n]{1,40}\|>|</?s>)*\Z")  # <|im_end|>: what is left of the chat's own marks
WORDS = dict(zip("""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty""".split(), map(str, range(21))))  # fmt: skip
WORD = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(WORDS, reverse=True))})(?![\w-])", re.IGNORECASE)
ANSWER_TAG = re.compile(r"<answer>([^<]{0,200})(?:</answer>|\Z)")
OPTION = re.compile(r"[\s*_$({\[]{0,6}([A-Ea-e])(?![\w'’])[\s*_$)}\]]{0,6}")  # B, (B), **b**, {B}
SAYS = re.compile(r"\b(?:answer|option|choice)\b(?:\s+(?:is|should be|must be)\b|\s*[:=])[\s:*_]{0,6}"
                  r"(?:option|choice|letter|\\text)?(?=[\s*_$({\[]{0,6}[A-Ea-e](?![\w'’]))", re.IGNORECASE)  # fmt: skip
MORE = re.compile(r"(?<![\w'’])(?:[A-E](?![\w'’])|or\b|and [a-e](?![\w'’]))|[,/&] ?[a-e](?![\w'’])")
NGRAM = 4  # words; shorter ones repeat in good prose, too


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


def arithmetic(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
               **row: Any) -> float:  # fmt: skip
    """`exact`, and logs beside it whether the completion shows its working: the task arithmetic's own reward."""
    from nanorl.monitor import log  # here: monitor imports the flags, and those import this file

    log("worked", "(" in completion)
    return exact(prompt, completion, prompt_ids, completion_ids, answer, **row)


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


def count(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
          **row: Any) -> float:  # fmt: skip
    """1 if the completion ends on the answer's whole number, in digits or, up to twenty, in words; else 0. For CLEVR.

    >>> count("", "<answer>Three.</answer>", (), (), "3")
    1.0
    """
    held = last(ANSWER_TAG, completion)
    told, meant = (value(WORD.sub(lambda word: WORDS[word[0].lower()], text), bare=bare)
                   for text, bare in ((held[1] if held else completion, held is not None), (answer, True)))  # fmt: skip
    return float(meant is not None and meant.denominator == 1 and meant == told)


def choice(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
           **row: Any) -> float:  # fmt: skip
    r"""1 if the completion chooses the answer's letter, A to E in either case; else 0.

    The letter is read, in this order, from the last \boxed{}, the last <answer>, the last "answer is …" or
    "Answer: …", or the last line that is a letter, with or without its text: (B), B., **B** Paris. A second
    letter beside it, or an "or", is a hedge.

    >>> [choice("", text, (), (), "B") for text in ("The answer is (b).", "<answer>A or B</answer>")]
    [1.0, 0.0]
    """
    meant = OPTION.fullmatch(answer.strip().rstrip(".):"))
    return float(meant is not None and meant[1].upper() == chosen(completion))


def chosen(completion: str) -> str | None:
    """The one letter that a completion chooses, as a capital; None if it chooses none or several."""
    if (held := boxed(completion)) is None and (tag := last(ANSWER_TAG, completion)):
        held = tag[1]
    said = last(SAYS, completion)
    if held is not None:
        text = re.sub(r"\\(?:text|textbf|mathrm|mathbf) ?", "", held)
    elif said:
        text = re.split(r"\n|\.\s", completion[said.end() :], maxsplit=1)[0]
    else:
        text = SPECIAL.sub("", completion[-4000:]).rpartition("\n")[2]
    letter = OPTION.match(text)
    if letter is None:
        return None
    rest = text[letter.end() :]
    plain = letter[0].strip() in "abcde" or not (said or held)  # "a" may be the article, and a line any prose
    if MORE.search(rest) or (plain and rest.strip() and rest[0] not in ".):,"):
        return None
    return letter[1].upper()


def format(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
           **row: Any) -> float:  # fmt: skip
    """1 for <think>…</think><answer>…</answer>: each tag once, in this order, text in both, nothing outside; else 0.

    White space and a chat's own end marks around them change nothing.

    >>> format("", "<think>3 and 6</think><answer>9</answer><|im_end|>", (), (), "")
    1.0
    """
    outside, inside, text = [], [], completion
    for tag in TAGS:
        before, found, text = text.partition(tag)
        (outside if tag[1] != "/" else inside).append(before)
        if not found or completion.count(tag) != 1:
            return 0.0
    return float(all(map(str.strip, inside)) and not "".join(outside).strip() and bool(SPECIAL.match(text)))


def length(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
           **row: Any) -> float:  # fmt: skip
    """A penalty, −tokens / 1000 of the completion; its weight says how much: length=0.1 takes 0.1 for 1000 tokens."""
    return -len(completion_ids) / 1000


def repetition(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
               **row: Any) -> float:  # fmt: skip
    """A penalty, the share of runs of four words that have occurred before: (distinct − all) / all, from −1 to 0.

    >>> repetition("", "a b c d a b c d", (), (), "")  # five runs, of which the last is the first
    -0.2
    """
    words = completion.split()
    runs = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return (len(set(runs)) - len(runs)) / len(runs) if runs else 0.0


PENALTIES = ("length", "repetition")  # what they pay at best is 0, and an empty answer gets it
REWARDS: dict[str, Callable[..., float] | str] = {
    "exact": exact, "number": number, "math": "nanorl.symbolic:math", "geometry": "nanorl.symbolic:geometry",
    "countdown": "nanorl.countdown:countdown", "choice": choice, "count": count, "format": format,
    "length": length, "repetition": repetition, "arithmetic": arithmetic,
}  # fmt: skip
READABLE: dict[str, Callable[[str], bool] | str] = {  # can it judge against this answer?
    "number": lambda answer: value(answer, bare=True) is not None,
    "math": "nanorl.symbolic:readable", "geometry": "nanorl.symbolic:readable",
    "countdown": "nanorl.countdown:readable",
    "choice": lambda answer: choice("", answer, (), (), answer) == 1.0,
    "count": lambda answer: count("", answer, (), (), answer) == 1.0,
    "exact": lambda answer: bool(answer.strip()), "arithmetic": lambda answer: bool(answer.strip()),
}  # fmt: skip


def imported(target: Any) -> Any:
    """What a text "module:NAME" names; anything else is itself."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def gold(name: str, answer: str) -> bool:
    """Can this reward judge against this answer at all? Rows for which it cannot are dropped before training. A penalty,
    `format` and a reward of your own are not asked: they take any."""
    return name not in READABLE or imported(READABLE[name])(answer)


def split(spec: str) -> tuple[str, float]:
    """The reward's name and its weight, 1 where none is given.

    >>> split("format=0.2"), split("mine.py:paid")
    (('format', 0.2), ('mine.py:paid', 1.0))
    """
    name, equals, weight = spec.rpartition("=")
    try:
        return (name, float(weight)) if equals else (spec, 1.0)
    except ValueError:  # a file's name may hold an =
        return spec, 1.0


def label(spec: str) -> str:
    """The name under which a reward is logged: its own, without file or weight.

    >>> label("format=0.2"), label("rewards/mine.py:paid=2")
    ('format', 'paid')
    """
    return split(spec)[0].rpartition(":")[2]


def named(spec: str) -> Callable[..., Any]:
    """The reward of a name in REWARDS, or of FILE.py:NAME, whose file is run. A weight behind it is left out.

    Raises Refused in one line where there is none.
    """
    from nanorl.config import Refused  # here: config imports this file

    name = split(spec)[0]
    if name in REWARDS:
        return imported(REWARDS[name])
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise Refused(f"--reward {spec}: no such verifier; there are {', '.join(REWARDS)}, or FILE.py:NAME")
    if not Path(path).is_file():
        raise Refused(f"--reward {spec}: there is no file {path}")
    try:
        module = executed(path)
    except (Exception, SystemExit) as error:  # the user's file may do anything; the line is in the cause
        raise Refused(f"--reward {spec}: {path} cannot be imported ({reprlib.repr(error)})") from error
    if not callable(found := getattr(module, function, None)):
        raise Refused(f"--reward {spec}: {path} has no function {function}")
    return found


@lru_cache
def executed(path: str) -> ModuleType:
    """The module that a file makes. It is run once."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
