"""What the README says is so: its commands, its map, its numbers; and the sizes that keep the code readable."""

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from nanorl import cli, config
from nanorl.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
CODE = sorted((ROOT / "nanorl").glob("*.py"))
SCRIPTS = sorted(ROOT.glob("train_*.py"))
TREES = {path: ast.parse(path.read_text()) for path in (*CODE, *SCRIPTS, *sorted((ROOT / "tests").glob("*.py")))}
PATH = re.search(r"^<!-- path: ([a-z_ ]+) -->\n([^<]*?)\n\n", README, re.MULTILINE)  # a first reader's, and its text
COMMANDS = [
    shlex.split(command.replace(r"$'\n'", "'\n'"), comments=True)  # the one thing of a shell that shlex does not know
    for block in re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    for command in line.split("&&")
    if command.strip()
]


CATALOGUE = "# ---- the catalogue"  # where the first part of advantage.py and of loss.py ends
TRAINS = {"train_grpo.py": "grpo", "train_ppo.py": "ppo"}  # each page and what it trains unless another is named


def length(path):
    """Lines of a file."""
    return len(path.read_text().splitlines())


def read_first(path):
    """Lines of a file that a first reader reads: all, of a catalogue those up to the line that begins it."""
    lines = path.read_text().splitlines()
    return next((i + 1 for i, line in enumerate(lines) if line.startswith(CATALOGUE)), len(lines))


def file_of(name):
    """The file of a name on the first reader's path."""
    return ROOT / f"{name}.py" if name.startswith("train_") else ROOT / "nanorl" / f"{name}.py"


# ------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "python" and c[1] in TRAINS], ids=shlex.join)
def test_a_command_of_the_readme_is_accepted(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    default = TRAINS[words[1]]
    Path("RUN").mkdir()
    job, axes = config.resolved(config.Config()), ALGORITHMS[default].axes
    saved = {"algorithm": default, "config": dataclasses.asdict(job), "axes": dataclasses.asdict(axes)}
    (Path("RUN") / "config.json").write_text(json.dumps(saved))
    if "--help" in words:
        with pytest.raises(SystemExit, match="^0$"):
            cli.parse(words[2:], default)
        assert "--steps" in capsys.readouterr().out
    else:
        _, cfg, _ = cli.parse(words[2:], default)
        assert not any("\\" in text for text in cfg.stop), "a shell leaves \\n in quotes as it is; $'\\n' is a new line"


def test_other_commands_of_the_readme_name_what_is_there():
    assert len([c for c in COMMANDS if c[1:2] == ["train_grpo.py"]]) > 3
    assert any(c[1:2] == ["train_ppo.py"] for c in COMMANDS)
    for words in COMMANDS:
        if words[0] == "python" and words[1] == "-m":
            assert importlib.util.find_spec(words[2])
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file()
        for flag, file in zip(words, words[1:]):
            assert flag != "-r" or (ROOT / file).is_file()


def test_what_is_imported_is_what_the_requirements_install():
    both = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-vllm.txt"))
    required = re.findall(r"^[\w-]+", both, re.MULTILINE)
    with_transformers = {"safetensors", "tokenizers", "jinja2"}  # and torch: chat templates need jinja2
    with_math_verify = {"latex2sympy2_extended", "sympy"}  # its parser, and what that is written in
    known = {*required, *with_transformers, *with_math_verify, *sys.stdlib_module_names}
    imported = {name.split(".")[0] for tree in TREES.values() for node in ast.walk(tree) for name in (
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else
        [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])}  # fmt: skip
    local = {"nanorl", "tests", *(path.stem for path in TREES)}
    assert imported - known - local == set()


# ------------------------------------------------------------------------------------------------ map and numbers


def test_the_map_names_exactly_the_files_that_there_are():
    named = re.findall(r"^\| `([a-z_/]+\.py)` \| \S", README, re.MULTILINE)
    there = [str(path.relative_to(ROOT)) for path in (*CODE, *SCRIPTS) if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_nothing_is_left_to_fill_in():
    for page in (ROOT / "README.md", *sorted((ROOT / "notes").glob("**/*.md"))):
        assert "@@" not in page.read_text() and "TODO" not in page.read_text(), page.name


def test_the_number_of_lines_is_true():
    total = sum(read_first(file_of(name)) for name in PATH[1].split())
    claimed = int(re.search(r"([\d,]+)\s+lines", PATH[2])[1].replace(",", ""))
    assert abs(claimed - total) <= 0.05 * total, f"{total} lines"


def test_the_first_readers_path_is_short():
    names = PATH[1].split()
    assert {*"sample tasks tiny policy reward advantage loss rollout buffer train_grpo".split()} <= {*names}
    assert sum(read_first(file_of(name)) for name in names) <= 1800
    assert [name for name in names if read_first(file_of(name)) < length(file_of(name))] == ["advantage", "loss"]
    for name in names:
        assert name in PATH[2], f"{name} is counted and not named"


# ------------------------------------------------------------------------------------------------ sizes and manners


@pytest.mark.parametrize("path", [*CODE, *SCRIPTS], ids=lambda path: path.stem)
def test_a_file_is_short_and_says_what_it_answers(path):
    assert length(path) < (701 if path.stem in ("advantage", "loss") else 300)
    assert ast.get_docstring(TREES[path]) or path.name == "__init__.py"


def test_the_loop_fits_on_a_page():
    for path in SCRIPTS:
        train = next(node for node in TREES[path].body if isinstance(node, ast.FunctionDef) and node.name == "train")
        assert train.end_lineno - train.lineno + 1 <= 50


def page(name, added=()):
    """The function `train` of a page without its marked lines, `# + …`; where a mark repeats code, without that code."""
    lines = (ROOT / name).read_text().splitlines()
    for passage in added:
        assert any(line.endswith(f"#{passage}") for line in lines), f"no line is marked with{passage}"
        lines = [line.replace(passage, "") if line.endswith(f"#{passage}") else line for line in lines]
    kept = "\n".join(line for line in lines if "# +" not in line)
    return next(node for node in ast.parse(kept).body if isinstance(node, ast.FunctionDef) and node.name == "train")


class WithoutNaturalStep(ast.NodeTransformer):
    """`if algo.natural: … else: …` becomes its second half, and what the first needs is not imported."""

    def visit_If(self, node):
        return node.orelse if ast.unparse(node.test) == "algo.natural" else node

    def visit_ImportFrom(self, node):
        return None if node.module == "nanorl.trpo" else node


def test_the_difference_between_the_pages_is_the_critic():
    """train_ppo.py without what it marks as its own is train_grpo.py without the natural step, statement for statement."""
    grpo, ppo = page("train_grpo.py"), page("train_ppo.py", added=[" + value_loss"])
    plain = ast.unparse(WithoutNaturalStep().visit(grpo))
    assert ast.unparse(ppo) == plain
    assert "natural" not in plain and "critic" not in plain and "clip_and_step(policy" in plain


@pytest.mark.parametrize("name", ["advantage", "loss"])
def test_functions_of_the_catalogues_are_under_25_lines_beside_their_docstring(name):
    for node in TREES[ROOT / "nanorl" / f"{name}.py"].body:
        if isinstance(node, ast.FunctionDef):
            said = node.body[0]
            assert node.end_lineno - node.lineno - (said.end_lineno - said.lineno) < 25, node.name
            assert ast.get_docstring(node), f"{node.name} says nothing"


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_no_exception_is_swallowed(path):
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            caught = ast.unparse(node.type)
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert not silent or caught not in ("Exception", "BaseException"), f"line {node.lineno}: {caught} is lost"


def test_the_package_imports_nothing():
    nodes = ast.walk(TREES[ROOT / "nanorl" / "__init__.py"])
    assert not [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
