r"""Which number does a text end on? The number after the last mark, in the last box, or else the last one written.

Models write one number in many ways: 9{,}500, $9,500.00, \frac{19000}{2}, **9500**. Here LaTeX and Markdown are made
plain first; then one pattern knows what a number looks like, and others what must not stand beside it, for then it
is part of something larger. When in doubt there is no number. Only the standard library is imported.
"""

from __future__ import annotations

import re
from fractions import Fraction

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


def value(text: str, bare: bool = False) -> Fraction | None:
    """The number that a text gives as its answer, None if there is not exactly one. `bare`: with no mark in it the
    text has to be the answer itself, not prose that ends on it."""
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    if mark := last(MARK, text):
        return single(sentence(text[mark.end() :]))
    if (box := boxed(text)) is not None or bare:
        return single(text if box is None else box)
    found = last(NUMBER, text)
    return lone(text, found) if found else None


def boxed(text: str) -> str | None:
    r"""What the last \boxed{} or \fbox{} holds; None without one. A box that is cut off holds "": an earlier one is
    not what the text ends on.

    >>> boxed(r"\boxed{1}, no: \boxed{2{,}500} m")
    '2{,}500'
    """
    box = last(BOX, text)
    if box is None:
        return None
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, box.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[box.end() : brace.start()]
    return ""


def sentence(text: str) -> str:
    """Up to the end of the line or of the first sentence.

    >>> sentence("3.5 m. That is all.")
    '3.5 m'
    """
    return re.split(r"\n|[.!?;](?=\s|$)", text, maxsplit=1)[0]


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
