r"""How is a formula written? LaTeX and Unicode in one spelling, cut at its commas, and what of it may be parsed at all.

Clean text is LaTeX with \frac{a}{b}, \sqrt{a} and no \left, no spacing, no units; «a, b» is a set, and ± < > ≤ ≥ ≠ ∈
stand for their commands. Standard library only; `symbolic.py` gives clean text to a parser.
"""

from __future__ import annotations

import re
from math import prod

MAX_SCALAR, MAX_DEPTH, MAX_NUMERAL = 200, 10, 40  # characters; brackets within each other; digits
MAX_WORK, MAX_ROOT = 20_000, 600  # digits that evaluating may make, and where there is a root to find of them

GREEK = "alpha beta gamma delta epsilon theta lambda mu rho sigma tau phi omega pi".split()
KNOWN = {*GREEK, *"frac sqrt binom infty cdot times div sin cos tan cot sec csc arcsin arccos arctan log ln exp".split()}
UNITS = (r"(?:square|sq\.?|cubic)?\s?(?:[cmk]?m|mm|in|ft|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|met(?:er|re)s?"
         r"|(?:centi|milli|kilo)met(?:er|re)s?|units?|deg(?:rees?)?|rad(?:ians?)?|dollars?|cents?|hours?|hrs?|minutes?"
         r"|mins?|seconds?|secs?|days?|weeks?|months?|years?|k?g|grams?|kilograms?|lit(?:er|re)s?|mph|percent)")
TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname) ?\{([^{}]*)\}"

UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "°": "",
    "∪": r"\cup ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "‘": "'", "’": "'",
})  # fmt: skip
STEPS = [(re.compile(pattern), new) for pattern, new in (
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?", ""),
    (r"(?<!\\)\\[,;:! ]|~|\\q?quad\b|\\\(|\\\)|\\\[|\\\](?!\w)|\\?\$", " "),
    (r"<\|?/?[A-Za-z][^<>\n]{0,30}>|\*\*(?=\S[^*]*\*\*)|(?<=\S)\*\*(?=[\s.]|$)", " "),  # tags, bold
    (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree\b|\\?%", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac ?([0-9A-Za-z])", r"\\frac{\1}"),
    (r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}"),
    (r"_ ?([0-9A-Za-z])", r"_{\1}"),
    (r"\\sqrt ?([0-9A-Za-z])", r"\\sqrt{\1}"),
    (r"√ ?(?:([0-9]+|[a-z])|\(([^()]*)\))", r"\\sqrt{\1\2}"),
    (r"\bsqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"\*\*", "^"),
    (r"(?<=[0-9])\{,\}(?=[0-9]{3})", ""),
    (r"^([-+]?)([0-9]{1,3}),([0-9]{3})(?![0-9,])(?=[^,]*$)", r"\1\2\3"),  # 10,000\pi
    (r"\\\{|\\lbrace\b", "«"), (r"\\\}|\\rbrace\b", "»"),
    (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=", "≤"), (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", "≥"),
    (r"\\(?:neq|ne)(?![A-Za-z])|!=", "≠"), (r"\\lt\b", "<"), (r"\\gt\b", ">"), (r"\\in(?![A-Za-z])", "∈"),
    (r"\\pm(?![A-Za-z])|\+/-|\+-", "±"), (r"\\(?:land|wedge|lor|vee)\b", " or "),
    (r"\\(?:text|mathrm|mbox) ?\{ *(or|and|,) *\}", r" \1 "),
    (TEXT, r"\\text{\1}"),
    (rf"(?<=[0-9}}\])A-Za-z]) *(?:\\text\{{[^{{}}]*\}}|(?<=[\s0-9}}]){UNITS})(?: ?\^ ?\{{?[23]\}}?)?[\s.]*$", ""),
    (r"(?<![\\A-Za-z0-9.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)(?![0-9.])", r"\1\\times 10^{\2}"),
    (r"(?<![0-9./^}])([0-9]+) ?\\frac ?\{([0-9]+)\} ?\{([0-9]+)\}", r"(\1+\\frac{\2}{\3})"),
    (r"(?<![\w}.)/^])([0-9]+)/([0-9]+)(?=[A-Za-z\\(])", r"\\frac{\1}{\2}"),  # 1/2x is half of x
    (r"\s+", " "),
)]  # fmt: skip
NAME = re.compile(rf"(?:m? ?\\angle ?)?[A-Za-z]{{1,3}}(?:_(?:\w|\{{\w+\}}))?'?(?: ?\([a-z](?:, ?[a-z])*\))?"
                  rf"|\\(?:{'|'.join(GREEK[:-1])}) ?|\( ?[a-z](?: ?, ?[a-z])+ ?\)|\\text\{{[^{{}}]*\}}")  # fmt: skip
OPENS, CLOSES = "([{«", ")]}»"


def clean(text: str) -> str:
    r"""The one spelling.

    >>> clean(r"$\left(\dfrac12,\, 2\tfrac{1}{2}\right]$"), clean(r"4\sqrt2\text{ cm}^2.")
    ('(\\frac{1}{2}, (2+\\frac{1}{2})]', '4\\sqrt{2}')
    """
    text = text.translate(UNICODE).strip().rstrip(".,;")
    for pattern, new in STEPS:
        text = pattern.sub(new, text)
    return text.strip()


def squeezed(text: str) -> str:
    """Without white space and needless braces: x_{1} is x_1."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s", "", text))


def cut(text: str, pattern: str) -> list[str]:
    """The pieces between matches that stand outside of all brackets; a pattern with a group keeps the matches.

    >>> cut("1, (2, 3), 4", ",")
    ['1', ' (2, 3)', ' 4']
    """
    pieces, start, depth = [], 0, 0
    for found in re.finditer(rf"[(\[{{«]|[)\]}}»]|{pattern}", text):
        if found[0] in (*OPENS, *CLOSES):
            depth += 1 if found[0] in OPENS else -1
        elif depth == 0:
            pieces += [text[start : found.start()], *found.groups()]
            start = found.end()
    return [*pieces, text[start:]]


def allowed(text: str) -> bool:
    """A scalar that may be parsed and worked out: known commands, brackets that close, bounded exponents and numerals."""
    if not 0 < len(text) <= MAX_SCALAR or re.search(r"[^A-Za-z0-9\s\\+*/^_(){}\[\]|.!-]|[0-9]\s+[0-9]|/ ?/", text):
        return False
    if not KNOWN.issuperset(re.findall(r"\\([A-Za-z]+)", text)) or re.search(r"\\(?![A-Za-z])", text):
        return False
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]{4,}", text) or re.search(rf"[0-9]{{{MAX_NUMERAL + 1}}}", text):
        return False
    open_ends = []
    for c in text:
        if c in OPENS:
            open_ends.append(CLOSES[OPENS.index(c)])
        elif c in CLOSES and (not open_ends or open_ends.pop() != c):
            return False
        if len(open_ends) > MAX_DEPTH:
            return False
    return not open_ends and bounded(text)


def bounded(text: str) -> bool:
    """Working it out makes no number of too many digits: its digits, times all exponents, are few; no power of a power
    of a number stands in an exponent, and no factorial or binomial is of more than four digits, or of another."""
    if re.search(r"[)}!|] ?!|[0-9]{5,} ?!|! ?\^|\\binom(?! ?\{(?:[0-9]{1,4}|[a-z])\} ?\{(?:[0-9]{1,4}|[a-z])\})", text):
        return False
    exponents = []
    for mark in re.finditer(r"\^ ?", text):
        group = exponent(text, mark.end())
        if re.search(r"[0-9)}\]] ?\^|!|\\binom", group) or re.match(r" ?\^", text[mark.end() + len(group) :]):
            return False
        exponents += [int(n) for n in re.findall(r"[0-9]+", group)]
    digits = sum(map(len, re.findall(r"[0-9]+", text))) + 4 * sum(int(n) for n in re.findall(r"([0-9]+) ?!", text))
    digits += sum(map(int, re.findall(r"\\binom ?\{([0-9]+)\}", text)))
    limit = MAX_ROOT if re.search(r"\\sqrt|\^ ?\{[^{}]*(?:/|\\frac|\.)", text) else MAX_WORK
    return len(exponents) <= 24 and digits * prod(max(1, n) for n in exponents) <= limit


def exponent(text: str, at: int) -> str:
    """The group or the one token that starts here."""
    if text[at : at + 1] not in tuple("{("):
        return re.match(r"[-+]?(?:[0-9.]+|\\?[A-Za-z]*)", text[at:])[0]
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] in OPENS) - (text[end] in CLOSES)
        if depth == 0:
            return text[at : end + 1]
    return text[at:]
