"""Draw the pictures of docs/control.md: ``python docs/draw_control.py``.

Every scale, projection and decision comes from the package; drawn by hand are only the lags, gaps and gradients that it
is given.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from drawing import REFERENCE, Pictures, label, ticks, write
from drawing import picture as register
from matplotlib.figure import Figure

from trl_offpolicy.control.acceptance import AcceptUpdate, UpdateGate
from trl_offpolicy.control.controllers import ESSStep
from trl_offpolicy.control.ess import piece_ess
from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine
from trl_offpolicy.control.staleness import LAG, StalenessCeiling
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE
from trl_offpolicy.run_folder.run_data import STEP, MetricsLog
from trl_offpolicy.stats import PREFIX

PICTURES: Pictures = {}
picture = partial(register, PICTURES)


def scales(rule: StalenessCeiling | ESSStep, key: str, values: list[float]) -> list[float]:
    """The scale after each logged row, one row a step."""
    state, found = rule.start(), []
    for step in range(1, len(values) + 1):
        rows = tuple({STEP: k, key: value} for k, value in enumerate(values[:step], 1))
        state, _ = rule.step(state, MetricsLog(rows), step)
        found.append(state.scale)
    return found


@picture("Two factors on the learning rate: by the lag of rollouts, and by the drift of training", height=3.2)
def learning_rate(figure: Figure) -> None:
    """The ceiling over the lag; the ceiling over a run; the other controller's scale over a run."""
    left, middle, right = figure.subplots(1, 3)
    lags = [k / 4 for k in range(4, 65)]
    for lag in (1.0, 2.0, 4.0):
        rule = StalenessCeiling(lag=lag)
        left.plot(lags, [rule.ceiling(one) for one in lags], label=f"lag: {lag:g}")
    ticks(left, [1, 2, 4, 8, 16])
    left.set_ylim(0, 1.05)
    label(left, "largest lag, steps", "learning rate x", "staleness_ceiling")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))
    steps = range(1, 41)
    seen = [1.0] * 8 + [8.0] * 8 + [3.0] * 12 + [1.0] * 12
    middle.step(steps, [one / 8 for one in seen], where="mid", color=GREY, linestyle=":", label="largest lag / 8")
    middle.step(steps, scales(StalenessCeiling(lag=2), LAG, seen), where="mid", color=BLUE, label="learning rate x")
    label(middle, "logged row", "", "... in a run, lag: 2")
    drift = [0.01] * 8 + [0.09] * 6 + [0.03] * 26
    found = scales(ESSStep(calm=5), f"{PREFIX}staleness/product_variance", drift)
    right.step(steps, [piece_ess(one) for one in drift], where="mid", color=GREY, linestyle=":", label="ESS of the row")
    right.step(steps, found, where="mid", color=BLUE, label="learning rate x")
    right.axhline(ESSStep().base, color=ORANGE, linewidth=0.8, linestyle="--", label="base")
    label(right, "logged row", "", "ess_step in a run, calm: 5")
    for axes in (middle, right):
        axes.set_ylim(0, 1.05)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))


def projected(before: torch.Tensor, gradient: torch.Tensor, limit: float) -> torch.Tensor:
    """What the bound leaves of a gradient that follows ``before``."""
    cosine, weight = ConsecutiveCosine(limit), torch.nn.Parameter(torch.zeros_like(before))
    for one in (before, gradient):
        weight.grad = one.clone()
        cosine.update([weight])
    assert weight.grad is not None
    return weight.grad


@picture("GAC: an aligned gradient loses the excess along the one before", height=2.9)
def gac(figure: Figure) -> None:
    """Two gradients and what three bounds leave; the length that is left over the cosine."""
    left, right = figure.subplots(1, 2)
    before, gradient = torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.55])
    arrows = [(before, GREY, "gradient before"), (gradient, INK, "gradient")]
    for limit, colour in ((0.6, GREEN), (0.3, BLUE), (0.0, ORANGE)):
        arrows.append((projected(before, gradient, limit), colour, f"max_gradient_cosine: {limit:g}"))
    for arrow, colour, text in arrows:
        x, y = arrow.tolist()
        left.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.5})
        left.plot([], [], color=colour, linestyle="-", label=text)
    left.plot([0, gradient[0]], [gradient[1]] * 2, **REFERENCE)
    left.set(xlim=(-0.08, 1.1), ylim=(-0.08, 1.12), xticks=(0, 0.5, 1), yticks=(0, 0.5))
    label(left, "along the gradient before", "across it", "what is across it stays")
    left.legend(loc="upper left")
    cosines = torch.linspace(-1.0, 1.0, 101).tolist()
    for limit, colour, style in ((0.6, GREEN, "-."), (0.3, BLUE, "-"), (0.0, ORANGE, "--")):
        found = [float(projected(before, torch.tensor([one, math.sqrt(1 - one**2)]), limit).norm()) for one in cosines]
        right.plot(cosines, found, color=colour, linestyle=style, label=f"{limit:g}")
    right.set(ylim=(0, 1.08), xticks=(-1, -0.5, 0, 0.5, 1))
    label(right, "cosine to the gradient before", "length that is left", "nothing happens below the bound")
    right.legend(loc="lower left", title="max_gradient_cosine")


@picture("MIPU: an update stays if the engine still agrees with it")
def accept_update(figure: Figure) -> None:
    """Gaps of a run's syncs, the bound of each, and what was decided."""
    axes = figure.subplots()
    usual = 0.004 * torch.randn(40, generator=torch.Generator().manual_seed(4)).mul(0.35).exp()
    usual[torch.tensor([9, 17, 18])] *= torch.tensor([3.5, 4.0, 2.8])
    usual[26:] *= 3.2  # the precision of the engine got worse, for good
    rule = AcceptUpdate()
    gate = UpdateGate(rule, lambda: {"weight": torch.nn.Parameter(torch.zeros(1))}, lambda action: None)
    bounds, accepted, stayed = [], [], list[float]()
    for version, gap in enumerate(usual.tolist()):
        bounds.append(rule.bound(stayed[-rule.history :]) if stayed else math.nan)
        accepted.append(gate.accepts(version, math.exp(-gap)))
        stayed += [gap] * accepted[-1]
    place, keep = torch.arange(1, len(usual) + 1), torch.tensor(accepted)
    axes.plot(place[keep], usual[keep], "o", color=BLUE, markersize=3.5, label="accepted")
    axes.plot(place[~keep], usual[~keep], "x", color=ORANGE, markersize=5, label="rejected, taken back")
    axes.plot(place, bounds, color=GREY, linestyle=":", label="bound: 2 x the median of the last 20 accepted")
    axes.set_ylim(0, 0.033)
    label(axes, "sync", "gap on the probe, nats", "after three rejections in a row the next update stays")
    axes.legend(loc="upper left")


if __name__ == "__main__":
    write(PICTURES)
