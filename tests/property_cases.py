"""The tables of ``test_properties.py`` and its random batches.

Every weight, keep term, loss and preset of the package is here by itself, made from its ``example``. A line in
``WEIGHTS``, ``KEEPS`` or ``LOSSES`` says that other settings of it are tested, one in ``FAMILIES`` that a keep term has
a bound to tighten.
"""

from dataclasses import fields, replace

import torch
from hypothesis import strategies as st

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    EqualRewards,
    ESSWeight,
    GroupRejection,
    KLPenalty,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
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
    losses,
    presets,
    shaping,
)
from trl_offpolicy.correction.terms.base import is_late
from trl_offpolicy.correction.terms.keep import STATISTIC_LEVELS
from trl_offpolicy.correction.terms.weights import WEIGHT_LEVELS
from trl_offpolicy.functional.kl import KL_ESTIMATORS
from trl_offpolicy.functional.levels import LEVELS
from trl_offpolicy.presets.frameworks.trl import AGGREGATION
from trl_offpolicy.presets.parsing import KEEP_TYPES, LOSS_TYPES, WEIGHT_TYPES
from trl_offpolicy.types import RATIOS

TIS = Correction(weight=TruncateWeight(max_weight=2.0))
LOOSE = {"low": 0.1, "high": 8.0}
PROBABILITIES = ("prob_diff", "binary_tv")  # bounded by 1

WEIGHTS = {
    **{f"truncate {level}": TruncateWeight(level=level, max_weight=2.0, min_weight=0.5) for level in WEIGHT_LEVELS},
    **{f"band {level}": BandWeight(level=level, **LOOSE) for level in WEIGHT_LEVELS},
    **{f"raw {ratio}": RawWeight(ratio=ratio) for ratio in RATIOS},
    **{f"ess {level}": ESSWeight(level=level, target=0.9) for level in ("token", "turn", "sequence")},
    "ess micro": ESSWeight(level="sequence_mean", target=0.9, scope="micro_batch", ratio="current/sampling"),
    "shaped": ShapedWeight(gamma=0.5),
    "shaped turn": ShapedWeight(gamma=2.0, level="turn", ratio="current/old"),
    "prefix min": PrefixMinWeight(),
    "prefix min, capped": PrefixMinWeight(max_weight=3.0, ratio="current/sampling"),
    "prefix": PrefixWeight(),
    "two": (TruncateWeight(max_weight=3.0), RawWeight(level="sequence", ratio="current/old")),
}
KEEPS = {  # a term, or several that belong together
    **{f"ratio_band {level}": RatioBand(level=level, **LOOSE) for level in LEVELS},
    **{
        f"divergence {name}": tuple(
            DivergenceBand(statistic=name, high=0.3 if name in PROBABILITIES else 0.5, level=level) for level in levels
        )
        for name, levels in STATISTIC_LEVELS.items()
    },
    "veto": OutlierVeto(low=0.1, high=10.0),
    "probability": ProbabilityDifferenceMask(),
    "budget": SecondMomentBudget(budget=0.3),
    "groups": (RatioBand(level="token", low=0.4, high=3.0), GroupRejection(max_dropped_fraction=0.3)),
    "opsm": OffPolicySequenceMask(max_divergence=0.1),
    "staleness": StalenessBound(max_lag=2),
    "equal rewards": EqualRewards(),
    "suffix veto": SuffixVeto(low=0.1),
    "prefix budget": PrefixBudget(high=0.3, budget=0.1),
    "prefix budget kl": PrefixBudget(
        statistic="binary_kl", high=0.5, budget=0.05, min_weight=0.5, adaptive=False, ratio="old/sampling"
    ),
    "divergence current": DivergenceBand(statistic="binary_kl", high=0.3, level="turn", ratio="current/sampling"),
    "budget micro": SecondMomentBudget(budget=0.3, scope="micro_batch", ratio="current/old"),
}


def with_the_rest(entries, types):
    """The table, and an example of every class of ``types`` that has no line in it."""
    parts = [part for entry in entries.values() for part in (entry if isinstance(entry, tuple) else (entry,))]
    rest = {name: cls for name, cls in types.items() if not any(isinstance(part, cls) for part in parts)}
    return {**entries, **{name: cls(**cls.example) for name, cls in rest.items()}}


WEIGHTS = with_the_rest(WEIGHTS, WEIGHT_TYPES)
KEEPS = with_the_rest(KEEPS, KEEP_TYPES)


def terms_of(entries):
    """A flat tuple; a group rejection counts early terms, so late ones come last."""
    terms = [term for entry in entries for term in (entry if isinstance(entry, tuple) else (entry,))]
    return tuple(sorted(terms, key=is_late))


CORRECTIONS = {
    **{name: Correction(weight=weight) for name, weight in WEIGHTS.items()},
    **{name: Correction(keep=terms_of([entry])) for name, entry in KEEPS.items()},
    **{f"{how} normalised": replace(TIS, keep=(KEEPS["veto"],), normalize=how) for how in ("original", "kept")},
    "by micro-batch normalised": Correction(
        weight=WEIGHTS["two"], keep=(KEEPS["opsm"],), normalize="kept", normalize_over="micro_batch"
    ),
    "all, remaining": Correction(
        weight=TruncateWeight(level="sequence", max_weight=3.0),
        keep=terms_of(KEEPS.values()),
        measure_on="remaining",
    ),
    "all, drop": Correction(
        weight=WEIGHTS["two"], keep=terms_of(KEEPS.values()), nonfinite="drop", correct_threshold=0.5
    ),
}


def objective_with(correction, **options):
    """PPO's ratio is current/old: a weight that holds it needs a loss without ratio."""
    mismatch_only = all(weight.ratio == "old/sampling" for weight in correction.weights)
    policy_loss = losses.PPOClip() if mismatch_only else losses.GPG()
    return Objective(policy_loss=policy_loss, correction=correction, **options)


LOSSES = {
    "dual clip": losses.PPOClip(dual_clip=3.0, delta=4.0),
    "gspo": losses.PPOClip(level="sequence_mean"),
    "gpg": losses.GPG(),
    "cispo, two-sided": losses.CISPO(low=0.8, high=1.2),
    "ppo is": losses.PPOIS(dual_clip=3.0),
    "aspo": losses.ASPO(),
    "dispo": losses.DISPO(
        correct_threshold=0.5, low_correct=0.9, high_correct=3.0, low_incorrect=0.2, high_incorrect=0.3
    ),
    "dro": losses.DRO(beta=0.1),
    "dppo tv": losses.DPPO(low=0.1, high=0.1),
    "dppo kl": losses.DPPO(divergence="kl", low=0.05, high=0.05, max_ratio=3.0),
    "m2po": losses.M2PO(),
    "p3o": losses.P3O(),
    "clip cov": losses.ClipCov(fraction=1.0, cov_low=0.1),  # fewer are drawn at random, which no order of rows keeps
    "kl cov": losses.KLCov(fraction=1.0),
    "r2vpo": losses.R2VPO(),
    "quatro": losses.QUATRO(),
    "quatro, rows at hand": losses.QUATRO(scope="micro_batch"),
    "gspo, paper": losses.GSPO(),
    "gspo token": losses.GSPOToken(),
    "luspo": losses.LUSPO(),
    "gmpo": losses.GMPO(),
    "tbpo": losses.TBPO(),
    "topr": losses.TOPR(),
    "espo": losses.ESPO(vocab_size=50),
    "st-ppo": losses.STPPO(),
    "turn-ppo": losses.STPPO(normalize=False),
    "fipo": losses.FIPO(half_life=2.0, dual_clip=3.0, safe_ratio=1.5),
    "qurl": losses.QuRL(max_weight=1.2),
    "ctpo": losses.CTPO(low=0.3, high=0.4, dual_clip=None),
    "oapl": losses.OAPL(beta=0.1),
    "oapl, rows at hand": losses.OAPL(beta=0.1, value_beta=1.0, scope="micro_batch"),
}
LOSSES = with_the_rest(LOSSES, LOSS_TYPES)


def objective_of(loss):
    """With its own aggregation; TIS where the loss does not hold pi / mu already."""
    correction = None if "sampling_log_ratios" in loss.reads else TIS
    return Objective(policy_loss=loss, correction=correction, aggregation=loss.aggregation)


CASES = {
    **{name: objective_with(correction) for name, correction in CORRECTIONS.items()},
    **{name: objective_of(loss) for name, loss in LOSSES.items()},
    "bypass": Objective(mode="bypass", correction=CORRECTIONS["opsm"]),
    "vespo, sequence weight": Objective(policy_loss=losses.VESPO(), correction=CORRECTIONS["truncate sequence"]),
    "kl": Objective(kl=KLPenalty(coef=0.1, ratio_weighted=True), kl_weighted=True, correction=TIS, entropy_coef=0.01),
    "drift": objective_with(CORRECTIONS["all, drop"], drift_coef=0.5),
    "discrepancy": objective_with(TIS, shaping=(shaping.DiscrepancyPenalty(coef=0.5),)),
    "discrepancy in nats": objective_with(
        CORRECTIONS["opsm"], shaping=(shaping.DiscrepancyPenalty(coef=0.5, target=None, statistic="abs"),)
    ),
    "zero variance": objective_with(TIS, shaping=(shaping.ZeroVariance(correct_threshold=0.5),)),
    "kl on kept": objective_with(
        CORRECTIONS["all, drop"],
        kl=KLPenalty(coef=0.1),
        kl_on="kept",
        denominator="kept",
        aggregation="seq_mean_token_mean",
    ),
    **{f"kl {name}": Objective(kl=KLPenalty(coef=0.1, estimator=name), correction=TIS) for name in KL_ESTIMATORS},
    **{
        f"kl {name}, ratio clipped": Objective(
            kl=KLPenalty(coef=0.1, estimator=name, ratio_weighted=True, ratio_clip=0.2), kl_on="kept", correction=TIS
        )
        for name in KL_ESTIMATORS
    },
    **{name: presets.get(name).objective for name in presets.names()},
    **{f"trl {name}": presets.from_trl(loss_type=name, beta=0.1, epsilon_high=5.0).objective for name in AGGREGATION},
}


def correction_of(case):
    return CASES[case].correction or Correction()


def on_policy_weight(correction):
    """1, but for shaped ratios, which are 1 / (1 + gamma) where the policies agree."""
    weight = 1.0
    for one in correction.weights:
        weight /= 1 + one.gamma if isinstance(one, ShapedWeight) else 1
    return weight if correction.normalize == "none" else 1.0


FAMILIES = {  # from tight to loose, by a bound in [0.01, 9]
    **{f"high {level}": lambda x, level=level: RatioBand(level=level, low=None, high=x) for level in LEVELS},
    **{f"low {level}": lambda x, level=level: RatioBand(level=level, low=1 / x, high=None) for level in LEVELS},
    **{
        f"{k} {level}": lambda x, k=k, level=level: DivergenceBand(
            statistic=k, level=level, high=x / 10 if k in PROBABILITIES else x
        )
        for k, levels in STATISTIC_LEVELS.items()
        for level in levels
    },
    "k1 low": lambda x: DivergenceBand(statistic="k1", low=-x, high=None),
    "prob_diff low": lambda x: DivergenceBand(statistic="prob_diff", low=-x / 10, high=None),
    "veto high": lambda x: OutlierVeto(low=None, high=x),
    "veto low": lambda x: OutlierVeto(low=1 / x, high=None),
    "opsm": lambda x: OffPolicySequenceMask(max_divergence=x),
    "probability high": lambda x: ProbabilityDifferenceMask(low=-0.99, high=x / 10),
    "probability low": lambda x: ProbabilityDifferenceMask(low=-x / 10, high=0.99),
    "budget": lambda x: SecondMomentBudget(budget=x),
    "prefix budget high": lambda x: PrefixBudget(high=x / 10),
    "prefix budget": lambda x: PrefixBudget(budget=x / 10, high=0.1, ratio="old/sampling"),
    "staleness": lambda x: StalenessBound(max_lag=int(x)),
    "equal rewards": lambda x: EqualRewards(tolerance=1 / x),
    "groups": lambda x: (KEEPS["veto"], GroupRejection(max_dropped_fraction=x / 10)),
}
FIRES_UPWARDS = ("high", "k2", "k3", "veto high", "k1 low", "prob_diff ", "probability high")

TOKEN_FIELDS = (
    "per_token_logps",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
    "proximal_per_token_logps",
    "entropies",
)
MILD = torch.arange(-48, 1) / 16  # exact in bfloat16
EXTREME = torch.tensor([-1e4, -700.0, -90.0, -20.5, -1.0, -1e-7, 0.0])


@st.composite
def batches(draw, logps=MILD, min_rows=1):
    """Up to 4 rows of up to 5 positions, with empty rows and holes; padding is finite."""
    rows, length = draw(st.integers(min_rows, 4)), draw(st.integers(1, 5))
    with_turn_ids, with_proximal, versions_by_token = (draw(st.booleans()) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def pick(values, *shape):
        return values[torch.randint(len(values), shape, generator=generator)]

    by_token = {name: pick(logps, rows, length) for name in TOKEN_FIELDS}
    if not with_proximal:
        by_token["proximal_per_token_logps"] = None
    return PolicyBatch(
        **by_token,
        completion_mask=pick(torch.tensor([False, True, True]), rows, length),
        advantages=pick(torch.tensor([-1.5, -0.5, 0.0, 0.25, 2.0]), rows),
        rewards=pick(torch.tensor([0.0, 0.5, 1.0]), rows),
        group_ids=pick(torch.tensor([-3, 0, 7]), rows),
        turn_ids=pick(torch.arange(3), rows, length) if with_turn_ids else None,
        policy_versions=pick(torch.arange(9), *((rows, length) if versions_by_token else (rows,))),
        current_version=9,
        group_rewards=pick(torch.tensor([0.0, 0.5, 1.0, float("nan")]), rows, 3),
    )


def map_fields(batch, names, function):
    values = {name: getattr(batch, name) for name in names}
    return replace(batch, **{name: function(value) for name, value in values.items() if value is not None})


def map_tensors(batch, function):
    """A batch of other rows: ``function`` of every tensor."""
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return PolicyBatch(
        **{name: function(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    )


def rows_of(batch, rows):
    return map_tensors(batch, lambda value: value[rows])
