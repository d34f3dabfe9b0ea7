"""What does a surrogate look like? Its loss and its gradient weight against the ratio, from the functions themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanorl import loss as L
from nanorl.timeline import STYLE, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIO = torch.linspace(0.01, 4, 1597, dtype=torch.float64)  # steps of 1/400: 1 and every clip are points
DRAWN = {  # name → the surrogate of (log π, ratio, advantage, mask), and how its line looks; many lie on each other
    "importance": (lambda logp, r, adv, mask: L.importance(r, adv, mask), {"color": "0.8", "linewidth": 7}),
    "clipped 0.2, 0.2": (lambda logp, r, adv, mask: L.clipped(r, adv, mask, 0.2, 0.2), {"color": "C0", "linewidth": 3.5}),
    "clip-higher 0.2, 0.28": (lambda logp, r, adv, mask: L.clipped(r, adv, mask, 0.2, 0.28),
                              {"color": "C1", "linewidth": 2, "linestyle": (0, (4, 2))}),
    "dual clip 3": (lambda logp, r, adv, mask: L.clipped(r, adv, mask, 0.2, 0.2, 3.0),
                    {"color": "C2", "linewidth": 2, "linestyle": (0, (1, 1.5))}),
    "SAPO 1, 1.05": (lambda logp, r, adv, mask: L.sapo(r, adv, mask, 1.0, 1.05), {"color": "C3", "linewidth": 2}),
    "REINFORCE": (lambda logp, r, adv, mask: L.reinforce(logp, adv, mask), {"color": "C4", "linewidth": 2}),
}  # fmt: skip


def curve(name: str, ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """[N] loss of a token above its loss at r = 1, and [N] its gradient weight ω, for each ratio [N] of that token.

        ω = −1/A · ∂loss/∂log π,    by automatic differentiation
    """
    one = ratio.new_ones(1)
    logp = torch.cat([one, ratio]).log().requires_grad_()  # π_prox = 1, so that log π is log r
    adv, mask = torch.full_like(logp, advantage), torch.ones_like(logp, dtype=torch.bool)
    loss = DRAWN[name][0](logp, L.ratio(logp, torch.zeros_like(logp), mask), adv, mask)
    slope = torch.autograd.grad(loss.sum(), logp)[0]
    return (loss - loss[0])[1:].detach(), -slope[1:] / advantage


def picture() -> Figure:
    """Four panels: loss above, gradient weight below, A = 1 to the left, A = −1 to the right."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 7.4), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True)
        for column, advantage in enumerate((1, -1)):
            above, below = panels[:, column]
            for name, (_, look) in DRAWN.items():
                loss, weight = curve(name, RATIO, advantage)
                above.plot(RATIO, loss, label=name, **look)
                below.plot(RATIO, weight, label=name, **look)
            above.set(title=f"A = {advantage:+d}".replace("-", "−"), ylim=(-2.2, 1.2) if advantage > 0 else (-1.2, 3.2))
            below.set(ylim=(-0.1, 3.6), xlim=(0, 4), xlabel="ratio r = π_θ/π_prox of a token")
        panels[0, 0].set_ylabel("loss above that at r = 1, in |A|")
        panels[1, 0].set_ylabel("gradient weight ω = −∂loss/∂log π_θ / A")
        figure.align_ylabels()
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def surrogates(path: str) -> str:
    """Draw `picture` into this file, .png, .svg or .pdf; returns what was written, in one line. Raises Refused."""
    save(picture, path, "--plot")
    return f"{path}: loss and gradient weight of {len(DRAWN)} surrogates against the ratio"
