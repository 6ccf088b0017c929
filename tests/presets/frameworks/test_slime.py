"""slime's masked importance sampling, response by response, against ``from_slime``."""

import warnings

import pytest
from batches import policy_batch
from plain_parity import GEO, PRODUCT, assert_both, assert_parity, ppo, ratio, rows_of

from trl_offpolicy import presets

LEVELS = ("token", "sequence", "geometric")
BOUNDS = {"token": (0.7, 1.4), "sequence": (0.5, 2.0), "geometric": (0.9, 1.15)}


def at_level(log_ratios, level):
    if level == "token":
        return [ratio([value], PRODUCT) for value in log_ratios]
    return [ratio(log_ratios, PRODUCT if level == "sequence" else GEO)] * len(log_ratios)


def correct(log_ratios, options):
    """Weights and keep mask of one response."""
    upper = options["tis_upper_bound"]
    lower = options.get("tis_lower_bound") or 1 / upper
    raw = at_level(log_ratios, options["tis_level"])
    mask = [True] * len(raw)
    if options["tis_mode"] == "truncate":
        weights = [min(max(w, 0.0), upper) for w in raw]
    elif options["tis_mode"] == "clip":
        weights = [min(max(w, lower), upper) for w in raw]
    else:
        weights, mask = raw, [lower <= w <= upper for w in raw]
    if options.get("use_rs"):
        low = options.get("rs_lower_bound") or lower
        high = options.get("rs_upper_bound") or upper
        on = at_level(log_ratios, options.get("rs_level", "token"))
        mask = [keep and low <= w <= high for keep, w in zip(mask, on, strict=True)]
        veto = options.get("rs_veto_threshold")
        if veto is not None and any(w < veto for w in at_level(log_ratios, "token")):
            mask = [False] * len(mask)
    return weights, mask


def run(batch, options):
    """Weights, keep masks and loss: mean over responses of kept tokens over the original count."""
    rows = rows_of(batch)
    corrected = [correct(row.mismatch, options) for row in rows]
    weights, keep = ([part[i] for part in corrected] for i in (0, 1))
    if options.get("tis_batch_normalize"):
        by_token = options["tis_level"] == "token"
        units = [w for ws in weights for w in ws] if by_token else [ws[0] for ws in weights if ws]
        mean = sum(units) / len(units)
        weights = [[w / mean for w in ws] for ws in weights]
    total = 0.0
    for row, ws, ks in zip(rows, weights, keep, strict=True):
        losses = [ppo(now - old, row.advantage) for now, old in zip(row.current, row.old, strict=True)]
        summed = sum(k * w * value for k, w, value in zip(ks, ws, losses, strict=True))
        total += summed / max(len(row.at), 1)
    return weights, keep, total / len(rows)


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_slime(**options)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_mode_at_every_level(level, mode, seed, random_batch):
    batch = random_batch(seed)
    low, high = BOUNDS[level]
    options = {"tis_level": level, "tis_mode": mode, "tis_upper_bound": high}
    if mode != "truncate":
        options["tis_lower_bound"] = low
    weights, keep, loss = run(batch, options)

    if mode == "mask":
        assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("rs_level", LEVELS)
@pytest.mark.parametrize("tis_level", LEVELS)
def test_rejection_measures_the_original_mask(tis_level, rs_level, mode, random_batch):
    batch = random_batch(1)
    options = {"tis_level": tis_level, "tis_mode": mode, "tis_upper_bound": 1.5, "use_rs": True, "rs_level": rs_level}
    options |= {"rs_lower_bound": BOUNDS[rs_level][0], "rs_upper_bound": BOUNDS[rs_level][1]}
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


def test_two_bands_on_one_level_are_their_overlap(random_batch):
    batch = random_batch(2)
    options = {"tis_level": "token", "tis_mode": "mask", "tis_lower_bound": 0.8, "tis_upper_bound": 1.5}
    options |= {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.6, "rs_upper_bound": 1.2}
    preset = quiet(**options)
    (band,) = preset.correction.keep

    assert (band.low, band.high) == (0.8, 1.2)
    assert_parity(preset, batch, *run(batch, options))


@pytest.mark.parametrize("veto", [0.05, 0.2])
def test_bounds_of_rejection_default_to_those_of_tis_and_the_veto(veto, random_batch):
    batch = random_batch(0)
    options = {"tis_level": "token", "tis_mode": "clip", "tis_upper_bound": 1.4, "tis_lower_bound": 0.6}
    options |= {"use_rs": True, "rs_level": "token", "rs_veto_threshold": veto}
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalisation(level, random_batch):
    batch = random_batch(0)
    kept_rows = [index for index, row in enumerate(rows_of(batch)) if row.at]  # slime counts empty rows as weight 0
    batch = type(batch)(
        **{k: v if v is None or k == "current_version" else v[kept_rows] for k, v in vars(batch).items()}
    )
    options = {"tis_level": level, "tis_mode": "truncate", "tis_upper_bound": 1.5, "tis_batch_normalize": True}

    preset = quiet(**options)

    assert_parity(preset, batch, *run(batch, options))
    assert preset.objective.scope == "micro_batch"


def test_mis_yaml(random_batch):
    preset = presets.get("slime/mis")
    options = {"tis_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0}
    options |= {"use_rs": True, "rs_level": "token", "rs_veto_threshold": 1e-4, "tis_batch_normalize": True}
    batch = random_batch(0)

    assert_parity(preset, batch, *run(batch, options))
    assert preset.correction == quiet(use_tis=True, **options).correction


def test_the_veto_is_strict_and_bounds_are_inclusive():
    batch = policy_batch([[1.0], [0.51], [0.49]])
    keep = (
        quiet(use_rs=True, rs_lower_bound=0.01, rs_upper_bound=9.0, rs_veto_threshold=0.5).correction(batch).keep_mask
    )

    assert keep.squeeze(1).tolist() == [True, True, False]


def test_the_lower_bound_is_the_reciprocal_by_default():
    weight = quiet(tis_mode="clip", tis_upper_bound=4.0).correction.weight

    assert (weight.min_weight, weight.max_weight) == (0.25, 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_tis": False, "use_rs": True}, r"^use_rs=True has no effect without use_tis, in slime as here"),
        ({"use_tis": False, "tis_upper_bound": 3.0}, r"^tis_upper_bound=3.0 has no effect without use_tis"),
        ({"rs_veto_threshold": 1e-4}, r"^rs_veto_threshold=0.0001 has no effect without use_rs"),
    ],
)
def test_what_slime_ignores_silently_is_said(options, message):
    with pytest.warns(UserWarning, match=message):
        preset = presets.from_slime(**options)

    assert preset.correction.keep == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_level": "geo"}, r"^tis_level must be one of .*Did you mean 'geometric'"),
        ({"rs_level": "turn"}, r"^rs_level must be one of \['token', 'sequence', 'geometric'\], but got 'turn'"),
        ({"tis_mode": "cut"}, r"^tis_mode must be one of \['truncate', 'clip', 'mask'\]"),
        ({"use_tis": 1}, r"^use_tis must be True or False, but got 1"),
        ({"tis_upper_bound": None}, r"^tis_upper_bound must be a number, but got None"),
        ({"tis_upper_bound": 0}, r"^tis_upper_bound must be positive"),
        ({"tis_mode": "clip", "tis_lower_bound": 3.0}, r"^min_weight must be at most max_weight"),
        ({"tis_level": "geometric", "tis_batch_normalize": True}, r"^tis_batch_normalize must be False at tis_level"),
        ({"veto_threshold": 1e-4}, r"^veto_threshold is not an option of slime's .*'rs_veto_threshold'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        presets.from_slime(**options)
