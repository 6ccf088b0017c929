from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trl_offpolicy.diagnosis.report import rollout_numbers as stats
from trl_offpolicy.diagnosis.report import rollout_plots
from trl_offpolicy.diagnosis.report.plots import figure_style
from trl_offpolicy.run_folder.rollouts import read_rollouts


@pytest.fixture(autouse=True)
def _style() -> Iterator[None]:
    with figure_style():
        yield


def test_every_rollout_figure_is_well_formed_and_captioned(write_run: Any, rollout_parts: Any) -> None:
    rollouts = read_rollouts(write_run([], rollout_parts))
    assert rollouts is not None
    panels = rollout_plots.draw_rollout_figures(rollouts)
    assert len(panels) == 5 and len({panel.title for panel in panels}) == 5
    for panel in panels:
        ElementTree.fromstring(panel.svg)
        assert "nats" in panel.caption or "no unit" in panel.caption or "probability" in panel.caption


def test_histogram_caption_counts_what_is_not_on_the_axis() -> None:
    counts = np.ones(stats.HISTOGRAM_BINS)
    edges = np.exp(np.linspace(-0.1, 0.1, stats.HISTOGRAM_BINS + 1))
    caption = rollout_plots.draw_ratio_histogram(stats.RatioHistogram(edges, counts, counts, 3, 2, 5)).caption
    assert "3 ratio(s) before, 2 weight(s) after" in caption and "5 weight(s) are 0" in caption
    caption = rollout_plots.draw_ratio_histogram(stats.RatioHistogram(edges, counts, None, 0, 0, 0)).caption
    assert "No weights were recorded" in caption and "are 0" not in caption


@pytest.mark.parametrize(("limit", "ticks"), [(0.1, ["1.000"]), (2.0, ["0.2", "5"]), (9.0, ["0.01", "100"])])
def test_wide_ratio_axes_have_plain_number_ticks(limit: float, ticks: list[str]) -> None:
    edges = np.exp(np.linspace(-limit, limit, stats.HISTOGRAM_BINS + 1))
    counts = np.ones(stats.HISTOGRAM_BINS)
    svg = rollout_plots.draw_ratio_histogram(stats.RatioHistogram(edges, counts, counts, 0, 0, 0)).svg
    assert all(f">{tick}</text>" in svg for tick in ticks)


def test_left_out_bins_are_counted_in_the_caption() -> None:
    one = np.array([1.0])
    caption = rollout_plots.draw_by_position(stats.BinnedMean(one, one + 1, one, one, 7)).caption
    assert "(7 in all) are not drawn" in caption
    assert "not drawn" not in rollout_plots.draw_by_position(stats.BinnedMean(one, one + 1, one, one, 0)).caption


def test_sequences_are_counted_by_fate_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_plots, "MAX_POINTS", 2)
    state = np.array([stats.KEPT] * 4 + [stats.DROPPED])
    points = stats.SequencePoints(np.arange(5), np.arange(1, 6), np.full(5, 1.01), state)
    panel = rollout_plots.draw_sequences(points)
    assert "kept (4)" in panel.svg and "dropped (1)" in panel.svg and "partly" not in panel.svg
    assert "At most 2 points" in panel.caption
