"""The promise of the first page, kept: `python train_grpo.py`, nothing else, learns to show its working and to add."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_default_run_learns_that_working_pays(tmp_path):
    """From an empty folder, with no flag: warm start, training, evaluation; accuracy, working and length rise together.

    Three seeds end at 0.975 to 0.984; the bound leaves room for the rounding of another machine, which is another run.
    """
    run = subprocess.run([sys.executable, ROOT / "train_grpo.py"], cwd=tmp_path, timeout=1800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    folder = tmp_path / "runs" / "grpo-arithmetic-1"
    summary = json.loads((folder / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert 0.3 <= before["eval/pass@1"] <= 0.6 and after["eval/pass@1"] >= 0.96
    assert before["eval/worked"] < 0.6 and after["eval/worked"] > 0.95
    assert after["eval/length"] > before["eval/length"] + 3
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row["lag/max"] for row in rows if "lag/max" in row) == 0
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) < 1e-4
    assert str(folder.relative_to(tmp_path)) in run.stdout and "pass@1" in run.stdout
