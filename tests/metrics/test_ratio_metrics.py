"""Every ratio metric against the formulas of docs/metrics.md, spelled out token by token in float64."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS
from trl_offpolicy.metrics import RATIO_METRICS

NAN, INF = float("nan"), float("inf")
P95 = ("chi2_token_p95", "tv_p95")
EXACT = sorted(set(RATIO_METRICS) - set(P95))
SYMMETRIC = {  # unchanged if numerator and denominator change places
    "log_ppl_abs_diff", "prob_diff_mean", "prob_diff_max", "prob_diff_std", "prob_pearson", "logp_diff_mean",
    "logp_diff_std", "logp_diff_max", "response_max_mean", "response_mean_mean", "response_max_prob_diff_mean",
    "response_mean_prob_diff_mean", "response_max_prob_diff_above_half", "nonfinite_fraction",
}  # fmt: skip
RTOL, ATOL = 2e-5, 1e-6  # float32 row sums are off by 1e-7 of the sum of the absolute values, moments by several


def naive(numerator, denominator, mask):
    """{name: value} with loops over tokens; the inputs as float64, no function of the package."""
    numerator, denominator = (x.detach().double().numpy() for x in (numerator, denominator))
    trainable, tokens, rows = int(mask.sum()), [], []
    for i in range(len(mask)):
        row = []
        for t in range(mask.shape[1]):
            if mask[i, t] and math.isfinite(numerator[i, t]) and math.isfinite(denominator[i, t]):
                row.append((numerator[i, t] - denominator[i, t], denominator[i, t]))
        tokens += row
        if row:
            rows.append(row)
    out = dict.fromkeys(RATIO_DIAGNOSTICS, 0.0)
    out["nonfinite_fraction"] = 1 - len(tokens) / trainable if trainable else 0.0
    if not tokens:
        return out
    found = {**_of_tokens(tokens), **_of_rows(rows)}
    unwritten = set(EXACT) - set(found) - {"nonfinite_fraction"}
    assert not unwritten, f"_of_tokens or _of_rows must hold the formula of {sorted(unwritten)}, but neither does."
    return {**out, **found}


def held_ratio(log_ratio):
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def _of_tokens(tokens):
    rho = [held_ratio(log_ratio) for log_ratio, _ in tokens]
    p = [math.exp(logp) for _, logp in tokens]  # denominator
    q = [math.exp(logp + log_ratio) for log_ratio, logp in tokens]  # numerator: its ratio is held, it is not
    gaps = [abs(q_t - p_t) for p_t, q_t in zip(p, q, strict=True)]
    log_ratios = [log_ratio for log_ratio, _ in tokens]
    negligible = 1e-5 * max(np.mean(np.square(p)), np.mean(np.square(q)))
    agree = np.mean(np.square(gaps)) <= negligible
    varies = np.var(p) > negligible and np.var(q) > negligible
    return {
        "kl_k1": np.mean([-x for x in log_ratios]),
        "kl_k3": np.mean([r - 1 - x for r, x in zip(rho, log_ratios, strict=True)]),
        "kl_reverse_k3": np.mean([r * x - r + 1 for r, x in zip(rho, log_ratios, strict=True)]),
        "tv": np.mean([abs(r - 1) for r in rho]) / 2,
        "chi2_token": np.mean([r * r for r in rho]) - 1,
        "prob_diff_mean": np.mean(gaps),
        "prob_diff_max": max(gaps),
        "prob_diff_std": np.std(gaps),
        "prob_pearson": np.corrcoef(p, q)[0, 1] if varies else float(agree),
        "logp_diff_mean": np.mean([abs(x) for x in log_ratios]),
        "logp_diff_std": np.std([abs(x) for x in log_ratios]),
        "logp_diff_max": max(abs(x) for x in log_ratios),
        "confident_disagreement_fraction": np.mean(
            [x < -2 and p_t >= 0.5 for x, p_t in zip(log_ratios, p, strict=True)]
        ),
    }


def _of_rows(rows):
    chi2_sequence, chi2_rows, a, b, largest, means, products = [], [], [], [], [], [], []
    tv_rows, top_gaps, mean_gaps = [], [], []
    for row in rows:
        log_ratios = [log_ratio for log_ratio, _ in row]
        products.append(sum(log_ratios))
        gaps = [abs(math.exp(logp + x) - math.exp(logp)) for x, logp in row]
        top_gaps.append(max(gaps))
        mean_gaps.append(np.mean(gaps))
        tv_rows.append(np.mean([abs(held_ratio(x) - 1) for x in log_ratios]) / 2)
        chi2_sequence.append(held_ratio(sum(log_ratios)) ** 2 - 1)
        chi2_rows.append(np.mean([held_ratio(x) ** 2 for x in log_ratios]) - 1)
        b.append(np.mean([logp for _, logp in row]))
        a.append(b[-1] + np.mean(log_ratios))
        largest.append(max(abs(x) for x in log_ratios))
        means.append(np.mean([abs(x) for x in log_ratios]))
    shifted = np.exp(np.array(products) - max(products))
    diffs = [b_i - a_i for a_i, b_i in zip(a, b, strict=True)]
    return {
        "chi2_sequence": np.mean(chi2_sequence),
        "chi2_token_p95": np.quantile(chi2_rows, 0.95, method="inverted_cdf"),
        "tv_p95": np.quantile(tv_rows, 0.95, method="inverted_cdf"),
        "response_max_prob_diff_mean": np.mean(top_gaps),
        "response_mean_prob_diff_mean": np.mean(mean_gaps),
        "response_max_prob_diff_above_half": np.mean([gap > 0.5 for gap in top_gaps]),
        "ppl_sampling": np.mean([math.exp(min(-x, 80)) for x in b]),
        "ppl_old": np.mean([math.exp(min(-x, 80)) for x in a]),
        "ppl_ratio": np.mean([math.exp(x) for x in diffs]),
        "log_ppl_diff": np.mean(diffs),
        "log_ppl_abs_diff": np.mean([abs(x) for x in diffs]),
        "log_ppl_diff_max": max(diffs),
        "log_ppl_diff_min": min(diffs),
        "response_max_mean": np.mean(largest),
        "response_mean_mean": np.mean(means),
        "ess_sequence": shifted.sum() ** 2 / (len(shifted) * (shifted**2).sum()),
    }


def sample(seed=0, rows=12, length=40, shift=0.06, spread=0.3):
    """Ragged log-probs on a grid of 1/1024, so that float32 subtracts them exactly; NaN on padding."""
    generator = torch.Generator().manual_seed(seed)

    def grid(x):
        return (x * 1024).round() / 1024

    sampling = grid(-torch.rand(rows, length, generator=generator) * 3 - 0.05)
    noise = torch.randn(rows, length, generator=generator) * spread
    rowwise = torch.randn(rows, 1, generator=generator) * spread / 4  # responses differ in their mean too
    sampling[0, -4:] = -0.25  # likely tokens that the trainer finds unlikely: confident disagreements
    noise[0, -4:] += 3.0
    old = sampling - grid(noise + rowwise + shift)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    mask &= torch.rand(rows, length, generator=generator) > 0.1  # tool tokens in between
    mask[0] = True
    mask[-1] = False  # an empty row
    return torch.where(mask, old, NAN), torch.where(mask, sampling, NAN), mask


def with_nonfinite():
    old, sampling, mask = sample(1)
    old[0, 3], sampling[0, 5], sampling[0, 7], old[0, 9] = NAN, NAN, -INF, INF
    old[0, 11] = sampling[0, 11] = -INF
    old[1] = NAN  # a row that cannot be observed at all
    return old, sampling, mask


def extreme():
    """Log-ratios up to +-60 nats (ratios clamped to e^20), products far beyond, one perplexity beyond exp(80)."""
    generator = torch.Generator().manual_seed(2)
    sampling = -torch.randint(1, 60, (6, 9), generator=generator).float()
    old = -torch.randint(0, 60, (6, 9), generator=generator).float()
    old[0], sampling[0] = -90.0, -85.0
    return old, sampling, torch.rand(6, 9, generator=generator) > 0.2


def bfloat16():
    old, sampling, mask = sample(3)
    return old.bfloat16(), sampling.bfloat16(), mask


def one_token():
    return torch.tensor([[-0.75]]), torch.tensor([[-1.5]]), torch.tensor([[True]])


SAMPLES = {
    "ragged": sample,
    "nonfinite": with_nonfinite,
    "extreme": extreme,
    "bfloat16": bfloat16,
    "one_token": one_token,
    "long": lambda: sample(4, rows=3, length=2000),
    "integer_mask": lambda: (*sample(5)[:2], sample(5)[2].long()),
}
REFERENCE = {name: naive(*make()) for name, make in SAMPLES.items()}


def value(name, *batches):
    metric = RATIO_METRICS[name]()
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("name", EXACT)
def test_equals_the_formula(name, case):
    got = value(name, SAMPLES[case]())
    assert got.dtype == torch.float64 and got.shape == ()
    of_a_constant = case == "one_token" and name in ("prob_diff_std", "logp_diff_std")
    atol = 5e-4 if of_a_constant else ATOL  # std of a constant: 5e-4 of it
    np.testing.assert_allclose(got.item(), REFERENCE[case][name], rtol=RTOL, atol=atol)


@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("name", P95)
def test_p95_is_the_upper_edge_of_the_right_bin(name, case):
    got, exact = value(name, SAMPLES[case]()).item(), REFERENCE[case][name]
    if exact > 1e4:
        assert got == pytest.approx(1e4)
    else:
        assert got / 10**0.05 * (1 - 1e-6) <= exact <= got * (1 + 1e-6)


@pytest.mark.parametrize("name", sorted(set(EXACT) - SYMMETRIC))
def test_direction_matters(name):
    """With the sign of every log-ratio flipped the value differs by far more than the tolerance above."""
    old, sampling, mask = sample()
    flipped = REFERENCE["ragged"][name]
    assert abs(value(name, (sampling, old, mask)).item() - flipped) > 1e-3 * max(1.0, abs(flipped))


@pytest.mark.parametrize("name", sorted(SYMMETRIC))
def test_symmetric_in_both_policies(name):
    old, sampling, mask = sample()
    got = value(name, (sampling, old, mask)).item()
    np.testing.assert_allclose(got, REFERENCE["ragged"][name], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", RATIO_METRICS)
def test_on_policy_identity(name):
    _, sampling, mask = sample()
    perplexity = REFERENCE["ragged"]["ppl_sampling"]
    ones = {"ppl_ratio": 1.0, "prob_pearson": 1.0, "ess_sequence": 1.0}
    expected = {**ones, "ppl_old": perplexity, "ppl_sampling": perplexity}
    got = value(name, (sampling, sampling.clone(), mask)).item()
    np.testing.assert_allclose(got, expected.get(name, 0.0), rtol=RTOL, atol=0)


@pytest.mark.parametrize("name", ["kl_k3", "kl_reverse_k3", "chi2_token", "kl_k1", "tv"])
def test_small_mismatch_is_not_rounding_noise(name):
    """|l| = 2^-12: k3 is 3e-8, of terms of 2e-4; 1 % is asked for (float32 exp - 1 would miss all of it)."""
    sampling = torch.full((4, 128), -1.0)
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0]).repeat(103)[:512].view(4, 128)
    batch = (sampling + sign * 2.0**-12, sampling, torch.ones(4, 128).bool())
    np.testing.assert_allclose(value(name, batch).item(), naive(*batch)[name], rtol=0.01, atol=0)


@pytest.mark.parametrize("name", RATIO_METRICS)
def test_two_updates_are_one(name):
    old, sampling, mask = with_nonfinite()
    whole = value(name, (old, sampling, mask)).item()
    first, second = (slice(0, 5), slice(0, 40)), (slice(5, 12), slice(0, 40))
    parts = [(old[s], sampling[s], mask[s]) for s in (first, second)]
    assert value(name, *parts).item() == pytest.approx(whole, rel=RTOL, abs=ATOL)
    assert value(name, *reversed(parts)).item() == pytest.approx(whole, rel=RTOL, abs=ATOL)


@pytest.mark.parametrize("name", RATIO_METRICS)
def test_padding_and_the_order_of_rows_change_nothing(name):
    old, sampling, mask = sample()
    whole = value(name, (old, sampling, mask)).item()
    order = torch.randperm(len(old), generator=torch.Generator().manual_seed(0))
    wide = [torch.nn.functional.pad(x, (0, 7), value=fill) for x, fill in ((old, INF), (sampling, NAN), (mask, False))]
    assert value(name, [x[order] for x in (old, sampling, mask)]).item() == pytest.approx(whole, rel=RTOL, abs=ATOL)
    assert value(name, wide).item() == pytest.approx(whole, rel=RTOL, abs=ATOL)


@pytest.mark.parametrize("name", RATIO_METRICS)
def test_without_a_trainable_token(name):
    empty = torch.full((3, 4), NAN), torch.full((3, 4), NAN), torch.zeros(3, 4).bool()
    assert value(name, empty).item() == 0
    assert value(name, [x[:0] for x in empty]).item() == 0
    assert value(name, [x[:, :0] for x in empty]).item() == 0
    whole = value(name, sample()).item()
    assert value(name, empty, sample(), empty, [x[:, :0] for x in empty]).item() == whole


@pytest.mark.parametrize("name", RATIO_METRICS)
def test_without_an_observed_token(name):
    batch = torch.full((2, 3), NAN), torch.full((2, 3), -1.0), torch.ones(2, 3).bool()
    assert value(name, batch).item() == (1.0 if name == "nonfinite_fraction" else 0.0)


@pytest.mark.parametrize("name", RATIO_METRICS)
def test_autocast_changes_nothing(name):
    """Mixed precision must not round the moments to bfloat16."""
    expected = value(name, sample()).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert value(name, sample()).item() == expected


def test_inputs_stay_as_they_are():
    batch = with_nonfinite()
    copies = [x.clone() for x in batch]
    for name in RATIO_METRICS:
        value(name, batch)
    for now, before in zip(batch, copies, strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-50, 0, width=32), st.floats(-50, 0, width=32)), min_size=1, max_size=20))
def test_bounds(pairs):
    """Finite for any log-probs; divergences of finite samples as large as they must be."""
    old, sampling = torch.tensor(pairs).T.unsqueeze(1)
    batch = (old, sampling, torch.ones_like(old).bool())
    got = {name: value(name, batch).item() for name in RATIO_METRICS}
    assert all(map(math.isfinite, got.values()))
    scale = 1e-6 * (1 + got["tv"]) * 20
    assert got["kl_k3"] >= -scale and got["kl_reverse_k3"] >= -scale and got["tv"] >= 0
    held = (old - sampling).clamp(-20, 20).mean().item()
    assert got["kl_k3"] - got["kl_k1"] >= math.expm1(held) - scale  # Jensen: E rho >= exp(E l)
    assert -1 <= got["prob_pearson"] <= 1
    assert 0 <= got["prob_diff_mean"] <= got["prob_diff_max"] * (1 + 1e-6) <= 1 + 2e-6
    assert got["log_ppl_diff_min"] == got["log_ppl_diff"] == got["log_ppl_diff_max"]  # one response
    assert got["logp_diff_mean"] <= got["logp_diff_max"] * (1 + 1e-6) <= 50 * (1 + 2e-6)


ONES = torch.ones(2, 3)
BAD = [
    ("numerator_logps", torch.zeros(3), ValueError, "must have shape (B, T), but got (3,)."),
    ("denominator_logps", torch.zeros(2, 4), ValueError, "must have shape (2, 3), but got (2, 4)."),
    ("completion_mask", ONES[:, :1].bool(), ValueError, "must have shape (2, 3), but got (2, 1)."),
    ("completion_mask", ONES[0].bool(), ValueError, "must have shape (2, 3), but got (3,)."),
    ("numerator_logps", ONES.long(), TypeError, "must be a floating point tensor, but got torch.int64."),
    ("denominator_logps", [[0.0]], TypeError, "must be a tensor, but got list."),
    ("completion_mask", None, TypeError, "must be a tensor, but got NoneType."),
    ("completion_mask", ONES.cfloat(), TypeError, "must be a bool or 0/1 tensor, but got torch.complex64."),
    ("completion_mask", ONES * math.nan, ValueError, "must be a bool or 0/1 tensor, but got nan."),
    ("completion_mask", ONES.long() * 7, ValueError, "must be a bool or 0/1 tensor, but got 7."),
]


@pytest.mark.parametrize(("name", "bad", "error", "message"), BAD)
def test_bad_arguments(name, bad, error, message):
    metric = RATIO_METRICS["kl_k3"]()
    good = {"numerator_logps": ONES, "denominator_logps": ONES, "completion_mask": ONES.bool()}
    with pytest.raises(error, match=f"^{re.escape(f'{name} {message}')}$"):
        metric.update(**{**good, name: bad})
    assert metric.sums.abs().sum() == 0
