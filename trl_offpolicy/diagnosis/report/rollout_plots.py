"""Draws figures over the tokens and sequences of ``rollouts.parquet``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trl_offpolicy.diagnosis.report import rollout_numbers as stats
from trl_offpolicy.diagnosis.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Panel,
    add_legend,
    figure_style,
    new_figure,
    to_svg,
)
from trl_offpolicy.diagnosis.verdict.antipatterns import LengthShares, length_shares
from trl_offpolicy.run_folder.rollouts import RecordedRollouts

if TYPE_CHECKING:
    from matplotlib.axis import Axis

MAX_POINTS = 4000
"""Points drawn of each of kept, partly and wholly dropped sequences; of more, a random choice with a fixed seed."""
WIDE_LIMIT = 0.7
"""Log-ratios beyond this (a factor of 2) get a log axis."""
FEW_DECADES = 3.0
"""Up to this log-ratio (a factor of 20) the axis names 1, 2 and 5 in each decade, else powers of ten."""

_STATES = (
    (stats.KEPT, "kept", BLUE, "o"),
    (stats.PARTLY, "partly dropped", GREEN, "^"),
    (stats.DROPPED, "dropped", ORANGE, "x"),
)


def draw_rollout_figures(rollouts: RecordedRollouts) -> list[Panel]:
    """Draw every rollout figure; needs at least one observed token."""
    with figure_style():
        return [
            draw_ratio_histogram(stats.ratio_histogram(rollouts)),
            draw_probability_grid(stats.probability_grid(rollouts)),
            draw_by_position(stats.mean_by_position(rollouts)),
            draw_by_probability(stats.mean_by_probability(rollouts)),
            draw_sequences(stats.sequence_points(rollouts)),
            *draw_length_shares(length_shares(rollouts)),
        ]


def draw_ratio_histogram(histogram: stats.RatioHistogram) -> Panel:
    """Token ratios before, and applied weights on kept tokens after, with a log count axis."""
    title = "Token ratio before and after correction"
    figure, axes = new_figure()
    axes.stairs(histogram.before, histogram.edges, fill=True, color=BLUE, alpha=0.45, label="ratio, all tokens")
    if histogram.after is not None:
        axes.stairs(histogram.after, histogram.edges, color=ORANGE, linewidth=1.8, label="weight, kept tokens")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)
    _ratio_axis(axes.xaxis, histogram.edges)
    axes.set_xlabel("trainer probability / sampler probability")
    axes.set_ylabel("tokens")
    add_legend(figure)
    caption = (
        "Tokens by their ratio trainer / sampler, no unit. A narrow peak at 1 means that the two policies agree. Line: "
        "the weights that the loss used, on kept tokens. The outermost bars also hold what lies further out: "
        f"{histogram.outside_before} ratio(s) before, {histogram.outside_after} weight(s) after."
    )
    if histogram.after is None:
        caption += " No weights were recorded."
    if histogram.zero_weights:
        caption += f" {histogram.zero_weights} weight(s) are 0 and not drawn."
    return Panel(title, to_svg(figure, title), caption)


def draw_probability_grid(grid: stats.Array) -> Panel:
    """Tokens by probability on both sides; the diagonal is agreement."""
    from matplotlib.colors import LogNorm

    title = "Probability under sampler and trainer"
    figure, axes = new_figure(height=4.6)
    edges = np.linspace(0, 1, stats.GRID_BINS + 1)
    shown = np.where(grid > 0, grid, np.nan)
    norm = LogNorm(vmin=1, vmax=max(2, int(grid.max())))
    mesh = axes.pcolormesh(edges, edges, shown, norm=norm, cmap="cividis", rasterized=True)
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    axes.set_aspect("equal")
    axes.set_xlabel("sampler probability")
    axes.set_ylabel("trainer probability")
    figure.colorbar(mesh, ax=axes, label="tokens", shrink=0.85)
    caption = (
        "Each cell counts tokens by their probability when sampled (across) and under the trainer at the "
        "same weights (up). On the diagonal both agree. Cells far from it are tokens on which they do not."
    )
    return Panel(title, to_svg(figure, title), caption)


def draw_by_position(means: stats.BinnedMean) -> Panel:
    """Mean |log-ratio| over the position in the response."""
    from matplotlib.ticker import MaxNLocator

    title = "Disagreement by position"
    figure, axes = new_figure(height=3.0)
    axes.plot((means.low + means.high - 1) / 2, means.mean, color=BLUE, marker="." if len(means.low) < 40 else "")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position in the response (token, first = 0)")
    axes.set_ylabel("mean |log-ratio|, nats")
    caption = (
        "Mean difference of the two log-probs, without its sign, in nats, by the token's index in the response. A "
        f"rising line means that the disagreement grows along the response.{_left_out(means)}"
    )
    return Panel(title, to_svg(figure, title), caption)


def draw_by_probability(means: stats.BinnedMean) -> Panel:
    """Mean |log-ratio| by tenths of sampler probability."""
    title = "Disagreement by sampler probability"
    figure, axes = new_figure()
    places = np.arange(len(means.mean))
    axes.barh(places, means.mean, color=BLUE, height=0.75)
    axes.set_yticks(places, [f"{low:.3f}-{high:.3f}" for low, high in zip(means.low, means.high, strict=True)])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("mean |log-ratio|, nats")
    axes.set_ylabel("sampler probability")
    caption = (
        "Mean difference of the two log-probs, without its sign, in nats, in tenths of the tokens by their probability "
        "under the sampler (equal tenths merged). Longer bars at the bottom mean that improbable tokens disagree more."
        f"{_left_out(means)}"
    )
    return Panel(title, to_svg(figure, title), caption)


def draw_sequences(points: stats.SequencePoints) -> Panel:
    """Geometric-mean ratio over response length, coloured by what the correction did."""
    title = "Sequence ratio by response length"
    figure, axes = new_figure()
    generator = np.random.default_rng(0)
    for state, label, colour, marker in _STATES:
        members = np.flatnonzero(points.state == state)
        if members.size:
            drawn = generator.permutation(members)[:MAX_POINTS]
            style: dict[str, Any] = {"s": 22, "alpha": 0.7, "linewidths": 1.2 if marker == "x" else 0}
            label = f"{label} ({members.size})"
            x, y = points.length[drawn], points.geometric_mean[drawn]
            axes.scatter(x, y, color=colour, marker=marker, label=label, rasterized=True, **style)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    _ratio_axis(axes.yaxis, points.geometric_mean)
    if points.length.max() > 30 * max(1, points.length.min()):
        axes.set_xscale("log")
    axes.set_xlabel("response length (trainable tokens)")
    axes.set_ylabel("geometric-mean ratio")
    add_legend(figure)
    caption = (
        "One point per response: the geometric mean of its tokens' ratios trainer / sampler, no unit, against its "
        "length. Noise averages out along a response, so long ones lie closer to 1 and a fixed band drops short ones "
        "more often. A product over the tokens does the reverse. Dropped points on one side only mean that the "
        f"correction selects by length. At most {MAX_POINTS} points of each kind are drawn."
    )
    return Panel(title, to_svg(figure, title), caption)


def draw_length_shares(shares: LengthShares | None) -> list[Panel]:
    """Share of responses dropped by length, which shows the length trap. Empty if nothing was dropped."""
    if shares is None or not any(shares.dropped):
        return []
    title = "Dropped responses by length"
    figure, axes = new_figure(height=3.0)
    starts = (1, *(length + 1 for length in shares.longest[:-1]))
    spans = [f"{low}-{high}" if low < high else f"{high}" for low, high in zip(starts, shares.longest, strict=True)]
    labels = [f"{span}\n{count} responses" for span, count in zip(spans, shares.responses, strict=True)]
    axes.bar(range(len(labels)), [100 * share for share in shares.dropped], color=ORANGE, width=0.7)
    axes.set_ylim(0, 100)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("response length (trainable tokens)")
    axes.set_ylabel("dropped, %")
    caption = (
        "Share of the responses that the correction dropped as a whole, by length: quarters of the responses, except "
        "that those of one length stay together. Equal bars mean that it does not select by length. Rising bars are "
        "the length trap: products of ratios grow with the length, and the longest responses are lost."
    )
    return [Panel(title, to_svg(figure, title), caption)]


def _left_out(means: stats.BinnedMean) -> str:
    if not means.left_out:
        return ""
    return f" Bins of fewer than {stats.FEWEST_TOKENS} tokens ({means.left_out} in all) are not drawn."


def _ratio_axis(axis: Axis, ratios: stats.Array) -> None:
    """Use a log axis with plain numbers if a ratio is more than a factor of 2 away from 1."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    limit = np.abs(np.log(ratios)).max()
    if limit <= WIDE_LIMIT:
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(subs=(1.0,) if limit > FEW_DECADES else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
