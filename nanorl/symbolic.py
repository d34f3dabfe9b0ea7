r"""Is it the same mathematics? \boxed{} answers that are more than a number: roots, algebra, sets, intervals, equations.

    clean: LaTeX in one spelling  →  shape: lists, pairs, relations, down to scalars  →  equal, part by part

Scalars are read by math-verify's parser (latex2sympy) and compared by value: worked out to 50 digits at four points,
they must agree to 40. math-verify's own comparison is not asked: it rounds (1/2006! is 1/2004!), takes abc for bca,
simplifies without an end, and its time limit is a signal, which only a main thread may have. The parser sees short
texts only, of known commands and with bounded exponents, so that no power tower is ever built.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import latex2sympy
from sympy import Float, I, Rational, Symbol, nan, oo, zoo

from nanorl.notation import NAME, allowed, clean, cut, squeezed
from nanorl.numeral import MARK, boxed, last, sentence, value

MAX_LENGTH, MAX_PARTS = 400, 24  # characters and parts of an answer
DIGITS, AGREE, POINTS = 50, 40, 4  # decimal digits worked out, and those that have to agree; points
SAYS = re.compile(r"\banswer\b(?: is\b|\s*:)[\s:*]{0,6}", re.IGNORECASE)
FORMULA = re.compile(r"\$([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[([^$]{1,400}?)\\\]")
SYMBOL_MARK = re.compile(r"(?<!#)####\s*(?=[-+]?(?:[.0-9({\[]|\\[A-Za-z{]))")
MATRIX = re.compile(r"\\begin\{([pbvB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
RELATION = re.compile(r"(<|>|≤|≥|≠|=|∈)")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
WORD = re.compile(r"\\text\{([^{}]*)\}|([A-Za-z]{4,}|yes|no)|([0-9]{1,3} ?: ?[0-9]{1,3})|([0-9]+_\{[0-9]+\})"
                  r"|([-+]?[0-9.]*\\(?:overline|overrightarrow|vec|mathbb) ?\{[0-9A-Za-z]+\}|\\emptyset|\\varnothing)")
PRODUCT = re.compile(r"[0-9][A-Za-z]{2,3}$")  # 2ab: no number with a unit, as `number` takes it; 2km is clean 2
NO_WORDS = ("nan", "inf", "null", "")

Shape = tuple[Any, ...]  # (kind, …): scalar text | word text | list parts | pair brackets parts | matrix rows | …


def math(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
         **row: Any) -> float:  # fmt: skip
    r"""1 if what the completion ends on is the same mathematics as the answer; else 0.

    Where both are one number, `number` decides. Otherwise the answer is, in this order, what follows the last ####,
    the last \boxed{}, <answer>, "answer is", or the last formula. Order counts in pairs, intervals and matrices, not
    in lists and sets. A gold of two values (±3) is not met by one, nor a symbolic gold by its decimals.

    >>> math("", r"\boxed{\frac{2}{\sqrt{2}}}", (), (), r"\sqrt2"), math("", r"\boxed{1.41}", (), (), r"\sqrt2")
    (1.0, 0.0)
    """
    meant, told = value(answer, bare=True), value(completion)
    texts = gold_text(answer), ending(completion)
    if meant is not None and told is not None and not any(PRODUCT.search(clean(text[-99:])) for text in texts):
        return float(meant == told)
    meant, told = map(shaped, texts)
    return float(meant is not None and told is not None and equal(meant, told))


def geometry(prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str,
             **row: Any) -> float:  # fmt: skip
    r"""`math` for Geometry3K: a symbolic gold (2\sqrt{221}) stays symbolic; what an angle or a side is called, x, AB or
    m\angle A, is no part of the answer.

    >>> geometry("", r"So \boxed{AB = 2\sqrt{221}\text{ cm}}", (), (), r"2 \sqrt { 221 }")
    1.0
    """
    held = ending(completion).rpartition("=")[2]
    return math(prompt, rf"\boxed{{{held}}}" if held else completion, prompt_ids, completion_ids,
                gold_text(answer).rpartition("=")[2])  # fmt: skip


def readable(answer: str) -> bool:
    """`math` can judge against this answer: it is one number, or has a shape whose every part may be parsed."""
    return value(answer, bare=True) is not None or shaped(gold_text(answer)) is not None


def gold_text(answer: str) -> str:
    """A gold's answer: what its mark or its box holds, or the whole of it."""
    if mark := last(MARK, answer):
        return sentence(answer[mark.end() :])
    held = boxed(answer)
    return answer if held is None else held


def ending(completion: str) -> str:
    """What a completion gives as its answer; "" if it gives none."""
    if mark := last(SYMBOL_MARK, completion):
        return sentence(completion[mark.end() : mark.end() + MAX_LENGTH + 1])
    if (held := boxed(completion)) is not None:
        return held
    before, tag, held = completion.rpartition("<answer>")
    if tag:
        return held.partition("</answer>")[0]
    tail = completion[-4000:]
    if said := last(SAYS, tail):
        return sentence(tail[said.end() :])
    formula = last(FORMULA, tail)
    return "" if formula is None or re.search(r"[0-9]", tail[formula.end() :]) else next(filter(None, formula.groups()))


@lru_cache(1024)
def shaped(text: str) -> Shape | None:
    """The shape of an answer as it was written; None if it has none, or is too long."""
    return shape(clean(text)) if len(text) <= MAX_LENGTH else None


# ------------------------------------------------------------------------------------------------ shapes


def shape(text: str) -> Shape | None:
    """The shape of a clean text; None if some part of it cannot be read."""
    text = text.strip()
    if text.lower() in NO_WORDS:
        return None
    if matrix := MATRIX.fullmatch(text):
        rows = [cut(row, r"&") for row in cut(matrix[2].strip().removesuffix("\\\\"), r"\\\\")]
        return parts("matrix", [parts("row", [shape(cell) for cell in row]) for row in rows])
    if len(pieces := cut(text, r"\\cup")) > 1:
        return parts("list", [shape(piece) for piece in pieces])
    if len(pieces := cut(text, r",|;|\bor\b|\band\b")) > 1:
        pieces = [piece for piece in pieces if piece.strip()] if len(pieces) > 2 else pieces  # 1, 2, and 3
        return named(parts("list", [shape(piece) for piece in pieces]))
    if len(pieces := cut(text, RELATION.pattern)) > 1:
        return relation([piece.strip() for piece in pieces])
    if word := WORD.fullmatch(text):
        inner = word[1].strip(" .()") if word[1] is not None else text
        if word[1] is not None and (len(inner) == 1 or re.search(r"[^A-Za-z ]", inner)):
            return shape(inner)
        return ("word", re.sub(r"[{}\s]", "", inner if "\\" in inner else inner.lower())) if inner.strip() else None
    return brackets(text) or signs(text) or (("scalar", text) if allowed(text) else None)


def parts(kind: str, found: list[Shape | None]) -> Shape | None:
    """A shape of these parts; None if one of them is none, or they are too many."""
    return (kind, tuple(found)) if None not in found and 0 < len(found) <= MAX_PARTS else None


def named(listed: Shape | None) -> Shape | None:
    """x = 1, 2 names both."""
    if listed is None or listed[1][0][0] != "named":
        return listed
    name = listed[1][0][1]
    return ("list", tuple(part if part[0] == "named" else ("named", name, part) for part in listed[1]))


def brackets(text: str) -> Shape | None:
    """(a, b), [a, b) and the like, whose ends are kept; sets {a, b}, as lists; None without brackets around it all."""
    depth, ends = 0, (text[:1], text[-1:])
    if ends[0] not in tuple("([«") or ends[1] not in tuple(")]»"):
        return None
    for at, c in enumerate(text):
        depth += (c in "([«") - (c in ")]»")
        if depth == 0 and at < len(text) - 1:
            return None
    inner = cut(text[1:-1], ",")
    if depth or len(inner) == 1 and "«" not in ends:
        return shape(inner[0]) if not depth and ends in (("(", ")"), ("[", "]")) else None
    found = [shape(piece) for piece in inner]
    if "«" in ends:
        distinct = [a for i, a in enumerate(found) if not any(a and b and equal(a, b) for b in found[:i])]
        return parts("list", distinct) if ends == ("«", "»") else None
    made = parts("tuple", found)
    return None if made is None else (*made, ends[0] + ends[1])


def signs(text: str) -> Shape | None:
    r"""a \pm b is the list of both; None without ±, or with a second."""
    if text.count("±") != 1:
        return None
    return parts("list", [shape(text.replace("±", sign)) for sign in "+-"])


def relation(pieces: list[str]) -> Shape | None:
    """Of [left, sign, right, …]: x = a names a; x < a and a < x < b are intervals; another equation is its difference."""
    terms, ops = pieces[::2], pieces[1::2]
    if all(NAME.fullmatch(x) is None for x in terms) and len(ops) == 1 and ops[0] in "=≠<>≤≥":
        sides = [shape(x) for x in terms]
        scalars = all(side is not None and side[0] == "scalar" for side in sides)
        left, right, op = (*terms, ops[0]) if ops[0] not in ">≥" else (terms[1], terms[0], FLIPPED[ops[0]])
        return ("relation", op, left, right) if scalars else None
    if set(ops) == {"="} and NAME.fullmatch(terms[0]) or ops == ["∈"] or set(ops) == {"≠"}:
        found = shape(terms[-1])
        name = squeezed(terms[0]) + ("≠" if ops[0] == "≠" else "")
        return None if found is None or len(ops) > 3 else ("named", name, found)
    if ops == ["="] and NAME.fullmatch(terms[1]):
        return relation([terms[1], "=", terms[0]])
    return interval(terms, ops)


def interval(terms: list[str], ops: list[str]) -> Shape | None:
    """x < a, a > x, a < x ≤ b, as (−∞, a) and (a, b], named x."""
    if not set(ops) <= set(FLIPPED):
        return None
    if len(ops) == 1 and NAME.fullmatch(terms[0]) is None:
        terms, ops = terms[::-1], [FLIPPED[ops[0]]]
    if len(ops) == 2 and set(ops) <= {">", "≥"}:
        terms, ops = terms[::-1], [FLIPPED[op] for op in ops[::-1]]
    if len(ops) == 1:
        up = ops[0] in ">≥"
        name, ends, (low, high) = terms[0], (ops[0] if up else "<", "<" if up else ops[0]), \
            ((terms[1], r"\infty") if up else (r"-\infty", terms[1]))  # fmt: skip
    elif len(ops) == 2 and set(ops) <= {"<", "≤"} and NAME.fullmatch(terms[1]):
        name, ends, (low, high) = terms[1], ops, terms[::2]
    else:
        return None
    made = parts("tuple", [shape(low), shape(high)])
    brackets = ("[" if ends[0] in "≤≥" else "(") + ("]" if ends[1] in "≤≥" else ")")
    return None if made is None else ("named", squeezed(name), (*made, brackets))


# ------------------------------------------------------------------------------------------------ equality


def equal(a: Shape, b: Shape) -> bool:
    """Two shapes mean the same. A name counts where both have one; an unnamed one may be any."""
    if "relation" in (a[0], b[0]):
        return same_relation(a, b)
    if a[0] == b[0] == "named":
        return a[1] == b[1] and equal(a[2], b[2])
    if "named" in (a[0], b[0]):
        bare, name = (a[2], a[1]) if a[0] == "named" else (b[2], b[1])
        return not name.endswith("≠") and equal(bare, b if a[0] == "named" else a)
    if a[0] != b[0]:
        return False
    if a[0] == "scalar":
        return same_scalar(a[1], b[1])
    if a[0] == "word":
        return a == b
    if len(a[1]) != len(b[1]) or a[2:] != b[2:]:
        return False
    if a[0] != "list":
        return all(map(equal, a[1], b[1]))
    rest = list(b[1])
    for part in a[1]:  # equality is transitive, so the first that fits may be taken
        fit = next((i for i, other in enumerate(rest) if equal(part, other)), None)
        if fit is None:
            return False
        del rest[fit]
    return True


def same_relation(a: Shape, b: Shape) -> bool:
    """Two equations are one if their differences have a constant ratio, inequalities if that ratio is positive too."""
    pairs = [(x[1], x[2], x[3]) if x[0] == "relation" else ("=", x[1], x[2][1])
             for x in (a, b) if x[0] == "relation" or x[0] == "named" and x[2][0] == "scalar"]  # fmt: skip
    sides = [values(text) for _, *texts in pairs for text in texts]
    if len(pairs) < 2 or pairs[0][0] != pairs[1][0] or not all(sides):
        return False
    left, right = ([x - y for x, y in zip(sides[i], sides[i + 1])] for i in (0, 2))
    if any(abs(x) < 10**-AGREE for x in (*left, *right)):  # always true, or not to be told from it
        return False
    ratio = left[0] / right[0]
    constant = all(abs(x / y - ratio) < 10**-AGREE * abs(ratio) for x, y in zip(left, right))
    return constant and (pairs[0][0] in "=≠" or ratio.is_extended_positive is True)


def same_scalar(a: str, b: str) -> bool:
    """Two texts have the same value at every point; or, where they are beyond reading, the same characters."""
    if set(re.findall(r"(?<![\\A-Za-z])[A-Z]", a)) != set(re.findall(r"(?<![\\A-Za-z])[A-Z]", b)):
        return False  # the parser takes C for c
    left, right = values(a), values(b)
    if left is None or right is None:
        return left is right and squeezed(a) == squeezed(b)
    if left and right and all(x.is_Rational for x in left + right):
        return left == right  # exactly: 10^{-99} is not 0
    return len(left) == len(right) > 0 and all(
        x == y or no_digit(x) and no_digit(y) or abs(x - y) < 10**-AGREE * max(abs(x), abs(y))
        for x, y in zip(left, right))  # fmt: skip


def no_digit(x: Any) -> bool:
    """A value of which all digits cancelled, √2·√3 − √6: it is 0 as far as can be told. 10^{-99} has its digits."""
    return x == 0 or all(part._prec < 10 for part in x.atoms(Float)) and bool(x.atoms(Float))


@lru_cache(1024)
def values(text: str) -> tuple[Any, ...] | None:
    """A scalar's values at four points of both signs; () if one is not finite, None if the text cannot be parsed."""
    exact = re.sub(r"([0-9]*)\.([0-9]+)", lambda n: rf"(\frac{{{n[1]}{n[2]}}}{{1{'0' * len(n[2])}}})", text)
    try:
        read = latex2sympy(exact, normalization_config=None)
        free, found = read.free_symbols, []
        for k in range(POINTS if free else 1):
            worth = read.xreplace({x: I if x.name == "i" else point(x.name, k) for x in free}).doit()
            found.append(worth if worth.is_Rational or worth in (oo, -oo) else worth.evalf(DIGITS))
    except MemoryError:  # a limit was passed, which is no verdict: the scorer counts it
        raise
    except Exception:  # whatever the parser or sympy says of a text that is no mathematics: it earns nothing
        return None
    if any(x.has(nan, zoo) or x.atoms(Symbol) or not (x.is_number and x.is_finite or x in (oo, -oo)) for x in found):
        return ()
    return tuple(found if free else found * POINTS)


def point(name: str, k: int) -> Rational:
    """The value of a variable at point k: a fraction between −2 and 2, which no formula was written for."""
    return Rational(zlib.crc32(f"{name}{k}".encode()) % 4001 - 2000, 997)
