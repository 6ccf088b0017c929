"""The three numbers with which the report begins: how far apart, how much data counts, what is gained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.plots import BLUE, GREY, figure_style, new_figure, to_svg
from trl_offpolicy.diagnosis.report.step_plots import Line, draw_line, interval_band
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.judge import WINDOW
from trl_offpolicy.run_folder.run_data import MetricsLog

_FEWEST_FOR_A_LINE = 2


class KeyNumber(NamedTuple):
    """A number of the first screen.

    Args:
        label: what it is, with its unit.
        value: its mean over the judged steps; a dash if it was not logged.
        note: which mean that is, and from where on it is healthy.
        bad: True if it is on the wrong side of that limit.
        svg: its plot over all steps; empty if there is none.
    """

    label: str
    value: str
    note: str
    bad: bool
    svg: str


class _Candidate(NamedTuple):
    key: str
    label: str
    bounds: tuple[float | None, float | None]
    limit: str = ""
    """Field of the thresholds; empty = there is none."""
    above_is_bad: bool = True


_DISTANCE = (
    _Candidate("offpolicy/{group}/kl_k3", "KL k3, sampler to trainer, nats per token", (0.0, None), "kl_healthy"),
    _Candidate("offpolicy/{group}/kl_k1", "KL k1, sampler to trainer, nats per token", (None, None), "kl_healthy"),
    _Candidate("offpolicy/{group}/logp_diff_mean", "|log-ratio|, nats per token", (0.0, None)),
)
_DROPPED = (
    _Candidate("offpolicy/keep/dropped_token_fraction", "share of tokens dropped", (0.0, 1.0), "dropped_high"),
    _Candidate("offpolicy/keep/dropped_sequence_fraction", "share of responses dropped", (0.0, 1.0), "dropped_high"),
)
_SAMPLES = (
    _Candidate(
        "offpolicy/weight_applied/ess_token", "effective sample size, applied weights", (0.0, 1.0), "ess_healthy", False
    ),
    _Candidate("offpolicy/weight/ess_token", "effective sample size, raw weights", (0.0, 1.0), "ess_healthy", False),
    _Candidate(
        "offpolicy/{group}/ess_sequence", "effective sample size, whole responses", (0.0, 1.0), "ess_healthy", False
    ),
)
_GAIN = (_Candidate("reward", "reward of the sampled text", (None, None)),)


def key_numbers(log: MetricsLog, limits: Thresholds | None = None, *, window: int = WINDOW) -> tuple[KeyNumber, ...]:
    """Distance, data that counts, and reward, each as the mean over the last ``window`` logged steps.

    Of the data it is the share that is dropped where that costs more than unequal weights do, else the effective
    sample size.
    """
    limits = limits or Thresholds()
    dropped, samples = _logged(log, _DROPPED), _logged(log, _SAMPLES)
    lost, left = (math.nan if one is None else _mean(log, one, window) for one in (dropped, samples))
    data = dropped if samples is None or lost > 1 - left else samples
    chosen = (
        (_logged(log, _DISTANCE), _DISTANCE[0]), (data, _SAMPLES[0]), (_logged(log, _GAIN), _GAIN[0]),
    )  # fmt: skip
    return tuple(
        KeyNumber(usual.label, "–", "not logged", False, "") if one is None else _number(log, one, limits, window)
        for one, usual in chosen
    )


def _logged(log: MetricsLog, candidates: Sequence[_Candidate]) -> _Candidate | None:
    named = (one._replace(key=one.key.format(group=log.ratio_group)) for one in candidates)
    return next((one for one in named if log.series(one.key).values), None)


def _values(log: MetricsLog, key: str, window: int) -> list[float]:
    return [row[key] for row in log.rows[-window:] if math.isfinite(row.get(key, math.nan))]


def _mean(log: MetricsLog, one: _Candidate, window: int) -> float:
    values = _values(log, one.key, window)
    return math.fsum(values) / len(values) if values else math.nan


def _number(log: MetricsLog, one: _Candidate, limits: Thresholds, window: int) -> KeyNumber:
    values, mean = _values(log, one.key, window), _mean(log, one, window)
    count = len(values)
    note = "not logged in the last steps" if not count else f"mean of the last {count} logged steps"
    note = "one logged step" if count == 1 else note
    limit = getattr(limits, one.limit) if one.limit else None
    bad = False
    if limit is not None:
        note += f", healthy {'up to' if one.above_is_bad else 'from'} {limit:g}"
        bad = mean > limit if one.above_is_bad else mean < limit
    value = format_number(None if math.isnan(mean) else mean)
    return KeyNumber(one.label, value, note, bad, _plot(log, one, limit))


def _plot(log: MetricsLog, one: _Candidate, limit: float | None) -> str:
    """The metric over all steps, with its interval and the limit (dashed) if that is near."""
    data = log.series(one.key)
    if len(data.steps) < _FEWEST_FOR_A_LINE:
        return ""
    from matplotlib.ticker import MaxNLocator

    with figure_style():
        canvas, axes = new_figure(height=2.1, width=3.2)
        draw_line(axes, Line(one.key, "", BLUE), data, interval_band(log, one.key, one.bounds))
        low, high = axes.get_ylim()
        if limit is not None and low <= limit <= max(high, 2 * limit):
            axes.axhline(limit, color=GREY, linewidth=1.0, linestyle="--")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.set_xlabel("step")
        return to_svg(canvas, f"Key number: {one.label}")
