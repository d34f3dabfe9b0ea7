"""The picture of the surrogates shows the surrogates."""

import builtins
import math

import pytest
import torch

from nanorl import algorithms, plots
from nanorl.config import Refused

POINTS = (0.3, 0.79, 1.0, 1.1, 1.25, 2.0, 3.5)  # on both sides of every clip, and of 1


def sapo(r: float, tau: float) -> tuple[float, float]:
    """The gate's rise over that at r = 1, and 4σ(1 − σ)·r."""
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 / tau * (s - 0.5), 4 * s * (1 - s) * r


def by_hand(name: str, r: float, adv: int) -> tuple[float, float]:
    """(loss − loss at r = 1, ω) of one token, by cases."""
    high, cap = {"clip-higher 0.2, 0.28": 1.28}.get(name, 1.2), 3.0 if name == "dual clip 3" else math.inf
    if name == "REINFORCE":
        gain, weight = math.log(r), 1.0
    elif name.startswith("SAPO"):
        gain, weight = sapo(r, 1.0 if adv > 0 else 1.05)
    elif name == "importance" or (r <= high if adv > 0 else 0.8 <= r <= cap):
        gain, weight = r - 1, r
    else:
        gain, weight = (high if adv > 0 else 0.8 if r < 0.8 else cap) - 1, 0.0
    return -adv * gain, weight


@pytest.mark.parametrize("adv", [1, -1])
@pytest.mark.parametrize("name", plots.DRAWN)
def test_a_curve_is_its_equation(name, adv):
    loss, weight = plots.curve(name, torch.tensor(POINTS, dtype=torch.float64), adv)
    for got, wanted in zip(zip(loss.tolist(), weight.tolist()), (by_hand(name, r, adv) for r in POINTS)):
        assert got == pytest.approx(wanted, abs=1e-12)


def test_every_panel_draws_every_curve_at_its_advantage_and_names_its_axes():
    left, right, below_left, below_right = plots.picture().axes
    for panel, adv, which in ((left, 1, 0), (right, -1, 0), (below_left, 1, 1), (below_right, -1, 1)):
        assert {line.get_label() for line in panel.lines} == set(plots.DRAWN)
        for line in panel.lines:
            drawn = plots.curve(line.get_label(), plots.RATIO, adv)[which]
            assert list(line.get_xdata()) == plots.RATIO.tolist() and list(line.get_ydata()) == drawn.tolist()
    assert all(panel.get_xlabel() for panel in (below_left, below_right))
    assert all(panel.get_ylabel() for panel in (left, below_left))


def test_the_command_writes_a_png_and_says_so_in_one_line(tmp_path, capsys):
    file = tmp_path / "s.png"
    assert algorithms.main(["--plot", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and str(file) in said
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and file.stat().st_size > 10_000


@pytest.mark.parametrize("name, why", [("no/such/s.png", "no folder"), ("s", "end it in .png"), ("d.png", "cannot be written")])
def test_a_file_that_cannot_be_written_is_refused_in_one_line(name, why, tmp_path):
    (tmp_path / "d.png").mkdir()
    with pytest.raises(Refused, match=why) as refused:
        plots.surrogates(str(tmp_path / name))
    assert str(refused.value).startswith("--plot ") and "\n" not in str(refused.value)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    there = builtins.__import__

    def absent(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(Refused, match="pip install matplotlib"):
        plots.surrogates(str(tmp_path / "s.png"))
