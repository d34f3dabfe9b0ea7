"""Does an expression make the target from these numbers? Countdown: its reader, its verifier and its problems.

    from 3, 5 and 7 make 15      <answer>3+5+7</answer>

The answer is text of a model and is never run: a reader of four rules works it out in exact fractions.

    sum     = product (("+" | "−") product)*
    product = factor (("×" | "÷") factor)*
    factor  = "−"* (number | "(" sum ")")
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from nanorl.numeral import boxed, last, sentence

MAX_LENGTH = 400  # characters of an expression; ten numbers need under 100
MAX_DEPTH = 40  # parentheses within each other
TOKEN = re.compile(r"\s*(?:([0-9]{1,9})(?![0-9])|([-+*/()]))")
SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "∶": "/", "[": "(", "]": ")"})
LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), ("$", ""), ("**", "^"))
TAG = re.compile(r"<answer>([^<]{0,1000})(?:</answer>|\Z)")
GOLD = re.compile(r"\s*target\s*=\s*(-?[0-9]{1,12})\s*;\s*numbers\s*=\s*([0-9]{1,9}(?:\s*,\s*[0-9]{1,9})*)\s*")


def countdown(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
              **row: Any) -> float:  # fmt: skip
    """1 if the completion's expression is the target, as an exact fraction, and uses each number exactly once; else 0.

    The answer reads target=15;numbers=3,5,7. The expression stands in the last <answer>, the last box or the last
    line; = TARGET may follow it, and has to be true. Only + − × ÷ ( ) and the given numbers are read: no powers, no
    decimals, no digits joined to a new number, no factor without its sign.

    >>> countdown("", "<answer>(7 - 5) × 3 = 6</answer>", (), (), "target=6;numbers=3,5,7")
    1.0
    """
    gold = GOLD.fullmatch(answer)
    found = evaluate(expression(completion)) if gold else None
    if found is None:
        return 0.0
    total, used = found
    return float(total == int(gold[1]) and sorted(used) == sorted(map(int, gold[2].split(","))))


def readable(answer: str) -> bool:
    """The answer reads target=…;numbers=…."""
    return GOLD.fullmatch(answer) is not None


def expression(completion: str) -> str:
    """The completion's expression, without the = and the total behind it; "" if there is none, or that is not true."""
    held = last(TAG, completion)
    text = held[1] if held else boxed(completion)
    if text is None:
        text = completion[-2000:].strip().rpartition("\n")[2].removeprefix("####")
        text = sentence(text.rpartition(":")[2]).rstrip(". ")
    text = text.translate(SIGNS)
    for name, sign in LATEX:
        text = text.replace(name, sign)
    told, equals, total = text.partition("=")
    value = evaluate(total) if equals else None
    if equals and (value is None or (found := evaluate(told)) is None or found[0] != value[0]):
        return ""
    return told


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None if it is none, divides by 0, or is too long or deep.

    >>> evaluate("6 / (1 - 3/4)")
    (Fraction(24, 1), [6, 1, 3, 4])
    """
    tokens, at, text = [], 0, text.strip()
    while at < len(text) <= MAX_LENGTH and (token := TOKEN.match(text, at)):
        tokens.append(token[1] or token[2])
        at = token.end()
    if at < len(text) or not text:
        return None
    used: list[int] = []
    try:
        total = addition(tokens, used, 0)
    except (IndexError, ValueError, ZeroDivisionError):  # ends too early; something else stands there; x/0
        return None
    return (total, used) if not tokens else None


def addition(tokens: list[str], used: list[int], depth: int) -> Fraction:
    """A sum at the head of the tokens, which it takes away; the numbers that it meets are added to `used`."""
    total = product(tokens, used, depth)
    while tokens and tokens[0] in "+-":
        sign = tokens.pop(0)
        term = product(tokens, used, depth)
        total += term if sign == "+" else -term
    return total


def product(tokens: list[str], used: list[int], depth: int) -> Fraction:
    """A product at the head of the tokens, worked out from the left."""
    total = factor(tokens, used, depth)
    while tokens and tokens[0] in "*/":
        sign = tokens.pop(0)
        by = factor(tokens, used, depth)
        total = total * by if sign == "*" else total / by
    return total


def factor(tokens: list[str], used: list[int], depth: int) -> Fraction:
    """A number, a sum in parentheses, or either with a minus. Raises ValueError for anything else, or too deep."""
    token = tokens.pop(0)
    if token == "-" and depth < MAX_DEPTH:
        return -factor(tokens, used, depth + 1)
    if token == "(" and depth < MAX_DEPTH:
        total = addition(tokens, used, depth + 1)
        if tokens.pop(0) != ")":
            raise ValueError("an open parenthesis")
        return total
    used.append(int(token))
    return Fraction(used[-1])


def problem(key: str, held_out: bool) -> tuple[list[int], int, str]:
    """The numbers (three or four), the target and an expression that makes it: the first of this key's stream of random
    numbers that belongs to the part. A 16th of all problems is held out, by a hash of what makes them one problem."""
    rng = random.Random(key)
    while True:
        numbers, target, solution = grown(rng, rng.choice((3, 4)))
        if held_out == (zlib.crc32(f"{sorted(numbers)} {target}".encode()) % 16 == 0):
            return numbers, target, solution


def asked(numbers: Sequence[int], target: int) -> tuple[str, str]:
    """The question, and the answer that it is judged by."""
    listed = ", ".join(map(str, numbers))
    return (f"Use the numbers {listed}, each exactly once, with + - * / and parentheses to make {target}.",
            f"target={target};numbers={listed.replace(' ', '')}")  # fmt: skip


def grown(rng: random.Random, count: int) -> tuple[list[int], int, str]:
    """So many numbers from 1 to 50, a target from 1 to 200 and an expression that makes it: a tree grown at random.

    Two of the values at hand, drawn at random, become one by an operation that leaves a whole number above 0.
    """
    while True:
        numbers = [rng.randint(1, 50) for _ in range(count)]
        at_hand = [(n, str(n)) for n in numbers]
        while len(at_hand) > 1:
            (a, left), (b, right) = (at_hand.pop(rng.randrange(len(at_hand))) for _ in range(2))
            ways = [(a + b, "+"), (a * b, "*"), (a - b, "-"), (a // b, "/")]
            ways = ways[: 4 if a % b == 0 else 3] if a > b else ways[:2]
            total, sign = rng.choice(ways)
            at_hand.append((total, f"({left} {sign} {right})"))
        target, solution = at_hand[0]
        if target <= 200:
            return numbers, target, solution.removeprefix("(").removesuffix(")")
