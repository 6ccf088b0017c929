"""Which level x statistic x ratio x scope has a meaning; everything else is refused."""

import pytest

from trl_offpolicy import (
    BandWeight,
    DivergenceBand,
    ESSWeight,
    GroupRejection,
    OffPolicySequenceMask,
    OutlierVeto,
    PrefixBudget,
    PrefixMinWeight,
    PrefixWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    StalenessBound,
    SuffixVeto,
    TruncateWeight,
)
from trl_offpolicy.types import RATIOS

ROW_AND_TOKEN = ("token", "turn", "turn_mean", "prefix", "sequence", "sequence_mean")
ALL_LEVELS = (*ROW_AND_TOKEN, "sequence_max", "sequence_min", "group")
WEIGHTS = {  # with a level of their own
    "truncate": lambda **o: TruncateWeight(max_weight=2.0, **o),
    "band": lambda **o: BandWeight(low=0.5, high=2.0, **o),
    "raw": RawWeight,
    "shaped": lambda **o: ShapedWeight(gamma=0.5, **o),
    "ess": lambda **o: ESSWeight(**{"scope": "micro_batch", **o}),
}
PREFIX_WEIGHTS = {"prefix_min": PrefixMinWeight, "prefix": PrefixWeight}
BANDS_WITH_LEVEL = {
    "ratio_band": lambda **o: RatioBand(low=0.5, high=2.0, **o),
    "divergence": lambda **o: DivergenceBand(statistic="k3", high=1.0, **o),
}
OTHERS = {
    "veto": lambda **o: OutlierVeto(low=0.5, high=2.0, **o),
    "opsm": lambda **o: OffPolicySequenceMask(max_divergence=0.1, **o),
    "probability": ProbabilityDifferenceMask,
    "prefix_budget": PrefixBudget,
    "suffix_veto": SuffixVeto,
    "budget": lambda **o: SecondMomentBudget(**{"scope": "micro_batch", **o}),
}

ADDED_UP = {"token", "turn", "turn_mean", "sequence", "sequence_mean", "group"}
MEANINGFUL = {  # written down once more, from what the statistics are
    "k1": ADDED_UP,  # its extremes are those of the ratio
    "k2": ADDED_UP | {"sequence_max"},
    "k3": ADDED_UP | {"sequence_max"},
    "abs": ADDED_UP | {"sequence_max"},
    "prob_diff": {"token", "turn_mean", "sequence_mean", "group"},  # signed probabilities have a mean, not a sum
    "binary_tv": ADDED_UP | {"sequence_max"},
    "binary_kl": ADDED_UP | {"sequence_max"},
    "binary_kl_both": ADDED_UP | {"sequence_max"},
}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("statistic", MEANINGFUL)
def test_divergence_pairs(statistic, level, ratio):
    def make():
        return DivergenceBand(statistic=statistic, level=level, ratio=ratio, high=0.5)

    if level not in MEANINGFUL[statistic]:
        with pytest.raises(
            ValueError, match=rf"^level must be one of \[.*\] here \(.*{statistic}.*\), but got '{level}'"
        ):
            make()
    elif level == "group" and ratio != "old/sampling":
        with pytest.raises(ValueError, match=rf"^ratio must be 'old/sampling' at level 'group' .* but got '{ratio}'"):
            make()
    else:
        assert make().name == f"divergence_{statistic}_{level}"


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("level", ALL_LEVELS)
def test_ratio_band_pairs(level, ratio):
    if level == "group" and ratio != "old/sampling":
        with pytest.raises(ValueError, match=r"^ratio must be 'old/sampling' at level 'group'"):
            RatioBand(low=0.5, high=2.0, level=level, ratio=ratio)
    else:
        assert RatioBand(low=0.5, high=2.0, level=level, ratio=ratio).name == f"ratio_band_{level}"


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_pairs(name, level, ratio):
    if level in ROW_AND_TOKEN:
        weight = WEIGHTS[name](level=level, ratio=ratio)
        assert (weight.level, weight.ratio) == (level, ratio)
    else:
        with pytest.raises(ValueError, match=rf"^level must be one of \[.*\] here \(a maximum.*\), but got '{level}'"):
            WEIGHTS[name](level=level, ratio=ratio)


@pytest.mark.parametrize("name", PREFIX_WEIGHTS)
def test_prefix_weights_have_no_level(name):
    with pytest.raises(TypeError, match="'level'"):
        PREFIX_WEIGHTS[name](level="token")


@pytest.mark.parametrize("cls", [ESSWeight, SecondMomentBudget])
def test_wide_scopes_know_no_current_policy(cls):
    for ratio in ("current/old", "current/sampling"):
        with pytest.raises(ValueError, match=rf"^scope must be 'micro_batch' for ratio '{ratio}'.*'generation_batch'"):
            cls(ratio=ratio)
        assert cls(ratio=ratio, scope="micro_batch").scope == "micro_batch"
    for scope in ("row", "group", "batch", None):
        with pytest.raises(ValueError, match=r"^scope must be one of \['generation_batch', 'micro_batch'\], but got"):
            cls(scope=scope)


@pytest.mark.parametrize("name", [*WEIGHTS, *PREFIX_WEIGHTS, *BANDS_WITH_LEVEL, *OTHERS])
def test_unknown_level_and_ratio_are_refused(name):
    make = {**WEIGHTS, **PREFIX_WEIGHTS, **BANDS_WITH_LEVEL, **OTHERS}[name]
    for ratio in ("sampling/old", "proximal/old", None):
        with pytest.raises(ValueError, match=r"^ratio must be one of \['old/sampling', .*\], but got"):
            make(ratio=ratio)
    if name in WEIGHTS or name in BANDS_WITH_LEVEL:
        with pytest.raises(
            ValueError, match=r"^level must be one of \['token', 'turn', .*'group'\], but got 'geometric'"
        ):
            make(level="geometric")


@pytest.mark.parametrize("cls", [StalenessBound, GroupRejection])
def test_terms_that_read_no_ratio_have_none(cls):
    with pytest.raises(TypeError, match="'ratio'"):
        cls(ratio="old/sampling")
