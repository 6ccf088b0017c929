from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from trl_offpolicy.diagnosis.report.plots import new_figure, spread_axis
from trl_offpolicy.diagnosis.report.step_plots import STEP_FIGURES, draw_step_figures, interval_band, running_mean
from trl_offpolicy.run_folder.run_data import MetricsLog


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
    reward, kl = panels["Reward"], panels["KL between sampler and trainer"]
    assert reward.svg and "Not logged" not in reward.caption
    assert "k1 before" in kl.svg and "k3 before" not in kl.svg
    assert "Not logged: offpolicy/mismatch/kl_k3, offpolicy/kept/kl_k3, offpolicy/kept/kl_k1." in kl.caption
    assert "1 non-finite value(s) left out." in kl.caption
    assert not panels["Effective sample size"].svg


def test_total_group_is_drawn_where_mismatch_is_absent() -> None:
    panels = draw_step_figures(_log(**{"offpolicy/total/kl_k1": [0.1]}))
    assert "k1 before" in panels[1].svg


def test_bands_stand_around_the_values_that_have_an_interval() -> None:
    nan = float("nan")
    band = interval_band(_log(x=[1.0, 2.0, 3.0], x_ci95=[0.5, nan, 1.0]), "x")
    assert band == ([0, 2], [0.5, 2.0], [1.5, 4.0])
    assert interval_band(_log(x=[1.0]), "x") is None


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
    for panel in panels[:2]:
        ids += [node.attrib["id"] for node in ElementTree.fromstring(panel.svg).iter() if "id" in node.attrib]
    assert len(ids) == len(set(ids))
