from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from trl_offpolicy.diagnosis.report.plots import new_figure, spread_axis
from trl_offpolicy.diagnosis.report.step_plots import (
    STEP_FIGURES,
    Band,
    Line,
    draw_line,
    draw_step_figures,
    interval_band,
    running_mean,
)
from trl_offpolicy.run_folder.run_data import MetricsLog, Series


def _log(**metrics: list[float]) -> MetricsLog:
    length = len(next(iter(metrics.values())))
    return MetricsLog(
        tuple({"step": float(i), **{key: values[i] for key, values in metrics.items()}} for i in range(length))
    )


def test_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 3.0, 8.0, 1.0], window=2) == [1.0, 2.0, 5.5, 4.5]
    assert running_mean([], window=3) == []


def test_figures_draw_what_was_logged_and_name_the_rest() -> None:
    log = _log(**{"reward": [0.1, 0.2], "offpolicy/mismatch/kl_k1": [0.1, float("nan")]})
    panels = {panel.title: panel for panel in draw_step_figures(log)}
    assert list(panels) == [figure.title for figure in STEP_FIGURES]
    reward, kl = panels["Reward"], panels["KL between sampler and trainer, estimate k1"]
    assert reward.svg and "Not logged" not in reward.caption
    assert "k1, all tokens" in kl.svg and "k1, kept tokens" not in kl.svg
    assert "Not logged: offpolicy/kept/kl_k1." in kl.caption
    assert "1 non-finite value(s) left out." in kl.caption
    assert not panels["KL between sampler and trainer, estimate k3"].svg
    assert not panels["Effective sample size"].svg


def test_total_group_is_drawn_where_mismatch_is_absent() -> None:
    panels = draw_step_figures(_log(**{"offpolicy/total/kl_k1": [0.1]}))
    assert "k1, all tokens" in panels[2].svg


def test_bands_stand_around_the_values_that_have_an_interval() -> None:
    nan = float("nan")
    band = interval_band(_log(x=[1.0, 2.0, 3.0], x_ci95=[0.5, nan, 1.0]), "x")
    assert band == ([0, 2], [0.5, 2.0], [1.5, 4.0])
    assert interval_band(_log(x=[1.0]), "x") is None
    assert interval_band(_log(x=[0.9, 0.2], x_ci95=[0.5, 0.5]), "x", (0.0, 1.0)) == ([0, 1], [0.4, 0.0], [1.0, 0.7])


def test_no_band_leaves_the_values_that_a_quantity_can_have() -> None:
    bounds = {line.key: line.bounds for figure in STEP_FIGURES for line in figure.lines}
    fractions = [key for key in bounds if "ess" in key or "fraction" in key]
    assert len(fractions) == 6 and {bounds[key] for key in fractions} == {(0.0, 1.0)}
    assert all(bounds[key][0] == 0.0 for key in bounds if key.endswith(("kl_k3", "ppl_ratio")))
    assert all(bounds[key][0] == -1.0 for key in bounds if "chi2" in key)
    assert bounds["offpolicy/{group}/kl_k1"] == (None, None)


def test_one_curves_band_does_not_hide_another() -> None:
    """k1 has a figure of its own, and in a figure only one band is filled; the others are edges."""
    pairs = [{line.key.split("/")[-1] for line in figure.lines} for figure in STEP_FIGURES]
    assert not any({"kl_k1", "kl_k3"} <= keys or {"chi2_token", "chi2_sequence"} <= keys for keys in pairs)
    _, axes = new_figure()
    band, data = Band([0, 1], [0.0, 0.1], [0.4, 0.5]), Series([0, 1], [0.2, 0.3], 0)
    draw_line(axes, Line("a", "a", "#000000"), data, band)
    assert (len(axes.collections), len(axes.lines)) == (1, 1)
    draw_line(axes, Line("b", "b", "#000000"), data, band, fill=False)
    assert (len(axes.collections), len(axes.lines)) == (1, 2 + 2)
    keys = ("offpolicy/weight/ess_token", "offpolicy/weight_applied/ess_token")
    log = _log(**{key + end: [value] * 2 for key in keys for end, value in (("", 0.9), ("_ci95", 0.5))})
    caption = next(panel.caption for panel in draw_step_figures(log) if panel.title == "Effective sample size")
    assert "Shaded: 95 % interval" in caption and "Thin lines: those of the other curves." in caption


def test_the_reward_of_each_step_is_seen_and_in_the_legend() -> None:
    panel = draw_step_figures(_log(reward=[0.1, 0.9, 0.2]))[0]
    assert "reward, each step" in panel.svg and "reward, mean of 10 steps" in panel.svg
    _, axes = new_figure()
    draw_line(axes, STEP_FIGURES[0].lines[1], Series([0, 1, 2], [0.1, 0.9, 0.2], 0), None)
    raw, mean = axes.lines
    assert raw.get_alpha() in (None, 1) and raw.get_zorder() > mean.get_zorder()
    assert list(raw.get_ydata()) == [0.1, 0.9, 0.2] and raw.get_color() != mean.get_color()


def test_svg_is_well_formed_scales_and_loads_nothing() -> None:
    svg = draw_step_figures(_log(reward=[0.1, 0.2, 0.3]))[0].svg
    root = ElementTree.fromstring(svg)
    assert "width" not in root.attrib and "viewBox" in root.attrib
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == "Reward"
    links = [value for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "url(http" not in svg and "<style" not in svg
    assert "var(--blue)" in svg and "currentColor" in svg


@pytest.mark.parametrize(
    ("values", "scale", "words"),
    [
        ([1.0, 2.0], "linear", ""),
        ([0.001, 1.0], "log", " Log scale."),
        ([-0.01, 0.01, 0.01, 5.0], "symlog", " Log scale, linear around 0."),
        ([-1.0, 1.0, 2.0], "linear", ""),
        ([0.0, 0.0], "linear", ""),
    ],
)
def test_axis_scale_follows_the_spread(values: list[float], scale: str, words: str) -> None:
    _, axes = new_figure()
    assert spread_axis(axes, values) == words
    assert axes.get_yscale() == scale


def test_ids_of_two_figures_do_not_collide() -> None:
    panels = draw_step_figures(_log(**{"reward": [0.1, 0.2], "offpolicy/mismatch/kl_k1": [0.1, 0.2]}))
    ids: list[Any] = []
    for panel in (panels[0], panels[2]):
        ids += [node.attrib["id"] for node in ElementTree.fromstring(panel.svg).iter() if "id" in node.attrib]
    assert len(ids) == len(set(ids))
