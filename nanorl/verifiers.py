"""Which letter, how many, in which form? Short verifiers beside `exact` and `number`, and two penalties.

Pure functions from text to a number, with the signature of every reward; `reward.REWARDS` names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nanorl.numeral import boxed, last, value
from nanorl.reward import exact

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


def arithmetic(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
               **row: Any) -> float:  # fmt: skip
    """`exact`, and logs beside it whether the completion shows its working: the task arithmetic's own reward."""
    from nanorl.monitor import log  # here: the other verifiers need none of what it imports

    log("worked", "(" in completion)
    return exact(prompt, completion, prompt_ids, completion_ids, answer, **row)


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


def names_option(answer: str) -> bool:
    """The answer is a letter that `choice` can judge by."""
    return choice("", answer, (), (), answer) == 1.0


def counts(answer: str) -> bool:
    """The answer is a whole number that `count` can judge by."""
    return count("", answer, (), (), answer) == 1.0


def chosen(completion: str) -> str | None:
    """The one letter that a completion chooses, as a capital; None if it chooses none or several."""
    if (held := boxed(completion)) is None and (tag := last(ANSWER_TAG, completion)):
        held = tag[1]
    said = last(SAYS, completion)
    if held is not None:
        text = re.sub(r"\\(?:text|textbf|mathrm|mathbf) ?", "", held)
    elif said:
        text = re.split(r"\n|\.\s|<\|", completion[said.end() :], maxsplit=1)[0]
    else:
        text = SPECIAL.sub("", completion[-4000:]).rpartition("\n")[2]
    letter = OPTION.match(text)
    if letter is None:
        return None
    rest = text[letter.end() :]
    plain = letter[0].strip() in "abcde" or not (said or held)  # "a" may be the article, and a line any prose
    if MORE.search(rest) or (plain and rest.strip() and rest[0] not in ".):," and ")" not in letter[0]):
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
