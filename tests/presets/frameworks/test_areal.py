"""AReaL's rejection sampling in plain floats, against ``from_areal``."""

import itertools
import math
import warnings

import pytest
from batches import policy_batch
from plain_parity import assert_both, assert_parity, ppo, rows_of

from trl_offpolicy import presets

KINDS = ("kl_k1", "kl_k2", "kl_k3")
BOUNDS = {  # statistic -> level or aggregate -> (lower, upper)
    "ratio": {"token": (0.7, 1.4), "mean": (0.9, 1.15), "sum": (0.5, 2.0), "max": (1.01, 1.8)},
    "kl_k1": {"token": (-0.4, 0.3), "mean": (-0.1, 0.2), "sum": (-0.6, 0.7), "max": (0.01, 0.6)},
    "kl_k2": {"token": (None, 0.08), "mean": (None, 0.06), "sum": (0.01, 0.3), "max": (None, 0.3)},
    "kl_k3": {"token": (None, 0.08), "mean": (None, 0.06), "sum": (0.01, 0.3), "max": (None, 0.3)},
    "binary_kl": {"token": (None, 0.002), "mean": (None, 0.002), "sum": (0.01, 0.1), "max": (None, 0.005)},
}


def bernoulli(a, b):
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


def statistic(metric, log_ratio, log_q):
    """Signs as in AReaL: k1 = +log r, and k3 of the inverse ratio."""
    p, q = math.exp(log_q + log_ratio), math.exp(log_q)
    return {
        "binary_kl": max(bernoulli(p, q), bernoulli(q, p)),
        "ratio": log_ratio,
        "kl_k1": log_ratio,
        "kl_k2": log_ratio**2 / 2,
        "kl_k3": math.exp(-log_ratio) - 1 + log_ratio,
    }[metric]


def gather(values, agg):
    if not values:
        return 0.0
    return {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[agg]


def correct(log_ratios, sampling, options):
    """Weights and keep mask of one response."""
    metric, by_row = options["metric"], options["level"] == "sequence"
    upper, lower = options["upper"], options.get("lower")
    values = [statistic(metric, value, log_q) for value, log_q in zip(log_ratios, sampling, strict=True)]
    decided = [gather(values, options["agg"])] * len(values) if by_row else values
    decided = [math.exp(value) if metric == "ratio" else value for value in decided]
    inside = [value <= upper and (lower is None or value >= lower) for value in decided]
    weights = [math.exp(value) for value in log_ratios]
    if by_row and metric == "ratio":
        weights = [math.exp(gather(log_ratios, "mean"))] * len(values)
    if options["action"] == "mask":
        return weights, inside
    clamped = [min(max(w, lower or 0.0), upper) for w in weights]
    if by_row:
        clamped = [w if ok else c for w, c, ok in zip(weights, clamped, inside, strict=True)]
    return clamped, [True] * len(values)


def run(batch, options):
    """Weights, keep masks and loss over the original token count."""
    rows = rows_of(batch)
    corrected = [correct(row.mismatch, row.sampling, options) for row in rows]
    weights, keep = ([part[i] for part in corrected] for i in (0, 1))
    total = sum(
        k * w * ppo(now - old, row.advantage)
        for row, ws, ks in zip(rows, weights, keep, strict=True)
        for now, old, w, k in zip(row.current, row.old, ws, ks, strict=True)
    )
    return weights, keep, total / sum(len(row.at) for row in rows)


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_areal(**options)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("metric", "agg"), itertools.product(BOUNDS, ("token", "mean", "sum", "max")))
def test_mask(metric, agg, seed, random_batch):
    batch = random_batch(seed)
    lower, upper = BOUNDS[metric][agg]
    options = {"level": "token" if agg == "token" else "sequence", "action": "mask", "metric": metric}
    options |= {"agg": "mean" if agg == "token" else agg, "upper": upper, "lower": lower}
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("agg", "lower"), [("token", None), ("token", 0.7), ("mean", 0.9), ("sum", 0.5), ("sum", None), ("max", None)]
)
def test_clamp(agg, lower, seed, random_batch):
    batch = random_batch(seed)
    options = {"level": "token" if agg == "token" else "sequence", "action": "clamp", "metric": "ratio"}
    options |= {"agg": "mean" if agg == "token" else agg, "upper": 1.05, "lower": lower}

    assert_parity(quiet(**options), batch, *run(batch, options))


def test_k3_is_that_of_the_inverse_ratio():
    batch = policy_batch([[0.5], [2.0]])  # exp(-l) - 1 + l: 0.307 and 0.193; k3 itself has them the other way round

    keep = quiet(metric="kl_k3", upper=0.25).correction(batch).keep_mask

    assert keep.squeeze(1).tolist() == [False, True]


def test_binary_kl_of_a_token_and_of_a_response():
    """KPop's p = e^-4: (1.5, 2) has 0.0013 and 0.0036 nats, by AReaL's formula with the larger direction."""
    batch = policy_batch([[1.5, 2.0], [1.0, 1.0]])

    token = quiet(metric="binary_kl", upper=0.003).correction(batch)
    row = quiet(metric="binary_kl", upper=0.003, level="sequence", agg="sum").correction(batch)

    assert token.keep_mask.tolist() == [[True, False], [True, True]]
    assert row.keep_mask.tolist() == [[False, False], [True, True]]
    assert token.weights[0].tolist() == pytest.approx([1.5, 2.0])


def test_the_product_decides_and_the_geometric_mean_weighs():
    out = quiet(level="sequence", agg="sum", upper=5.0).correction(policy_batch([[2.0, 2.0], [2.0, 3.0]]))

    assert out.keep_mask.tolist() == [[True, True], [False, False]]
    assert out.weights[0].tolist() == pytest.approx([2.0, 2.0])


def test_the_named_preset_is_the_former_default(random_batch):
    batch = random_batch(0, spread=1.5)
    options = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0}
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(presets.get("areal/decoupled"), batch, weights, keep, loss)


def test_what_does_nothing_in_areal_is_said():
    with pytest.warns(UserWarning, match=r"^use_decoupled_loss without rejection_sampling applies no behaviour weight"):
        plain = presets.from_areal(use_decoupled_loss=True)
    with pytest.warns(UserWarning, match=r"^upper have no effect with use_decoupled_loss=False"):
        ignored = presets.from_areal(upper=2.0, use_decoupled_loss=False)
    with pytest.warns(UserWarning, match=r"^agg='sum' has no effect at level 'token'"):
        presets.from_areal(agg="sum")
    with pytest.warns(UserWarning, match=r"^lower=0.0 has no effect on kl_k2, which is never negative"):
        presets.from_areal(metric="kl_k2", lower=0.0)

    assert plain.correction.weights == plain.correction.keep == ignored.correction.keep == ()
    assert (plain.objective.mode, ignored.objective.mode) == ("decoupled", "bypass")
    assert presets.from_areal(use_decoupled_loss=False).objective.mode == "bypass"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": "turn"}, ValueError, r"^level must be one of \['token', 'sequence'\], but got 'turn'"),
        ({"action": "clip"}, ValueError, r"^action must be one of \['mask', 'clamp'\], but got 'clip'"),
        ({"metric": "k3"}, ValueError, r"^metric must be one of .*Did you mean 'kl_k3'"),
        ({"agg": "min"}, ValueError, r"^agg must be one of"),
        ({"upper": 1.0}, ValueError, r"^upper must be above 1 for metric 'ratio', but got 1.0"),
        ({"upper": "five"}, ValueError, r"^upper must be a number, but got"),
        ({"lower": 6.0}, ValueError, r"^lower must be at most upper=5.0, but got 6.0"),
        ({"metric": "kl_k3", "upper": -0.05}, ValueError, r"^upper must be positive for metric 'kl_k3', but got -0.05"),
        ({"metric": "kl_k3", "upper": 2e-3, "lower": 0.01}, ValueError, r"^lower must be at most upper"),
        ({"action": "clamp", "metric": "kl_k2"}, ValueError, r"^metric must be 'ratio' with action 'clamp'"),
        ({"use_decoupled_loss": 1}, ValueError, r"^use_decoupled_loss must be True or False"),
        (
            {"level": "sequence", "action": "clamp", "agg": "max", "lower": 0.5},
            NotImplementedError,
            r"^action 'clamp' with agg 'max' and lower=0.5 is not expressible here",
        ),
        (
            {"level": "sequence", "action": "clamp", "agg": "sum", "lower": 1.02},
            NotImplementedError,
            r"^action 'clamp' with agg 'sum' and lower=1.02 is not expressible here",
        ),
        ({"behave_imp_weight_cap": 5.0}, ValueError, r"^behave_imp_weight_cap is not an option of AReaL's"),
        ({"uper": 5.0}, ValueError, r"^uper is not an option of .*Did you mean 'upper'"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        presets.from_areal(**options)


def test_k3_of_a_token_beyond_20_nats():
    """exp(-l) - 1 + l grows with l without an end: (30 - 1) / 12 is above 2, and (20 - 1) / 12 would not be."""
    batch = policy_batch([[math.exp(30.0), *[1.0] * 11]])

    dropped, kept = (quiet(level="sequence", metric="kl_k3", upper=upper).correction(batch) for upper in (2.0, 3.0))

    assert not dropped.keep_mask.any() and kept.keep_mask.all()
