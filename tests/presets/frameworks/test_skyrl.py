"""SkyRL's off-policy correction, step by step as its documentation orders it, against ``from_skyrl``."""

import itertools
import warnings

import pytest
from batches import policy_batch
from plain_parity import GEO, PRODUCT, assert_both, assert_parity, ppo, ratio, rows_of

from trl_offpolicy import presets

DEFAULTS = {
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "geo_mask_low": 0.99,
    "geo_mask_high": 1.01,
    "product_mask_low": 0.5,
    "product_mask_high": 2.0,
}
TOKEN_MASK = {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4}
GEOMETRIC = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.15}
OUTLIER = {"outlier_token_is_threshold_low": 0.2, "outlier_token_is_threshold_high": 8.0}


def correct(log_ratios, options):
    """Weights and keep mask of one response."""
    inside = [True] * len(log_ratios)
    rhos = [ratio([value], PRODUCT) for value in log_ratios]
    low = options.get("outlier_token_is_threshold_low") or 0.0
    high = options.get("outlier_token_is_threshold_high") or float("inf")
    if any(not low <= rho <= high for rho in rhos):
        inside = [False] * len(rhos)
    low, high = options.get("token_mask_is_threshold_low"), options.get("token_mask_is_threshold_high")
    if low is not None and high is not None:
        inside = [keep and low <= rho <= high for keep, rho in zip(inside, rhos, strict=True)]
    remaining = [value for value, keep in zip(log_ratios, inside, strict=True) if keep]
    weights = [1.0] * len(rhos)
    if options.get("tis_ratio_type") == "token":
        weights = [min(rho, options["token_tis_ratio_clip_high"]) for rho in rhos]
    elif options.get("tis_ratio_type") == "sequence":
        weights = [min(ratio(remaining, PRODUCT), options["sequence_tis_ratio_clip_high"])] * len(rhos)
    metric = options.get("sequence_mask_metric")
    if metric is not None:
        how, prefix = (GEO, "geo") if metric == "geometric" else (PRODUCT, "product")
        if not options[f"{prefix}_mask_low"] <= ratio(remaining, how) <= options[f"{prefix}_mask_high"]:
            inside = [False] * len(rhos)
    return weights, inside


def run(batch, options):
    """Weights, keep masks and loss: advantages divided by the original token count, then a sum."""
    rows, options = rows_of(batch), {**DEFAULTS, **options}
    corrected = [correct(row.mismatch, options) for row in rows]
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
        return presets.from_skyrl(**options)


PARTS = {
    "token tis": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
    "sequence tis": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.6},
    "geometric": GEOMETRIC,
    "product": {"sequence_mask_metric": "product"},
    "outlier": OUTLIER,
    "outlier above": {"outlier_token_is_threshold_high": 3.0},
    "token mask": TOKEN_MASK,
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_every_part_alone(part, seed, random_batch):
    batch = random_batch(seed)
    weights, keep, loss = run(batch, PARTS[part])

    if "tis" not in part:
        assert_both(keep)
    assert_parity(quiet(**PARTS[part]), batch, weights, keep, loss)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("tis", "mask"), itertools.product(("token tis", "sequence tis"), ("geometric", "product")))
def test_all_together_in_skyrls_order(tis, mask, seed, random_batch):
    batch = random_batch(seed)
    options = {**PARTS[tis], **PARTS[mask], **OUTLIER, **TOKEN_MASK}
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


def test_the_sequence_weight_counts_what_the_token_mask_left():
    preset = quiet(tis_ratio_type="sequence", token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2.0)
    out = preset.correction(policy_batch([[1.5, 8.0]]))

    assert out.weights[0, 0].item() == pytest.approx(1.5)  # not 12, nor the cap of 5
    assert out.keep_mask.tolist() == [[True, False]]


def test_defaults():
    assert quiet().correction.weights == quiet().correction.keep == ()
    assert quiet(tis_ratio_type="token").correction.weight.max_weight == 2.0
    assert quiet(tis_ratio_type="sequence").correction.weight.max_weight == 5.0
    geometric, product = (quiet(sequence_mask_metric=m).correction.keep[0] for m in ("geometric", "product"))
    assert (geometric.low, geometric.high, product.low, product.high) == (0.99, 1.01, 0.5, 2.0)


def test_a_whole_configuration_can_be_pasted():
    none = ("tis_ratio_type", "sequence_mask_metric", *OUTLIER, *TOKEN_MASK)

    assert quiet(**DEFAULTS, **dict.fromkeys(none)).objective == quiet().objective


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_mask_is_threshold_low": 0.5}, r"^token_mask_is_threshold_low has no effect alone, in SkyRL as here"),
        ({"token_mask_is_threshold_high": 2.0}, r"^token_mask_is_threshold_high has no effect alone"),
        ({"geo_mask_high": 1.05}, r"^geo_mask_high=1.05 has no effect with sequence_mask_metric=None"),
        (
            {"sequence_mask_metric": "geometric", "product_mask_low": 0.1},
            r"^product_mask_low=0.1 has no effect with sequence_mask_metric='geometric'",
        ),
        (
            {"tis_ratio_type": "token", "sequence_tis_ratio_clip_high": 3.0},
            r"^sequence_tis_ratio_clip_high=3.0 has no effect with tis_ratio_type='token'",
        ),
    ],
)
def test_what_skyrl_ignores_silently_is_said(options, message):
    with pytest.warns(UserWarning, match=message) as caught:
        preset = presets.from_skyrl(**options)

    assert caught[0].filename == __file__
    assert not any(term.name == "ratio_band_token" for term in preset.correction.keep)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_ratio_type": "geometric"}, r"^tis_ratio_type must be one of \['token', 'sequence'\]"),
        ({"sequence_mask_metric": "geo"}, r"^sequence_mask_metric must be one of .*Did you mean 'geometric'"),
        ({"token_mask_eps_low": 0.5}, r"^token_mask_eps_low is not an option of SkyRL's off_policy_correction"),
        ({"tis_type": "token"}, r"^tis_type is not an option of .*'tis_ratio_type'"),
        ({"tis_ratio_type": "token", "token_tis_ratio_clip_high": "2"}, r"^token_tis_ratio_clip_high must be a number"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        presets.from_skyrl(**options)


def test_missing_sampling_log_probs_are_an_error(random_batch):
    batch = random_batch(0)
    batch = type(batch)(**{**vars(batch), "sampling_per_token_logps": None})

    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given"):
        quiet(tis_ratio_type="token").objective(batch)
