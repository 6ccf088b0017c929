"""Clustered intervals: against the textbook formula, against simulation, and what they refuse."""

import math

import pytest
import torch

from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS, ess_token, fraction
from trl_offpolicy.functional.intervals import ClusterRows, half_width_95, t_quantile_975
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.moments import ROW_LAYOUT, Layout, Moments, ratio_row_moments, ratio_rows
from trl_offpolicy.functional.weight_moments import WEIGHT_LAYOUT

MEAN = Layout(sums=("tokens", "x"))


def test_a_mean_of_equal_groups_has_the_textbook_interval():
    x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    totals = torch.stack([torch.ones(4), x], 1).double()

    width = half_width_95(fraction("x", "tokens"), MEAN, totals)

    assert width.item() == pytest.approx(3.182 * x.std().item() / 2, rel=1e-9)  # t(3), s / sqrt(4)


def test_a_ratio_of_sums_has_cochrans_linearised_interval():
    x, n = torch.tensor([3.0, 1.0, 5.0]).double(), torch.tensor([2.0, 1.0, 7.0]).double()
    ratio = x.sum() / n.sum()
    expected = 4.303 * math.sqrt(1.5 * (x - ratio * n).square().sum().item()) / n.sum().item()

    width = half_width_95(fraction("x", "tokens"), MEAN, torch.stack([n, x], 1))

    assert width.item() == pytest.approx(expected, rel=1e-9)


def test_one_group_has_no_interval():
    assert half_width_95(fraction("x", "tokens"), MEAN, torch.ones(1, 2).double()) is None
    assert half_width_95(fraction("x", "tokens"), MEAN, torch.ones(0, 2).double()) is None


def test_equal_weights_have_an_interval_of_zero():
    row = torch.tensor([[4.0, 8.0, 16.0, 1.0, 2.0, 4.0]]).double()

    assert half_width_95(ess_token, Layout(WEIGHT_LAYOUT.sums), row.expand(5, 6)).item() == pytest.approx(0.0, abs=1e-9)


def test_rows_of_a_group_are_added_up_and_empty_rows_ignored():
    values = torch.tensor([[1.0, 5.0], [2.0, 7.0], [0.0, 0.0], [4.0, 1.0]]).double()
    table = ClusterRows(MEAN, values, torch.tensor([7, -3, 8, 7]))

    assert table.group_totals().tolist() == [[2.0, 7.0], [5.0, 6.0]]
    assert ClusterRows(MEAN, values, None).group_totals().tolist() == [[1.0, 5.0], [2.0, 7.0], [4.0, 1.0]]


def test_batches_with_and_without_groups_do_not_mix():
    known, unknown = (ClusterRows(MEAN, torch.ones(1, 2).double(), ids) for ids in (torch.tensor([1]), None))

    with pytest.raises(ValueError, match="group_ids must be given for all batches"):
        known.merge(unknown)
    with pytest.raises(ValueError, match="group_ids must be given for all batches"):
        unknown.merge(known)


@pytest.mark.parametrize(
    ("dof", "value"), [(1, 12.706), (10, 2.228), (30, 2.042), (31, 2.03951), (60, 2.0003), (1000, 1.9623)]
)
def test_t_quantiles(dof, value):
    assert t_quantile_975(dof) == pytest.approx(value, rel=3e-4)


def sample(generator, groups, per_group=4, tokens=30):
    """Log-ratios with a common part in each group: what makes tokens dependent."""
    common = 0.05 * torch.randn(groups, 1, 1, generator=generator)
    own = 0.1 * torch.randn(groups, per_group, tokens, generator=generator)
    ratios = (common + own).flatten(0, 1)
    sampling = torch.full_like(ratios, -1.0)
    mask = torch.ones_like(ratios).bool()
    rows = ratio_row_moments(ratio_rows(log_ratio(sampling + ratios, sampling, mask), sampling, mask))
    return ClusterRows(ROW_LAYOUT, rows, torch.arange(groups).repeat_interleave(per_group))


@pytest.mark.parametrize(
    ("name", "truth"),
    [  # l ~ N(0, 0.05^2 + 0.1^2): E[-l] = 0, E[rho] = exp(v / 2), E[rho^2] = exp(2 v)
        ("kl_k1", 0.0),
        ("kl_k3", math.exp(0.0125 / 2) - 1),
        ("chi2_token", math.exp(0.025) - 1),
    ],
)
def test_coverage_is_that_of_a_95_percent_interval(name, truth):
    generator = torch.Generator().manual_seed(1)
    inside = alone = 0
    finalize, runs = RATIO_DIAGNOSTICS[name], 300
    for _ in range(runs):
        table = sample(generator, groups=20)
        totals = table.group_totals()
        value = (finalize_total(finalize, totals) - truth).abs()
        inside += int(value <= half_width_95(finalize, ROW_LAYOUT, totals))
        alone += int(value <= half_width_95(finalize, ROW_LAYOUT, table.values))

    assert (0.90 if name == "kl_k1" else 0.85) <= inside / runs <= 0.985  # k3 and chi-square are skewed
    if name == "kl_k1":
        assert alone / runs < 0.85  # responses counted as independent: far too narrow


def finalize_total(finalize, totals):
    return finalize(Moments(ROW_LAYOUT, totals.sum(0), totals.new_empty(0)))


def test_a_group_that_meets_again_in_a_later_batch_is_one_group():
    generator = torch.Generator().manual_seed(3)
    whole = sample(generator, groups=3)
    first = ClusterRows(whole.layout, whole.values[:5], whole.ids[:5])
    second = ClusterRows(whole.layout, whole.values[5:], whole.ids[5:])

    for merged in (first.merge(second), second.merge(first)):
        torch.testing.assert_close(merged.group_totals(), whole.group_totals(), rtol=1e-12, atol=0)
    alone = [ClusterRows(part.layout, part.values, None) for part in (first, second)]
    assert len(alone[0].merge(alone[1]).group_totals()) == 12
