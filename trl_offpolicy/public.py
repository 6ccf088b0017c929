"""The names of ``import trl_offpolicy as op``, except ``attach``. The package imports this module when one is used."""

from trl_offpolicy import presets
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import (
    BandWeight,
    DivergenceBand,
    EqualRewards,
    ESSWeight,
    GroupRejection,
    KeepTerm,
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
    TermInputs,
    TruncateWeight,
    Violations,
    Weighed,
    Weight,
)
from trl_offpolicy.objective import advantages, losses, proximal, shaping
from trl_offpolicy.objective.kl import AdaptiveKL, FixedKL, KLController, KLPenalty
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.stats import Stat, Stats
from trl_offpolicy.types import CorrectionOutput, ObjectiveOutput, PolicyBatch, Reduction

__all__ = [
    "AdaptiveKL",
    "BandWeight",
    "Correction",
    "CorrectionOutput",
    "DivergenceBand",
    "ESSWeight",
    "EqualRewards",
    "FixedKL",
    "GroupRejection",
    "KLController",
    "KLPenalty",
    "KeepTerm",
    "Objective",
    "ObjectiveOutput",
    "OffPolicySequenceMask",
    "OutlierVeto",
    "PolicyBatch",
    "PrefixBudget",
    "PrefixMinWeight",
    "PrefixWeight",
    "Preset",
    "ProbabilityDifferenceMask",
    "RatioBand",
    "RawWeight",
    "Reduction",
    "SecondMomentBudget",
    "ShapedWeight",
    "StalenessBound",
    "Stat",
    "Stats",
    "SuffixVeto",
    "TermInputs",
    "TruncateWeight",
    "Violations",
    "Weighed",
    "Weight",
    "advantages",
    "losses",
    "presets",
    "proximal",
    "shaping",
]
