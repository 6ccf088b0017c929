"""Draw the pictures of docs/corrections.md and write its tables of terms: ``python docs/draw_corrections.py``.

The tables, and the list in docs/api/terms.md, are read off the weights and keep terms of the package, so that a new one
is on the pages by itself. Every weight, mask and diagnostic of a picture comes from calling the package on a grid of
ratios or on synthetic log-ratios. A term has the picture of its name in YAML, else the plain one of its kind. The same
packages give the same files; ``tests/docs/test_docs_corrections.py`` draws them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing import REFERENCE, Pictures, label, legend_below, ticks, write
from drawing import picture as register
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import trl_offpolicy as op
from trl_offpolicy.correction.measure import noise_floor
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, ORANGE
from trl_offpolicy.functional.masks import divergence
from trl_offpolicy.presets.parsing import KEEP_TYPES, WEIGHT_TYPES

PAGE = Path(__file__).resolve().parent / "corrections.md"
API = PAGE.parent / "api" / "terms.md"
PICTURES: Pictures = {}
picture = partial(register, PICTURES)


# ------------------------------------------------------------------------------------------------- what is computed


def batch(log_ratios: Tensor, mask: Tensor | None = None, **fields: Any) -> op.PolicyBatch:
    """Log-probs whose old/sampling (and current/sampling) is exp(``log_ratios``)."""
    old = torch.full_like(log_ratios, -6.0)
    fields = {"advantages": torch.ones(len(log_ratios)), **fields}
    fields["completion_mask"] = torch.ones_like(log_ratios).bool() if mask is None else mask
    return op.PolicyBatch(per_token_logps=old, sampling_per_token_logps=old - log_ratios, **fields)


def weigh(weight: Any, log_ratios: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weights (B, T)."""
    return op.Correction(weight=weight, measure=())(batch(log_ratios, mask)).weights


def kept(*terms: Any, of: op.PolicyBatch) -> Tensor:
    """Keep mask (B, T)."""
    return op.Correction(keep=terms, measure=())(of).keep_mask


def share(values: Tensor) -> float:
    """Share of True."""
    return float(values.double().mean())


def quantiles(spread: float, count: int = 4000) -> Tensor:
    """(1, count) normal log-ratios at equal steps of probability; their ratio has mean 1 under the sampler."""
    steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return (spread * torch.special.ndtri(steps) - spread**2 / 2).float().unsqueeze(0)


def noise(rows: int, tokens: int, spread: float, seed: int, mean: float | None = None) -> Tensor:
    """(rows, tokens) normal log-ratios; their ratio has mean 1 unless ``mean`` (of the log-ratio) says otherwise."""
    drawn = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (spread * drawn + (-(spread**2) / 2 if mean is None else mean)).float()


def ess(weights: Tensor, dim: int = -1) -> Tensor:
    """(sum w)^2 / (n sum w^2)."""
    return weights.sum(dim) ** 2 / (weights.shape[dim] * weights.square().sum(dim))


def steps_of(low: float, high: float, count: int = 60) -> list[float]:
    """Geometric steps."""
    return [low * (high / low) ** (k / (count - 1)) for k in range(count)]


# --------------------------------------------------------------------------------------------------- how it is drawn


def weight_map(axes: Axes, *weights: Any) -> None:
    """Weight against ratio; a term's repr without its defaults is its label."""
    grid = torch.linspace(-3.0, 3.0, 301)
    for weight in weights:
        given = {name: value for name, value in vars(weight).items() if name not in ("level", "ratio", "scope")}
        text = ", ".join(f"{name}={value:g}" for name, value in given.items() if value is not None)
        axes.plot(grid.exp(), weigh(weight, grid.unsqueeze(0))[0], label=text or "as it is")
    axes.plot(grid.exp(), grid.exp(), **REFERENCE, label="ratio itself")
    ticks(axes, [0.1, 0.5, 1, 2, 5, 10])
    axes.set(xlim=(0.06, 16), ylim=(-0.15, 6))
    label(axes, "ratio rho of the token", "weight w", "what it does to a ratio")
    axes.legend(loc="upper left")


def price(axes: Axes, settings: Sequence[float], make: Callable[[float], Any], name: str) -> None:
    """ESS (variance) and mean weight (bias) against a setting, on one set of tokens."""
    weights = torch.cat([weigh(make(value), quantiles(1.0)) for value in settings])
    axes.plot(settings, ess(weights), label="ESS (1 = equal weights)")
    axes.plot(settings, weights.mean(-1), label="mean weight (1 = no mass lost)")
    axes.set_ylim(0, 1.08)
    label(axes, name, "fraction", "its price: log-ratios of sd 1, mean ratio 1")
    axes.legend(loc="lower right")


def dots(axes: Axes, x: Tensor, y: Tensor, keep: Tensor) -> None:
    """Kept points as blue dots, dropped ones as orange crosses."""
    axes.plot(x[keep], y[keep], "o", color=BLUE, markersize=3, label="kept")
    axes.plot(x[~keep], y[~keep], "x", color=ORANGE, markersize=4, label="dropped")


def moved(p: Tensor, q: Tensor) -> op.PolicyBatch:
    """Tokens of probability q that have p now, with positive advantages."""
    return op.PolicyBatch(
        per_token_logps=p.log(),
        sampling_per_token_logps=q.log(),
        completion_mask=torch.ones_like(q).bool(),
        advantages=torch.ones(len(q)),
    )


def largest_kept(term: Any, p: Tensor, q: Tensor) -> list[float]:
    """For each position of one response the largest p - q that the term keeps, after the prefix as it is."""
    grid = torch.linspace(0.0005, 0.4995, 500)
    found = []
    for t in range(q.shape[1]):
        tried = p.expand(len(grid), -1).clone()
        tried[:, t] = q[0, t] + grid
        keep = kept(term, of=moved(tried, q.expand(len(grid), -1)))[:, t]
        found.append(float(torch.where(keep, grid, 0.0).amax()))
    return found


def keep_region(axes: Axes, term: Any, advantage: float, colour: str, text: str) -> None:
    """The trainer probabilities that a token-level term keeps, for each sampler probability."""
    sampling, trainer = torch.linspace(0.004, 0.996, 63), torch.linspace(0.001, 0.999, 999)
    q, p = torch.meshgrid(sampling, trainer, indexing="ij")
    tokens = op.PolicyBatch(
        per_token_logps=p.reshape(-1, 1).log(),
        sampling_per_token_logps=q.reshape(-1, 1).log(),
        completion_mask=torch.ones(p.numel(), 1).bool(),
        advantages=torch.full((p.numel(),), advantage),
    )
    keep = kept(term, of=tokens).view_as(q)
    low, high = torch.where(keep, p, torch.inf).amin(1), torch.where(keep, p, -torch.inf).amax(1)
    axes.fill_between(sampling, low, high, color=colour, alpha=0.18, linewidth=0, label=text)
    for edge in (low, high):
        axes.plot(sampling, edge, "-", color=colour, linewidth=1.1)
    axes.plot([0, 1], [0, 1], **REFERENCE)
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.2, 0.4, 0.6, 0.8], xlabel="sampler's probability q")


# ------------------------------------------------------------------------------------------------------ the pictures


@picture("Levels: the ratio of one response of three turns")
def levels(figure: Figure) -> None:
    """Ratio at each level along one response."""
    rho = torch.tensor([[1.1, 0.9, 1.3, 1.2, 1, 0.8, 0.7, 1.1, 1, 1.4, 1.2, 1.3, 1.1]])
    mask = torch.ones_like(rho).bool()
    mask[0, [4, 8]] = False  # tool output
    local, wide = ("turn", "turn_mean"), ("prefix", "sequence", "sequence_mean")
    for axes, shown in zip(figure.subplots(1, 2, sharey=True), (local, wide), strict=True):
        for level in ("token", *shown):
            values = weigh(op.RawWeight(level=level), rho.log(), mask)[0]
            values = torch.where(mask[0], values, torch.nan)  # gaps where the tool wrote
            style = {"marker": "o", "linestyle": "", "color": GREY, "markersize": 3} if level == "token" else {}
            axes.plot(range(1, 14), values, label=level, **style)
        for gap in (5, 9):
            axes.axvspan(gap - 0.5, gap + 0.5, color=GREY, alpha=0.25, linewidth=0)
        ticks(axes, [0.5, 0.7, 1, 1.5, 2, 3], "y")
        axes.set_ylim(0.55, 3.9)
        label(axes, "position (grey: tool output)", "ratio", "one value a turn" if shown == local else "one a response")
        axes.legend(loc="upper left", ncols=2, columnspacing=1.0)
    axes.set(ylabel="", title="along the response, one a response")


@picture("TruncateWeight: min(rho, cap), optionally with a floor")
def truncate(figure: Figure) -> None:
    """Cap, cap and floor; the price of the cap."""
    left, right = figure.subplots(1, 2)
    weight_map(left, op.TruncateWeight(max_weight=2.0), op.TruncateWeight(max_weight=5.0, min_weight=0.5))
    price(right, steps_of(1.0, 100.0), lambda cap: op.TruncateWeight(max_weight=cap), "max_weight")
    ticks(right, [1, 2, 5, 10, 100])


@picture("BandWeight: the ratio inside the band, 0 outside")
def band(figure: Figure) -> None:
    """Weight 0 outside; the price of the upper bound."""
    left, right = figure.subplots(1, 2)
    weight_map(left, op.BandWeight(low=0.5, high=5.0))
    price(right, steps_of(1.1, 100.0), lambda high: op.BandWeight(low=0.5, high=high), "high (low=0.5)")
    ticks(right, [1, 2, 5, 10, 100])


@picture("RawWeight: the ratio, unbounded")
def raw(figure: Figure) -> None:
    """Identity; ESS falls with the length at sequence level."""
    left, right = figure.subplots(1, 2)
    weight_map(left, op.RawWeight())
    lengths = [2**k for k in range(11)]
    log_ratios = noise(1000, lengths[-1], 0.1, seed=0)
    for level in ("token", "sequence", "sequence_mean"):
        weights = [weigh(op.RawWeight(level=level), log_ratios[:, :length]) for length in lengths]
        values = [float(ess(w.flatten() if level == "token" else w[:, 0])) for w in weights]
        right.plot(lengths, values, label=level, marker=".")
    ticks(right, [1, 4, 16, 64, 256, 1024])
    right.set_ylim(0, 1.08)
    label(right, "length, tokens", "ESS", "1000 responses, log-ratios of sd 0.1")
    right.legend(loc="lower left")


@picture("ShapedWeight: rho / (rho + gamma)")
def shaped(figure: Figure) -> None:
    """Bounded by 1; the price of gamma."""
    left, right = figure.subplots(1, 2)
    weight_map(left, op.ShapedWeight(gamma=0.1), op.ShapedWeight(gamma=1.0))
    left.set_ylim(-0.05, 2.0)
    price(right, steps_of(0.01, 10.0), lambda gamma: op.ShapedWeight(gamma=gamma), "gamma")
    ticks(right, [0.01, 0.1, 1, 10])
    right.legend(loc="lower left")


@picture("PrefixMinWeight: the token's ratio times the smallest before it")
def prefix_min(figure: Figure) -> None:
    """One response, and ESS by position over many."""
    left, right = figure.subplots(1, 2)
    one, many, position = noise(1, 60, 0.25, seed=3), noise(1000, 60, 0.25, seed=1), range(1, 61)
    weights = {
        "PrefixMinWeight()": op.PrefixMinWeight(),
        "product of the prefix": op.RawWeight(level="prefix"),
        "token ratio": op.RawWeight(),
    }
    for text, weight in weights.items():
        left.plot(position, weigh(weight, one)[0], label=text, linewidth=1.2)
        right.plot(position, ess(weigh(weight, many), 0), label=text)
    ticks(left, [0.05, 0.1, 0.2, 0.5, 1, 2], "y")
    label(left, "position", "weight", "one response, log-ratios of sd 0.25")
    left.legend(loc="lower left")
    right.set_ylim(0, 1.08)
    label(right, "position", "ESS", "1000 responses, position by position")


@picture("PrefixWeight: the cumulative ratio inside bounds that widen with sqrt(t)")
def prefix(figure: Figure) -> None:
    """Walks held in their bounds, and how often a bound acts."""
    left, right = figure.subplots(1, 2)
    term, position = op.PrefixWeight(), torch.arange(1, 101)
    walks = noise(5, 100, 0.15, seed=2)
    left.plot(position, weigh(op.RawWeight(level="prefix"), walks).T, "-", color=GREY, linewidth=0.7)
    left.plot(position, weigh(term, walks).T, "-", color=BLUE, linewidth=1.0)
    for bound in (term.low, term.high):
        left.plot(position, bound ** position.sqrt(), "--", color=ORANGE)
    ticks(left, [0.01, 0.1, 1, 10], "y")
    left.set_ylim(0.02, 40)
    label(left, "position t", "weight", "5 responses: product (grey), held (blue)")
    for text, mean in {"mean log-ratio 0": 0.0, "mean ratio 1": None}.items():
        log_ratios = noise(4000, 100, 0.15, seed=4, mean=mean)
        held = weigh(term, log_ratios) != weigh(op.RawWeight(level="prefix"), log_ratios)
        right.plot(position, held.double().mean(0), label=text)
    right.set_ylim(0, 0.4)
    label(right, "position t", "share held by a bound", "4000 responses, log-ratios of sd 0.15")
    right.legend(loc="upper left")


@picture("ESSWeight: a cap that follows the batch")
def _ess(figure: Figure) -> None:
    """The cap at three spreads, and ESS before and after."""
    left, right = figure.subplots(1, 2)
    for spread, width in ((0.5, 4.0), (1.0, 1.5), (1.5, 1.5)):
        tokens = quantiles(spread)
        rho, weights = tokens.exp()[0, ::16], weigh(op.ESSWeight(), tokens)[0, ::16]
        left.plot(rho, weights, label=f"sd {spread:g}", linewidth=width, alpha=0.4 if width > 2 else 1.0)
    left.plot(steps_of(0.06, 16), steps_of(0.06, 16), **REFERENCE, label="ratio itself")
    ticks(left, [0.1, 0.5, 1, 2, 5, 10])
    left.set(xlim=(0.06, 16), ylim=(-0.15, 6))
    label(left, "ratio rho of the token", "weight w", "target 0.5, three batches")
    left.legend(loc="upper left")
    spreads = [0.05 * k for k in range(1, 41)]
    for text, weight in {
        "target 0.5": op.ESSWeight(target=0.5),
        "cap 2": op.TruncateWeight(max_weight=2.0),
        "raw": op.RawWeight(),
    }.items():
        right.plot(spreads, [float(ess(weigh(weight, quantiles(s))[0])) for s in spreads], label=text)
    right.set_ylim(0, 1.08)
    label(right, "sd of the batch's log-ratios", "ESS", "effective sample size")
    right.legend(loc="upper right")


@picture("RatioBand: the same responses, judged by the mean and by the product", height=2.9)
def ratio_band(figure: Figure) -> None:
    """Responses by length and mean log-ratio."""
    generator = torch.Generator().manual_seed(5)
    lengths = (2 ** (3 + 8 * torch.rand(140, generator=generator))).long()
    drift = 0.006 * torch.randn(140, 1, generator=generator)
    responses = batch(drift.expand(-1, 2048).contiguous(), torch.arange(2048) < lengths.unsqueeze(1))
    bands = (op.RatioBand(low=0.99, high=1.01), op.RatioBand(level="sequence", low=0.5, high=2.0))
    for axes, term in zip(figure.subplots(1, 2, sharey=True), bands, strict=True):
        dots(axes, drift[:, 0], lengths, kept(term, of=responses).any(-1))
        ticks(axes, [8, 32, 128, 512, 2048], "y")
        axes.set_xticks([-0.01, 0, 0.01])
        label(axes, "mean log-ratio, nats", "length, tokens", f"{term.level}, [{term.low:g}, {term.high:g}]")
    axes.set_ylabel("")
    legend_below(figure, axes)


@picture("DivergenceBand: statistics of a token, and what they keep", height=2.9)
def divergence_band(figure: Figure) -> None:
    """The statistics of the ratio alone; keep regions of three statistics."""
    left, right = figure.subplots(1, 2)
    grid = torch.linspace(-2.0, 2.0, 101).unsqueeze(0)
    for statistic in ("k3", "k2", "abs", "k1"):
        left.plot(grid[0].exp(), divergence(grid, statistic)[0], label=statistic)
    ticks(left, [0.2, 0.5, 1, 2, 5])
    left.set_ylim(-1.5, 3.0)
    label(left, "ratio rho of the token", "statistic, nats", "statistics of the ratio alone")
    left.legend(loc="upper center")
    for statistic, high, colour in (("binary_tv", 0.2, ORANGE), ("binary_kl", 0.05, GREEN), ("k3", 0.05, BLUE)):
        term = op.DivergenceBand(statistic=statistic, level="token", high=high)
        keep_region(right, term, 1.0, colour, f"{statistic}, high={high:g}")
    right.set(ylabel="trainer's probability p", title="tokens kept")
    right.legend(loc="upper left")


@picture("ProbabilityDifferenceMask: tokens kept, by sign of the advantage", height=2.9)
def probability_difference(figure: Figure) -> None:
    """Two planes."""
    for axes, sign in zip(figure.subplots(1, 2, sharey=True), (1.0, -1.0), strict=True):
        keep_region(axes, op.ProbabilityDifferenceMask(), sign, BLUE, "kept")
        axes.set_title("positive advantage" if sign > 0 else "negative advantage")
        axes.legend(loc="lower right" if sign > 0 else "upper left")
        axes.set_ylabel("trainer's probability p" if sign > 0 else "")


@picture("PrefixBudget: what a prefix has spent is taken off the threshold", height=2.9)
def prefix_budget(figure: Figure) -> None:
    """Tokens of one response, kept and dropped; the largest difference that is kept, by position."""
    left, right = figure.subplots(1, 2)
    generator = torch.Generator().manual_seed(3)
    spread = torch.where(torch.arange(60) < 25, 0.035, 0.1)
    q = torch.full((1, 60), 0.4)
    p = q + (spread * torch.randn(1, 60, generator=generator)).abs().clamp(0.002, 0.3)
    term = op.PrefixBudget(budget=0.04, adaptive=False)
    dots(left, torch.arange(1, 61), (p - q)[0], kept(term, of=moved(p, q))[0])
    left.plot(range(1, 61), largest_kept(term, p, q), **REFERENCE, label="threshold")
    left.set_ylim(0, 0.3)
    label(left, "position", "p - q, pushed up", "one response, high=0.2, budget=0.04")
    left.legend(loc="upper left", ncols=3, columnspacing=1.0)
    for weight in (1.0, 0.8, 0.6):
        term = op.PrefixBudget(min_weight=weight, adaptive=False)
        right.plot(range(1, 61), largest_kept(term, q, q), label=f"min_weight={weight:g}")
    right.set_ylim(0, 0.4)
    label(right, "position", "", "largest p - q, prefix not moved")
    right.legend(loc="lower right")


@picture("OutlierVeto: one token outside condemns the response", height=2.9)
def outlier_veto(figure: Figure) -> None:
    """Tokens of ten responses, and survival by length."""
    left, right = figure.subplots(1, 2)
    term, generator = op.OutlierVeto(low=1e-4, high=100.0), torch.Generator().manual_seed(1)
    normal, uniform = torch.randn(10, 14, generator=generator), torch.rand(10, 14, generator=generator)
    log_ratios = (1.1 * normal / (-uniform.log()).sqrt()).clamp(
        -13, 11
    )  # Student's t, 2 degrees of freedom: heavy tails
    rows = torch.arange(1, 11).unsqueeze(1).expand(-1, 14)
    left.axvspan(1e-4, 100.0, color=BLUE, alpha=0.1, linewidth=0)
    dots(left, log_ratios.exp(), rows, kept(term, of=batch(log_ratios)))
    ticks(left, [1e-6, 1e-4, 1e-2, 1, 100, 1e4])
    left.set(ylim=(0.2, 12.6), yticks=range(2, 11, 2))
    label(left, "ratio rho of the token", "response", "tokens of 10 responses, bounds shaded")
    left.legend(loc="upper left", ncols=2)
    lengths = [2**k for k in range(4, 14)]
    drawn = torch.rand(500, lengths[-1], generator=generator)
    for rate in (1e-4, 1e-3):
        outliers = torch.where(drawn < rate, -10.0, 0.0)
        shares = [share(kept(term, of=batch(outliers[:, :length]))[:, 0]) for length in lengths]
        right.plot(lengths, shares, marker=".", label=f"1 token in {1 / rate:,.0f} outside")
    ticks(right, [16, 128, 1024, 8192])
    right.set_ylim(0, 1.08)
    label(right, "length, tokens", "share of responses kept", "500 responses")
    right.legend(loc="lower left")


@picture("SuffixVeto: nothing after an impossible token is pushed down", height=2.9)
def suffix_veto(figure: Figure) -> None:
    """One negative response, and what is left of negative responses by length."""
    left, right = figure.subplots(1, 2)
    log_ratios, place = noise(1, 40, 0.3, seed=6), torch.arange(1, 41)
    log_ratios[0, 22], log_ratios[0, 31] = -11.0, -10.0
    term = op.SuffixVeto()
    dots(left, place, log_ratios[0].exp(), kept(term, of=batch(log_ratios, advantages=-torch.ones(1)))[0])
    left.axhline(term.low, **REFERENCE)
    ticks(left, [1e-5, 1e-4, 1e-3, 0.01, 0.1, 1], "y")
    left.set_ylim(3e-6, 20)
    label(left, "position", "ratio rho", "a negative response, low=1e-4")
    left.legend(loc="lower left")
    lengths = [2**k for k in range(4, 14)]
    drawn = torch.rand(300, lengths[-1], generator=torch.Generator().manual_seed(1))
    for rate in (1e-4, 1e-3):
        responses = torch.where(drawn < rate, -10.0, 0.0)
        down = -torch.ones(len(responses))
        shares = [share(kept(term, of=batch(responses[:, :n], advantages=down))) for n in lengths]
        right.plot(lengths, shares, marker=".", label=f"1 token in {1 / rate:,.0f} impossible")
    ticks(right, [16, 128, 1024, 8192])
    right.set_ylim(0, 1.08)
    label(right, "length, tokens", "share of tokens kept", "300 negative responses")
    right.legend(loc="lower left")


@picture("OffPolicySequenceMask: only responses that are pushed down", height=2.9)
def off_policy_sequence_mask(figure: Figure) -> None:
    """Advantage against mean log(mu / pi), for two bounds."""
    generator = torch.Generator().manual_seed(7)
    drift, advantages = 0.08 * torch.randn(120, 1, generator=generator), torch.randn(120, generator=generator)
    responses = batch(-drift.expand(-1, 8).contiguous(), advantages=advantages)
    for axes, bound in zip(figure.subplots(1, 2, sharey=True), (0.05, 0.0), strict=True):
        dots(axes, drift[:, 0], advantages, kept(op.OffPolicySequenceMask(max_divergence=bound), of=responses)[:, 0])
        axes.axvline(bound, **REFERENCE)
        axes.axhline(0.0, **REFERENCE)
        label(axes, "mean log(mu / pi), nats a token", "advantage", f"max_divergence={bound:g}")
    axes.set_ylabel("")
    legend_below(figure, axes)


@picture("StalenessBound: one old token is enough", height=2.4)
def staleness_bound(figure: Figure) -> None:
    """Responses in segments of one lag each."""
    axes = figure.subplots()
    segments = [[0] * 4, [1] * 4, [2, 2, 1, 0], [3, 1, 0, 0], [2] * 4, [4, 3, 3, 2]]
    versions = 10 - torch.tensor(segments).repeat_interleave(8, dim=1)
    responses = batch(torch.zeros(6, 32), policy_versions=versions, current_version=10)
    keep = kept(op.StalenessBound(max_lag=2), of=responses)[:, 0]
    for row, lags in enumerate(segments, start=1):
        colour, verdict = (BLUE, "kept") if keep[row - 1] else (ORANGE, "dropped")
        for start, lag in zip(range(0, 32, 8), lags, strict=True):
            axes.barh(row, 8, left=start, height=0.7, color=colour, alpha=0.15 + 0.15 * lag, linewidth=0)
            axes.text(start + 4, row, str(lag), ha="center", va="center")
        axes.text(33, row, verdict, va="center")
    axes.set(xlim=(0, 38), xticks=range(0, 33, 8), yticks=range(1, 7))
    axes.invert_yaxis()
    axes.grid(visible=False)
    label(axes, "position", "response", "versions between sampling and now, max_lag=2")


@picture("EqualRewards: prompts that teach nothing leave the count of tokens")
def equal_rewards(figure: Figure) -> None:
    """Eight prompts of eight responses with fewer and fewer right ones; what is left of the gradient's size."""
    left, right = figure.subplots(1, 2)
    solved = torch.tensor([8, 8, 7, 5, 3, 1, 0, 0])
    prompt, response = torch.arange(64) // 8 + 1, torch.arange(64) % 8 + 1
    rewards = (response <= solved[prompt - 1]).float()
    of_group = rewards.view(8, 8).repeat_interleave(8, dim=0)
    responses = batch(torch.zeros(64, 4), group_rewards=of_group)
    dots(left, response, prompt, kept(op.EqualRewards(), of=responses)[:, 0])
    left.set(xlim=(0.5, 8.5), ylim=(8.6, 0.4), xticks=range(1, 9), yticks=range(1, 9))
    left.grid(visible=False)
    label(left, "response; the first ones are right", "prompt", "8 to 0 of 8 responses are right")
    equal = range(8)
    for denominator, text in (("all", "all tokens counted"), ("kept", 'denominator="kept"')):
        sizes = [_gradient_size(count, denominator) for count in equal]
        right.plot([count / 8 for count in equal], [size / sizes[0] for size in sizes], label=text)
    right.set_ylim(0, 1.1)
    label(right, "share of prompts without a spread", "size of the gradient", "against a batch without such prompts")
    right.legend(loc="lower left")


def _gradient_size(equal: int, denominator: Any) -> float:
    """Sum of |d loss / d log pi| where ``equal`` of eight prompts have no spread of rewards."""
    spread = torch.arange(8).repeat_interleave(8) >= equal
    rewards = torch.where(spread, torch.arange(64) % 2, 1).float()
    data = batch(
        torch.zeros(64, 4),
        advantages=torch.where(spread, 2 * rewards - 1, 0.0),
        group_rewards=rewards.view(8, 8).repeat_interleave(8, dim=0),
    )
    leaf = data.per_token_logps.clone().requires_grad_()
    correction = op.Correction(keep=(op.EqualRewards(),), measure=())
    objective = op.Objective(correction=correction, aggregation="token_mean", denominator=denominator)
    objective(replace(data, per_token_logps=leaf)).loss.backward()
    assert leaf.grad is not None
    return float(leaf.grad.abs().sum())


@picture("SecondMomentBudget: the worst tokens of the batch go")
def second_moment_budget(figure: Figure) -> None:
    """Histogram of kept and dropped tokens; dropped share against the budget."""
    left, right = figure.subplots(1, 2)
    body = quantiles(0.15)
    tail = torch.where(torch.arange(4000) % 25 == 0, 5 * body, body)
    keep = kept(op.SecondMomentBudget(budget=0.03), of=batch(tail))
    parts = [tail[keep].clamp(-1.49, 1.49).tolist(), tail[~keep].clamp(-1.49, 1.49).tolist()]
    bins = [0.1 * k for k in range(-15, 16)]
    left.hist(parts, bins=bins, stacked=True, color=[BLUE, ORANGE], label=["kept", "dropped"])
    left.set_yscale("log")
    label(left, "log-ratio l, nats", "tokens", "1 token in 25 is 5 times as wide, budget 0.03")
    left.legend(loc="upper left")
    budgets = steps_of(0.003, 0.3, 40)
    tokens = {"sd 0.15": body, "1 in 25 is 5 times as wide": tail, "all shifted by 0.15": body + 0.15}
    for text, log_ratios in tokens.items():
        shares = [1 - share(kept(op.SecondMomentBudget(budget=b), of=batch(log_ratios))) for b in budgets]
        right.plot(budgets, shares, label=text)
    right.axvline(op.SecondMomentBudget().budget, **REFERENCE)
    ticks(right, [0.003, 0.01, 0.04, 0.1, 0.3])
    label(right, "budget, nats squared", "share of tokens dropped", "dotted: the default budget")
    right.legend(loc="center right")


@picture("GroupRejection: a group that lost too many goes whole", height=2.4)
def group_rejection(figure: Figure) -> None:
    """Six prompts of eight responses, before and after."""
    drift = torch.tensor([-0.012, 0.0, 0.012, 0.005, 0.024, -0.004]).repeat_interleave(8).unsqueeze(1)
    ids, place = torch.arange(48) // 8 + 1, torch.arange(48) % 8 + 1
    responses = batch(noise(48, 16, 0.05, seed=9) + drift, group_ids=ids)
    single, group = op.RatioBand(low=0.98, high=1.02), op.GroupRejection(max_dropped_fraction=0.5)
    for axes, keep in zip(figure.subplots(1, 2, sharey=True), ((single,), (single, group)), strict=True):
        dots(axes, place, ids, kept(*keep, of=responses)[:, 0])
        axes.set(xlim=(0.5, 8.5), ylim=(6.6, 0.4), xticks=range(1, 9), yticks=range(1, 7))
        axes.grid(visible=False)
        title = "RatioBand alone" if len(keep) == 1 else "then GroupRejection, 0.5"
        label(axes, "response", "prompt", title)
    axes.set_ylabel("")
    legend_below(figure, axes)


@picture("The length trap: share of responses kept, by length", height=3.0)
def length_trap(figure: Figure) -> None:
    """Four sequence terms at two spreads of the token log-ratio."""
    terms = {
        "ratio, sequence_mean, [0.99, 1.01]": op.RatioBand(low=0.99, high=1.01),
        "ratio, sequence, [0.5, 2]": op.RatioBand(level="sequence", low=0.5, high=2.0),
        "k3, sequence_mean, 0.01": op.DivergenceBand(statistic="k3", high=0.01),
        "k3, sequence_max, 0.05": op.DivergenceBand(statistic="k3", level="sequence_max", high=0.05),
    }
    lengths = [2**k for k in range(3, 13)]
    for axes, spread in zip(figure.subplots(1, 2, sharey=True), (0.05, 0.1), strict=True):
        log_ratios = noise(500, lengths[-1], spread, seed=11)
        for text, term in terms.items():
            shares = [share(kept(term, of=batch(log_ratios[:, :length]))[:, 0]) for length in lengths]
            axes.plot(lengths, shares, marker=".", label=text)
        ticks(axes, [8, 64, 512, 4096])
        axes.set_ylim(0, 1.08)
        label(axes, "length, tokens", "share kept", f"token log-ratios of sd {spread:g}, mean ratio 1")
    axes.set_ylabel("")
    legend_below(figure, axes)


@picture("Confidence: two diagnostics with their 95 % intervals, by number of prompts", height=2.9)
def confidence(figure: Figure) -> None:
    """kl_k3 with its interval and the noise floor; ESS with its interval."""
    common, own = noise(128, 1, 0.1, seed=13, mean=0.0), noise(512, 30, 0.1, seed=14, mean=0.0)
    log_ratios, ids = own + common.repeat_interleave(4, dim=0), torch.arange(128).repeat_interleave(4)
    counts, correction = [4, 8, 16, 32, 64, 128], op.Correction(weight=op.TruncateWeight(max_weight=2.0))
    stats = [correction(batch(log_ratios[: 4 * n], group_ids=ids[: 4 * n])).stats.compute() for n in counts]
    once, again = torch.zeros(512, 30), noise(512, 30, 0.03, seed=15, mean=0.0)
    floor = noise_floor(once, again, torch.ones(512, 30).bool()).compute()["offpolicy/noise_floor/kl_k3"]
    for axes, key in zip(figure.subplots(1, 2), ("mismatch/kl_k3", "weight_applied/ess_token"), strict=True):
        values, widths = ([one[f"offpolicy/{key}{end}"] for one in stats] for end in ("", "_ci95"))
        axes.errorbar(counts, values, widths, fmt="o", color=BLUE, capsize=3, markersize=4, label=f"{key} ± _ci95")
        ticks(axes, counts)
        label(axes, "prompts in the logging window", "nats", "4 responses of 30 tokens each")
    axes.set(ylabel="fraction", ylim=(None, 1.0))
    first = figure.axes[0]
    first.axhline(floor, color=ORANGE, linestyle="--", label="noise_floor/kl_k3")
    first.set_ylim(0, 0.026)
    for axes in figure.axes:
        axes.legend(loc="upper right")


PICTURES["ess"] = PICTURES.pop("_ess")  # ``ess`` is a function already


# ------------------------------------------------------------------------- what every term has without being drawn


def plain_weight(cls: type[Any], figure: Figure) -> None:
    """Weight against ratio, and the spread of ratios against what is left of the batch."""
    left, right = figure.subplots(1, 2)
    weight = cls(**cls.example)
    weight_map(left, weight)
    spreads = [0.05 * k for k in range(1, 41)]
    for text, one in {cls.__name__: weight, "raw": op.RawWeight()}.items():
        right.plot(spreads, [float(ess(weigh(one, quantiles(spread))[0])) for spread in spreads], label=text)
    right.set_ylim(0, 1.08)
    label(right, "sd of the batch's log-ratios", "ESS", "effective sample size")
    right.legend(loc="upper right")


def plain_keep(cls: type[Any], figure: Figure) -> None:
    """Responses of one token that are kept, by sign of the advantage."""
    for axes, sign in zip(figure.subplots(1, 2, sharey=True), (1.0, -1.0), strict=True):
        keep_region(axes, cls(**cls.example), sign, BLUE, "kept")
        axes.set_title("positive advantage" if sign > 0 else "negative advantage")
        axes.legend(loc="lower right" if sign > 0 else "upper left")
        axes.set_ylabel("trainer's probability p" if sign > 0 else "")


for types, draw in ((WEIGHT_TYPES, plain_weight), (KEEP_TYPES, plain_keep)):
    for name, cls in types.items():
        if name not in PICTURES:
            PICTURES[name] = (f"{cls.__name__}: an example", 2.9, partial(draw, cls))


def term_table(types: Mapping[str, type[Any]]) -> str:
    """The terms as a Markdown table, in the order of their names."""
    lines = ["| term | YAML | in one line | example | scope | picture |", "|" + "---|" * 6]
    for name, cls in sorted(types.items()):
        example = cls(**cls.example)
        first = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        cells = [f"`{cls.__name__}`", f"`{name}`", first, f"`{example.formula}`", f"`{example.scope}`"]
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append("| " + " | ".join([*escaped, f"[picture](pictures/{name}.svg)"]) + " |")
    return "\n".join(lines)


def api_list(types: Mapping[str, type[Any]]) -> str:
    """The entries of the API page, in the order of their names."""
    entries = (
        f"::: trl_offpolicy.{cls.__name__}\n    options: {{heading_level: 3, members: false}}"
        for _, cls in sorted(types.items())
    )
    return "\n\n".join(entries)


TABLES = {
    (PAGE, "weights"): lambda: term_table(WEIGHT_TYPES),
    (PAGE, "keep terms"): lambda: term_table(KEEP_TYPES),
    (API, "weights"): lambda: api_list(WEIGHT_TYPES),
    (API, "keep terms"): lambda: api_list(KEEP_TYPES),
}
"""{(page, marker): what stands between ``<!-- marker -->`` and ``<!-- end of marker -->``}."""


def main() -> None:
    """Write the pictures, and the tables between their markers."""
    write(PICTURES)
    for (page, name), table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.read_text().partition(start)
        page.write_text(f"{before}{start}{table()}{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
