"""Gradient variance by proxy, and cosines of gradients."""

from __future__ import annotations

import math

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine, cosine
from trl_offpolicy.objective.measure import gradient_stats, gradient_variance


def batch(rows: int = 3, length: int = 4, *, with_sums: bool = False, seed: int = 0) -> op.PolicyBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length, 2, 0])[:rows]
    logps = -torch.rand(rows, length, generator=generator) - 0.1
    probs = logps.exp()
    sums = probs.square() + (1 - probs).square() * torch.rand(rows, length, generator=generator)  # as they can be
    return op.PolicyBatch(
        per_token_logps=logps,
        sampling_per_token_logps=logps + 0.3 * torch.randn(rows, length, generator=generator),
        completion_mask=torch.arange(length) < lengths.unsqueeze(1),
        advantages=torch.randn(rows, generator=generator),
        sum_sq_probs=sums if with_sums else None,
    )


def by_hand(data: op.PolicyBatch, weights: torch.Tensor, keep: torch.Tensor) -> float:
    """verl 0.9.1's proxy 2 in loops: mean over responses of (mean w)^2 (mean A)^2 sum_t (1 - 2 pi + sum pi^2)."""
    total, responses = 0.0, 0
    for row in range(len(data.mask)):
        if not data.mask[row].any():
            continue
        responses += 1
        kept = [t for t in range(data.mask.shape[1]) if data.mask[row, t] and keep[row, t]]
        if not kept:
            continue
        score = 0.0
        for t in kept:
            pi = math.exp(float(data.per_token_logps[row, t]))
            score += 1 - pi if data.sum_sq_probs is None else 1 - 2 * pi + float(data.sum_sq_probs[row, t])
        weight = sum(float(weights[row, t]) for t in kept) / len(kept)
        total += (weight * float(data.advantages[row])) ** 2 * score
    return total / responses


def power(data: op.PolicyBatch, weights: torch.Tensor, keep: torch.Tensor) -> float:
    return gradient_stats(data, weights, keep).compute()["offpolicy/gradient/power"]


@pytest.mark.parametrize("with_sums", [False, True])
def test_the_power_is_that_of_the_loops(with_sums: bool) -> None:
    data = batch(with_sums=with_sums)
    weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    keep = data.mask.clone()
    keep[0, 1] = False
    assert power(data, weights, keep) == pytest.approx(by_hand(data, weights, keep), rel=1e-5)
    assert power(data, weights, torch.zeros_like(keep)) == 0.0


def test_the_objective_reports_it_with_what_it_applied() -> None:
    data = batch()
    tis = op.Correction(weight=op.TruncateWeight(max_weight=1.1), keep=(op.OutlierVeto(low=0.9, high=None),))
    out = op.Objective(correction=tis)(data)
    assert float(out.stats["gradient/power"]) == pytest.approx(by_hand(data, out.weights, out.keep_mask), rel=1e-5)
    plain = op.Objective()(data)
    assert float(plain.stats["gradient/power"]) != pytest.approx(float(out.stats["gradient/power"]), rel=1e-3)


def test_padding_and_missing_rows_do_not_matter() -> None:
    data = batch(with_sums=True)
    clean = power(data, torch.ones(3, 4), data.mask)
    for name in ("per_token_logps", "sum_sq_probs"):
        getattr(data, name)[~data.mask] = float("nan")
    weights = torch.ones(3, 4)
    weights[~data.mask] = float("inf")
    assert power(data, weights, data.mask) == clean


def test_micro_batches_merge_to_the_whole() -> None:
    parts = [batch(seed=seed) for seed in (1, 2)]
    stats = [gradient_stats(part, torch.ones(3, 4), part.mask) for part in parts]
    expected = sum(by_hand(part, torch.ones(3, 4), part.mask) for part in parts) / 2
    assert float(stats[0].merge(stats[1])["gradient/power"]) == pytest.approx(expected, rel=1e-5)


def test_without_the_sums_the_mean_is_the_same_for_sampled_tokens() -> None:
    """E pi(y) = sum pi^2, so E[1 - pi(y)] = E[1 - 2 pi(y) + sum pi^2]."""
    probs = torch.tensor([0.6, 0.3, 0.1])
    sums = probs.square().sum()
    exact = (probs * (1 - 2 * probs + sums)).sum()
    assert torch.isclose((probs * (1 - probs)).sum(), exact)


def test_signal_and_noise() -> None:
    logs = {"grad_norm": 2.0, "offpolicy/gradient/power": 10.0}
    assert gradient_variance(logs, responses=4) == {"offpolicy/gradient/signal": 4.0, "offpolicy/gradient/noise": 2.0}
    assert gradient_variance({**logs, "grad_norm": 4.0}, responses=4)["offpolicy/gradient/noise"] == 0.0
    assert gradient_variance(logs, responses=1)["offpolicy/gradient/noise"] == 0.0
    assert gradient_variance({"grad_norm": 2.0}, responses=4) == {}
    assert gradient_variance({**logs, "grad_norm": math.nan}, responses=4) == {}


# ------------------------------------------------------------------------------------------------------------- cosines


def test_cosine_of_gradients_in_several_tensors() -> None:
    first, second = [torch.tensor([1.0]), torch.tensor([2.0, 0.0])], [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert float(cosine(first, second)) == pytest.approx(3 / (5**0.5 * 5))
    assert float(cosine(first, [-part for part in first])) == pytest.approx(-1.0)
    assert float(cosine(first, [torch.zeros(1), torch.zeros(2)])) == 0.0


def test_consecutive_steps_are_averaged_over_the_window() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    track = ConsecutiveCosine()
    seen = []
    for gradient in ([1.0, 0.0], [0.0, 2.0], [0.0, -1.0], [0.0, -3.0]):
        weight.grad = torch.tensor(gradient)
        track.update([weight])
        seen.append(track.value() if gradient == [0.0, 2.0] else None)
    assert seen[1] == pytest.approx(0.0) and track.value() == pytest.approx((-1 + 1) / 2)
    assert track.value() is None


@pytest.mark.parametrize("limit", [0.0, 0.3, 0.9])
def test_a_gradient_that_is_too_aligned_loses_the_excess_of_its_parallel_part(limit: float) -> None:
    """Against float64: the part across stays, the cosine to the raw gradient before is the limit; or nothing moves."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    track, before, projected = ConsecutiveCosine(limit), None, []
    for step in range(8):
        raw = torch.randn(7, generator=generator, dtype=torch.float64)
        if before is not None and step % 2:
            raw = raw + 4.0 * before  # aligned
        weights[0].grad, weights[1].grad = raw[:3].float(), raw[3:].view(2, 2).float()
        track.update(weights)
        now = torch.cat([weights[0].grad, weights[1].grad.flatten()]).double()
        if before is not None:
            unit = before / before.norm()
            across = raw - (raw @ unit) * unit
            is_aligned = float(raw @ unit / raw.norm()) > limit
            projected.append(is_aligned)
            wanted = across + across.norm() * limit / math.sqrt(1 - limit**2) * unit if is_aligned else raw
            torch.testing.assert_close(now, wanted, rtol=1e-4, atol=1e-5)
            if is_aligned:
                assert float(now @ unit / now.norm()) == pytest.approx(limit, abs=1e-4)
        before = raw
    assert sum(projected) > 0 and track.projected() == pytest.approx(sum(projected) / 7)
    assert track.value() is not None and track.projected() is None


def test_the_same_gradient_again_and_an_opposite_one() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    track, seen = ConsecutiveCosine(0.5), []
    for gradient in ([1.0, 0.0], [2.0, 0.0], [-3.0, 0.0], [0.0, 0.0]):
        weight.grad = torch.tensor(gradient)
        track.update([weight])
        seen.append(weight.grad.tolist())
    assert seen == [[1.0, 0.0], [0.0, 0.0], [-3.0, 0.0], [0.0, 0.0]]  # nothing is left across; opposite stays
    assert track.projected() == pytest.approx(1 / 3)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_step_that_a_gradient_scaler_skips_is_forgotten(wrong: float) -> None:
    """Neither it nor the step after it is compared, and the weights stay finite."""
    weight = torch.nn.Parameter(torch.zeros(2))
    track, seen = ConsecutiveCosine(0.5), []
    for gradient in ([1.0, 0.0], [wrong, 1.0], [2.0, 0.0], [4.0, 0.0]):
        weight.grad = torch.tensor(gradient)
        track.update([weight])
        seen.append(weight.grad.tolist())
    assert seen[2:] == [[2.0, 0.0], [0.0, 0.0]]
    assert track.projected() == 1.0 and track.value() == 1.0  # of the one pair that can be compared


def test_parameters_without_a_gradient_keep_their_place() -> None:
    """Experts that no token reached: another set of parameters has a gradient in each step."""
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    track = ConsecutiveCosine(0.0)
    first.grad = torch.tensor([3.0, 0.0])
    track.update([first, second])
    first.grad, second.grad = None, torch.ones(3)
    track.update([first, second])
    assert track.value() == 0.0 and second.grad.tolist() == [1.0, 1.0, 1.0]
    first.grad = torch.tensor([1.0, 0.0])
    track.update([first, second])
    assert track.value() == pytest.approx(math.sqrt(3 / 4))
    assert second.grad.tolist() == pytest.approx([0.0] * 3) and first.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("size", [1e-12, 1e-18, 1e10])
def test_very_small_and_very_large_gradients_are_compared(size: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    track = ConsecutiveCosine()
    for _ in range(2):
        weight.grad = torch.full((3,), size)
        track.update([weight])
    assert track.value() == pytest.approx(1.0, abs=1e-3)
