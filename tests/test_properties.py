"""Properties that every term, loss and preset has, on random batches.

``CASES`` is the table: a new weight, keep term, loss or preset gets its line there.
"""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    KLPenalty,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
    RatioBand,
    RawWeight,
    TruncateWeight,
    losses,
    presets,
)
from trl_offpolicy.functional.levels import LEVELS
from trl_offpolicy.presets.trl import AGGREGATION
from trl_offpolicy.types import RATIOS

NAN, INF = float("nan"), float("inf")
TIS = Correction(weight=TruncateWeight(max_weight=2.0))
LOOSE = {"low": 0.1, "high": 8.0}

WEIGHTS = {
    **{f"truncate {level}": TruncateWeight(level=level, max_weight=2.0, min_weight=0.5) for level in LEVELS},
    **{f"band {level}": BandWeight(level=level, **LOOSE) for level in LEVELS},
    **{f"raw {ratio}": RawWeight(ratio=ratio) for ratio in RATIOS},
    "two": (TruncateWeight(max_weight=3.0), RawWeight(level="sequence", ratio="current/old")),
}
KEEPS = {
    **{f"ratio_band {level}": RatioBand(level=level, **LOOSE) for level in LEVELS},
    **{
        f"divergence {k} {level}": DivergenceBand(statistic=k, high=0.5, level=level)
        for k, level in zip(("k1", "k2", "k3"), LEVELS, strict=True)
    },
    "veto": OutlierVeto(low=0.1, high=10.0),
    "opsm": OffPolicySequenceMask(max_divergence=0.1),
}
CORRECTIONS = {
    **{name: Correction(weight=weight) for name, weight in WEIGHTS.items()},
    **{name: Correction(keep=(term,)) for name, term in KEEPS.items()},
    **{f"{how} normalised": replace(TIS, keep=(KEEPS["veto"],), normalize=how) for how in ("original", "kept")},
    "all, remaining": Correction(
        weight=TruncateWeight(level="sequence", max_weight=3.0),
        keep=tuple(KEEPS.values()),
        measure_on="remaining",
    ),
    "all, drop": Correction(weight=WEIGHTS["two"], keep=tuple(KEEPS.values()), nonfinite="drop", correct_threshold=0.5),
}


def objective_with(correction):
    """PPO's ratio is current/old: a weight that holds it needs a loss without ratio."""
    mismatch_only = all(weight.ratio == "old/sampling" for weight in correction.weights)
    return Objective(policy_loss=losses.PPOClip() if mismatch_only else losses.GPG(), correction=correction)


LOSSES = {
    "dual clip": losses.PPOClip(dual_clip=3.0, delta=4.0),
    "gspo": losses.PPOClip(level="sequence_mean"),
}
CASES = {
    **{name: objective_with(correction) for name, correction in CORRECTIONS.items()},
    **{name: Objective(policy_loss=loss, correction=TIS) for name, loss in LOSSES.items()},
    "vespo, sequence weight": Objective(policy_loss=losses.VESPO(), correction=CORRECTIONS["truncate sequence"]),
    "kl": Objective(kl=KLPenalty(coef=0.1, ratio_weighted=True), kl_weighted=True, correction=TIS, entropy_coef=0.01),
    "kl on kept": Objective(
        kl=KLPenalty(coef=0.1),
        kl_on="kept",
        denominator="kept",
        correction=CORRECTIONS["all, drop"],
        aggregation="seq_mean_token_mean",
    ),
    **{name: presets.get(name).objective for name in presets.names()},
    **{f"trl {name}": presets.from_trl(loss_type=name, beta=0.1, epsilon_high=5.0).objective for name in AGGREGATION},
}
every_case = pytest.mark.parametrize("case", CASES)
examples = settings(
    max_examples=4, deadline=None, derandomize=True, database=None, phases=(Phase.generate, Phase.shrink)
)

TOKEN_FIELDS = (
    "per_token_logps",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
    "entropies",
)
MILD = torch.arange(-48, 1) / 16  # exact in bfloat16
EXTREME = torch.tensor([-1e4, -700.0, -90.0, -20.5, -1.0, -1e-7, 0.0])


@dataclass(frozen=True)
class Outcome:
    """All that an objective gives for a batch."""

    loss: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor
    keep_mask: torch.Tensor
    stats: dict[str, float]


def evaluate(objective, batch):
    batch = replace(batch, per_token_logps=batch.per_token_logps.detach().clone().requires_grad_())
    out = objective(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps)
    return Outcome(out.loss.detach(), gradient, out.weights, out.keep_mask, out.stats.compute())


@st.composite
def batches(draw, logps=MILD, min_rows=1):
    """Up to 4 rows of up to 5 positions, with empty rows and holes; padding is finite."""
    rows, length = draw(st.integers(min_rows, 4)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def pick(values, *shape):
        return values[torch.randint(len(values), shape, generator=generator)]

    return PolicyBatch(
        **{name: pick(logps, rows, length) for name in TOKEN_FIELDS},
        completion_mask=pick(torch.tensor([False, True, True]), rows, length),
        advantages=pick(torch.tensor([-1.5, -0.5, 0.0, 0.25, 2.0]), rows),
        rewards=pick(torch.tensor([0.0, 0.5, 1.0]), rows),
    )


def map_fields(batch, names, function):
    return replace(batch, **{name: function(getattr(batch, name)) for name in names})


def rows_of(batch, rows):
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return PolicyBatch(**{name: None if value is None else value[rows] for name, value in values.items()})


def is_finite(outcome):
    tensors = (outcome.loss, outcome.gradient, outcome.weights)
    return all(t.isfinite().all() for t in tensors) and all(map(math.isfinite, outcome.stats.values()))


def assert_same_stats(got, expected):
    """Equal but for rounding: the correlation divides by a variance, a chi-square may change its 12 % bin."""
    assert set(got) == set(expected)
    for key, value in expected.items():
        if key.endswith("chi2_token_p95"):
            assert got[key] == pytest.approx(value, rel=0.13)
        elif not key.endswith("prob_pearson"):
            assert got[key] == pytest.approx(value, rel=1e-6, abs=1e-6), key


@every_case
@examples
@given(batch=batches())
def test_on_policy_nothing_is_corrected(case, batch):
    same = batch.per_token_logps
    batch = replace(batch, old_per_token_logps=same, sampling_per_token_logps=same)

    out = evaluate(CASES[case], batch)

    assert torch.equal(out.keep_mask, batch.mask)
    torch.testing.assert_close(out.weights, batch.mask.float(), rtol=0, atol=1e-6)
    for key, value in out.stats.items():
        if "dropped" in key or "truncated" in key or "clip" in key:
            assert value == 0.0, key
        elif "/ess_" in key and batch.mask.any():
            assert value == pytest.approx(1.0, abs=1e-6)


@every_case
@examples
@given(batch=batches(), bad=st.sampled_from([NAN, INF, -INF, 1e30]))
def test_padding_changes_nothing_to_the_last_bit(case, batch, bad):
    clean = evaluate(CASES[case], batch)

    out = evaluate(CASES[case], map_fields(batch, TOKEN_FIELDS, lambda x: torch.where(batch.mask, x, bad)))

    for name in ("loss", "gradient", "weights", "keep_mask"):
        assert torch.equal(getattr(out, name), getattr(clean, name)), name
    assert out.stats == clean.stats
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

    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.gradient, expected.gradient[order], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.weights, expected.weights[order], rtol=1e-6, atol=1e-6)
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
    name = data.draw(st.sampled_from(TOKEN_FIELDS[1:4]))
    row = data.draw(st.integers(0, len(batch.mask) - 1))
    position = data.draw(st.integers(0, batch.mask.shape[1] - 1))
    bad = data.draw(st.sampled_from([NAN, INF, -INF]))
    value = getattr(batch, name).clone()
    value[row, position] = bad
    objective = CASES[case]

    out = evaluate(objective, replace(batch, **{name: value}))

    assert is_finite(out)
    read = any(name.removesuffix("_per_token_logps") in ratio for ratio in objective.correction.required_ratios)
    if objective.correction.nonfinite == "drop" and read:
        assert not out.keep_mask[row, position]
    if objective.correction.normalize == "none":  # other rows do not notice
        expected = evaluate(objective, batch)
        others = torch.arange(len(batch.mask)) != row
        assert torch.equal(out.weights[others], expected.weights[others])
        assert torch.equal(out.keep_mask[others], expected.keep_mask[others])


@every_case
@examples
@given(batch=batches())
def test_only_the_loss_carries_gradient(case, batch):
    batch = map_fields(batch, TOKEN_FIELDS, lambda x: x.requires_grad_())

    out = CASES[case](batch)

    assert out.loss.requires_grad
    assert not out.weights.requires_grad
    assert not out.keep_mask.requires_grad
    assert not any(stat.value.requires_grad for stat in out.stats.values())
    out.loss.backward()
    for name in TOKEN_FIELDS[1:4]:
        assert getattr(batch, name).grad is None, name


@every_case
@examples
@given(batch=batches(min_rows=2), data=st.data())
def test_stats_of_the_parts_merge_to_those_of_the_whole(case, batch, data):
    objective = CASES[case]
    if objective.correction.normalize != "none":
        objective = replace(objective, correction=replace(objective.correction, normalize="none"))
    cut = data.draw(st.integers(1, len(batch.mask) - 1))

    parts = [objective(rows_of(batch, rows)).stats for rows in (slice(0, cut), slice(cut, None))]
    whole = objective(batch).stats.compute()

    assert_same_stats(parts[0].merge(parts[1]).compute(), whole)
    assert_same_stats(parts[1].merge(parts[0]).compute(), whole)


@every_case
@examples
@given(batch=batches())
def test_empty_rows_add_nothing(case, batch):
    objective = CASES[case]
    empty = map_fields(rows_of(batch, slice(0, 1)), ("completion_mask",), torch.zeros_like)
    values = {
        item.name: None if value is None else torch.cat([value, getattr(empty, item.name)])
        for item in fields(batch)
        for value in [getattr(batch, item.name)]
    }

    out, expected = objective(PolicyBatch(**values)), objective(batch)

    torch.testing.assert_close(out.weights[:-1], expected.weights, rtol=1e-6, atol=1e-6)
    assert torch.equal(out.keep_mask[:-1], expected.keep_mask)
    assert_same_stats(out.stats.compute(), expected.stats.compute())


@every_case
@examples
@given(batch=batches(logps=torch.cat([MILD, EXTREME])))
def test_values_are_in_their_range(case, batch):
    stats = evaluate(CASES[case], batch).stats

    for key, value in stats.items():
        name = key.rpartition("/")[2]
        if name.startswith("ess_") or name.endswith("fraction") or name.startswith("prob_diff"):
            assert 0.0 <= value <= 1.0 + 1e-6, key
        elif name in ("kl_k3", "kl_reverse_k3", "tv", "std", "log_ppl_abs_diff", "min"):
            assert value >= -1e-6 * max(1.0, stats.get(key.replace(name, "chi2_token"), 1.0)), key
        elif name == "prob_pearson":
            assert -1.0 <= value <= 1.0, key


@examples
@given(batch=batches(logps=torch.cat([MILD, EXTREME])))
@pytest.mark.parametrize("level", LEVELS)
def test_weights_stay_inside_their_bounds(level, batch):
    capped = Correction(weight=TruncateWeight(level=level, max_weight=2.0, min_weight=0.5))(batch).weights[batch.mask]
    band = Correction(weight=BandWeight(level=level, low=0.5, high=2.0))(batch).weights[batch.mask]

    assert ((capped >= 0.5) & (capped <= 2.0)).all()
    assert ((band == 0.0) | ((band >= 0.5) & (band <= 2.0))).all()
    assert torch.equal(band[band > 0], capped[band > 0])


FAMILIES = {  # from tight to loose
    **{f"high {level}": lambda x, level=level: RatioBand(level=level, low=None, high=x) for level in LEVELS},
    **{f"low {level}": lambda x, level=level: RatioBand(level=level, low=1 / x, high=None) for level in LEVELS},
    **{
        f"{k} {level}": lambda x, k=k, level=level: DivergenceBand(statistic=k, level=level, high=x)
        for k in ("k1", "k2", "k3")
        for level in LEVELS
    },
    "k1 low": lambda x: DivergenceBand(statistic="k1", low=-x, high=None),
    "veto high": lambda x: OutlierVeto(low=None, high=x),
    "veto low": lambda x: OutlierVeto(low=1 / x, high=None),
    "opsm": lambda x: OffPolicySequenceMask(max_divergence=x),
}


@examples
@given(batch=batches(), bounds=st.tuples(*[st.floats(0.01, 9.0)] * 2).map(sorted))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_looser_bound_keeps_no_less(family, batch, bounds):
    tight, loose = (Correction(keep=(FAMILIES[family](bound),))(batch).keep_mask for bound in bounds)

    assert not (tight & ~loose).any()


@examples
@given(batch=batches())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_term_can_fire(family, batch):
    """With ratios of e^9 and e^-9 each rule drops something, whatever the batch."""
    drift = torch.full_like(batch.per_token_logps, -9.0)
    up = family.startswith(("high", "k2", "k3", "veto high", "k1 low"))
    old, sampling = (0 * drift, drift) if up else (drift, 0 * drift)
    batch = replace(
        batch,
        per_token_logps=old,
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        advantages=-torch.ones(len(drift)),
    )

    assert not Correction(keep=(FAMILIES[family](2.0),))(batch).keep_mask.any()
