"""Properties that every term, loss and preset has, on random batches. The table is in ``property_cases.py``."""

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from property_cases import (
    CASES,
    EXTREME,
    FAMILIES,
    FIRES_UPWARDS,
    KEEPS,
    MILD,
    TOKEN_FIELDS,
    batches,
    correction_of,
    map_fields,
    map_tensors,
    on_policy_weight,
    rows_of,
    terms_of,
)

from trl_offpolicy import BandWeight, Correction, PolicyBatch, TruncateWeight
from trl_offpolicy.correction.terms.weights import WEIGHT_LEVELS
from trl_offpolicy.presets.parsing import KEEP_TYPES
from trl_offpolicy.stats import Stats

NAN, INF = float("nan"), float("inf")
every_case = pytest.mark.parametrize("case", CASES)
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "2"))
"""The simplest batch, and random ones; `make test-slow` asks for more."""
examples = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=(Phase.generate, Phase.shrink)
)


@dataclass(frozen=True)
class Outcome:
    """All that an objective gives for a batch."""

    loss: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor
    keep_mask: torch.Tensor
    moments: Stats

    @cached_property
    def stats(self):
        """The logged numbers."""
        return self.moments.compute()


def taken_by(objective, batch):
    """The batch without what the objective refuses: a centre beside old, where the loss reads the weights itself."""
    return replace(batch, proximal_per_token_logps=None) if objective.policy_loss.weight_use == "inside" else batch


def evaluate(objective, batch):
    batch = taken_by(objective, batch)
    batch = replace(batch, per_token_logps=batch.per_token_logps.detach().clone().requires_grad_())
    out = objective(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps)
    return Outcome(out.loss.detach(), gradient, out.weights, out.keep_mask, out.stats)


def is_by_row(objective):
    """Whether a row is judged by itself: no part of it looks at the others."""
    return objective.policy_loss.scope == "row" and (objective.correction or Correction()).scope == "row"


def is_finite(outcome):
    tensors = (outcome.loss, outcome.gradient, outcome.weights)
    return all(t.isfinite().all() for t in tensors) and all(map(math.isfinite, outcome.stats.values()))


def assert_same_stats(got, expected):
    """Equal but for rounding of float32 sums in another order.

    A chi-square may change its 12 % bin. Standard deviations and interval widths are roots of differences of second
    moments: 1e-7 of those is 3e-4 of the mean. The correlation divides by such a difference and is left out.
    """
    assert set(got) == set(expected)
    for key, value in expected.items():
        if key.endswith("chi2_token_p95"):
            assert got[key] == pytest.approx(value, rel=0.13)
        elif key.endswith(("std", "_ci95")):
            mean = abs(expected.get(key.removesuffix("std") + "mean", 0.0))
            assert got[key] == pytest.approx(value, rel=3e-3, abs=3e-3 * max(1.0, mean)), key
        elif not key.endswith("prob_pearson"):
            assert got[key] == pytest.approx(value, rel=2e-5, abs=2e-5), key


@every_case
@examples
@given(batch=batches())
def test_on_policy_nothing_is_corrected(case, batch):
    same = batch.per_token_logps
    batch = replace(
        batch,
        old_per_token_logps=same,
        sampling_per_token_logps=same,
        proximal_per_token_logps=same,
        policy_versions=torch.full_like(batch.policy_versions, batch.current_version),
        group_rewards=torch.tensor([0.0, 1.0]).expand(len(batch.policy_versions), 2),
    )
    correction = correction_of(case)

    out = evaluate(CASES[case], batch)

    assert torch.equal(out.keep_mask, batch.mask)
    torch.testing.assert_close(out.weights, on_policy_weight(correction) * batch.mask, rtol=0, atol=1e-5)
    for key, value in out.stats.items():
        if "dropped" in key or "clip" in key or "truncated" in key:
            assert value == 0.0, key
        elif key.endswith(("ess_token", "ess_sequence")) and batch.mask.any():
            assert value == pytest.approx(1.0, abs=1e-5)


@every_case
@examples
@given(batch=batches(), bad=st.sampled_from([NAN, INF, -INF, 1e30]))
def test_padding_changes_nothing_to_the_last_bit(case, batch, bad):
    clean = evaluate(CASES[case], batch)

    out = evaluate(CASES[case], map_fields(batch, TOKEN_FIELDS, lambda x: torch.where(batch.mask, x, bad)))

    for name in ("loss", "gradient", "weights", "keep_mask"):
        assert torch.equal(getattr(out, name), getattr(clean, name)), name
    assert set(out.moments.groups) == set(clean.moments.groups)
    for name, group in clean.moments.groups.items():
        assert torch.equal(out.moments.groups[name].moments.sums, group.moments.sums), name
        assert torch.equal(out.moments.groups[name].moments.maxima, group.moments.maxima), name
    assert out.gradient[~batch.mask].abs().sum().item() == 0.0
    assert out.weights[~batch.mask].abs().sum().item() == 0.0
    assert not out.keep_mask[~batch.mask].any()


@every_case
@examples
@given(batch=batches(), seed=st.integers(0, 99))
def test_rows_may_come_in_any_order(case, batch, seed):
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    expected = evaluate(CASES[case], batch)

    out = evaluate(CASES[case], rows_of(batch, order))

    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.gradient, expected.gradient[order], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out.weights, expected.weights[order], rtol=2e-5, atol=2e-5)
    assert torch.equal(out.keep_mask, expected.keep_mask[order])
    assert_same_stats(out.stats, expected.stats)


@every_case
@examples
@given(batch=batches())
def test_bfloat16_gives_what_its_float32_values_give(case, batch):
    names = (*TOKEN_FIELDS, "advantages", "rewards")
    expected = evaluate(CASES[case], batch)  # all values are exact in bfloat16

    out = evaluate(CASES[case], map_fields(batch, names, lambda x: x.bfloat16()))

    assert out.weights.dtype == torch.float32
    assert torch.equal(out.weights, expected.weights)
    assert torch.equal(out.keep_mask, expected.keep_mask)
    assert torch.equal(out.loss, expected.loss)
    assert out.stats == pytest.approx(expected.stats, abs=1e-9)


@every_case
@examples
@given(batch=batches(logps=EXTREME))
def test_extreme_log_probs_stay_finite(case, batch):
    assert is_finite(evaluate(CASES[case], batch))


@every_case
@examples
@given(batch=batches(), data=st.data())
def test_log_probs_that_are_not_finite_stay_local(case, batch, data):
    name = data.draw(st.sampled_from([name for name in TOKEN_FIELDS[1:5] if getattr(batch, name) is not None]))
    row = data.draw(st.integers(0, len(batch.mask) - 1))
    position = data.draw(st.integers(0, batch.mask.shape[1] - 1))
    bad = data.draw(st.sampled_from([NAN, INF, -INF]))
    value = getattr(batch, name).clone()
    value[row, position] = bad
    correction = correction_of(case)

    out = evaluate(CASES[case], replace(batch, **{name: value}))

    assert is_finite(out)
    read = any(name.removesuffix("_per_token_logps") in ratio for ratio in correction.required_ratios)
    if correction.nonfinite == "drop" and read:
        assert not out.keep_mask[row, position]
    if correction.scope == "row":  # other rows do not notice
        expected = evaluate(CASES[case], batch)
        others = torch.arange(len(batch.mask)) != row
        assert torch.equal(out.weights[others], expected.weights[others])
        assert torch.equal(out.keep_mask[others], expected.keep_mask[others])


@every_case
@examples
@given(batch=batches())
def test_only_the_loss_carries_gradient(case, batch):
    batch = map_fields(batch, TOKEN_FIELDS, lambda x: x.requires_grad_())
    batch = taken_by(CASES[case], batch)
    out = CASES[case](batch)

    assert out.loss.requires_grad
    assert not out.weights.requires_grad
    assert not out.keep_mask.requires_grad
    assert not any(stat.value.requires_grad for stat in out.stats.values())
    out.loss.backward()
    for name in TOKEN_FIELDS[1:5]:
        assert getattr(batch, name) is None or getattr(batch, name).grad is None, name


@pytest.mark.parametrize("case", [case for case in CASES if is_by_row(CASES[case])])
@examples
@given(batch=batches(min_rows=2), data=st.data())
def test_stats_of_the_parts_merge_to_those_of_the_whole(case, batch, data):
    """Where a row is judged by itself: a part of a batch is not the batch for a budget, a group or a mean weight."""
    objective = CASES[case]
    cut, batch = data.draw(st.integers(1, len(batch.mask) - 1)), taken_by(objective, batch)

    parts = [objective(rows_of(batch, rows)).stats for rows in (slice(0, cut), slice(cut, None))]
    whole = objective(batch).stats.compute()

    assert_same_stats(parts[0].merge(parts[1]).compute(), whole)
    assert_same_stats(parts[1].merge(parts[0]).compute(), whole)


@every_case
@examples
@given(batch=batches())
def test_empty_rows_add_nothing(case, batch):
    objective = CASES[case]
    batch = taken_by(objective, batch)
    longer = map_tensors(batch, lambda value: torch.cat([value, value[:1]]))
    mask = longer.mask.clone()
    mask[-1] = False

    out, expected = objective(replace(longer, completion_mask=mask)), objective(batch)

    torch.testing.assert_close(out.weights[:-1], expected.weights, rtol=2e-5, atol=2e-5)
    assert torch.equal(out.keep_mask[:-1], expected.keep_mask)
    assert_same_stats(out.stats.compute(), expected.stats.compute())


@every_case
@examples
@given(batch=batches(logps=torch.cat([MILD, EXTREME])))
def test_values_are_in_their_range(case, batch):
    stats = evaluate(CASES[case], batch).stats

    for key, value in stats.items():
        name = key.rpartition("/")[2]
        if name.endswith("_ci95"):
            assert value >= 0.0, key
        elif name.startswith("ess_") or name.endswith("fraction") or name.startswith("prob_diff"):
            assert 0.0 <= value <= 1.0 + 1e-6, key
        elif name in ("kl_k3", "kl_reverse_k3", "tv", "std", "log_ppl_abs_diff", "min"):
            assert value >= -1e-6 * max(1.0, stats.get(key.replace(name, "chi2_token"), 1.0)), key
        elif name == "prob_pearson":
            assert -1.0 <= value <= 1.0, key


@examples
@given(batch=batches(logps=torch.cat([MILD, EXTREME])))
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_weights_stay_inside_their_bounds(level, batch):
    capped = Correction(weight=TruncateWeight(level=level, max_weight=2.0, min_weight=0.5))(batch).weights[batch.mask]
    band = Correction(weight=BandWeight(level=level, low=0.5, high=2.0))(batch).weights[batch.mask]

    assert ((capped >= 0.5) & (capped <= 2.0)).all()
    assert ((band == 0.0) | ((band >= 0.5) & (band <= 2.0))).all()
    assert torch.equal(band[band > 0], capped[band > 0])


@examples
@given(batch=batches(), bounds=st.tuples(*[st.floats(0.01, 9.0)] * 2).map(sorted))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_looser_bound_keeps_no_less(family, batch, bounds):
    tight, loose = (Correction(keep=terms_of([FAMILIES[family](bound)]))(batch).keep_mask for bound in bounds)

    assert not (tight & ~loose).any()


@examples
@given(batch=batches())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_term_can_fire(family, batch):
    """With ratios of e^9 and e^-9 each rule drops something, whatever the batch."""
    drift = torch.full_like(batch.per_token_logps, -9.0)
    up = family.startswith(FIRES_UPWARDS) and family != "prob_diff low"
    old, sampling = (0 * drift, drift) if up else (drift, 0 * drift)
    batch = replace(
        batch,
        per_token_logps=old,
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        policy_versions=torch.zeros_like(batch.policy_versions),
        group_rewards=torch.ones(len(drift), 2),
        advantages=torch.full((len(drift),), 1.0 if family == "probability high" else -1.0),
    )

    assert not Correction(keep=terms_of([FAMILIES[family](2.0)]))(batch).keep_mask.any()


@pytest.mark.parametrize("name", KEEP_TYPES)
def test_the_example_of_every_keep_term_can_fire(name):
    """Ratios of e^9 and e^-9, advantages of both signs, old versions: something of it goes."""
    entry = next(one for one in KEEPS.values() if any(isinstance(term, KEEP_TYPES[name]) for term in terms_of([one])))
    drift, zero = torch.full((2, 3), -9.0), torch.zeros(2, 3)
    kept = []
    for old, sampling in ((drift, zero), (zero, drift)):
        batch = PolicyBatch(
            per_token_logps=old,
            old_per_token_logps=old if "old/sampling" in {term.ratio for term in terms_of([entry])} else sampling,
            sampling_per_token_logps=sampling,
            completion_mask=torch.ones(2, 3).bool(),
            advantages=torch.tensor([1.0, -1.0]),
            group_ids=torch.zeros(2).long(),
            group_rewards=torch.ones(2, 2),
            policy_versions=torch.zeros(2).long(),
            current_version=9,
        )
        kept.append(Correction(keep=terms_of([entry]))(batch).keep_mask)
    assert not torch.stack(kept).all()
