"""Know which policy really sampled each token, correct for it, show it, and say what to do about it.

``import trl_offpolicy as op`` needs torch only. The trainer is ``trl_offpolicy.trainer.OffPolicyGRPOTrainer``.
"""

from trl_offpolicy import advantages, losses, presets, proximal
from trl_offpolicy.corrections import Correction
from trl_offpolicy.kl import AdaptiveKL, FixedKL, KLPenalty
from trl_offpolicy.objectives import Objective
from trl_offpolicy.stats import Stat, Stats
from trl_offpolicy.terms import (
    BandWeight,
    DivergenceBand,
    ESSWeight,
    GroupRejection,
    OffPolicySequenceMask,
    OutlierVeto,
    PrefixMinWeight,
    PrefixWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    StalenessBound,
    TruncateWeight,
)
from trl_offpolicy.types import CorrectionOutput, ObjectiveOutput, PolicyBatch, Reduction

__version__ = "0.1.0"

__all__ = [
    "AdaptiveKL",
    "BandWeight",
    "Correction",
    "CorrectionOutput",
    "DivergenceBand",
    "ESSWeight",
    "FixedKL",
    "GroupRejection",
    "KLPenalty",
    "Objective",
    "ObjectiveOutput",
    "OffPolicySequenceMask",
    "OutlierVeto",
    "PolicyBatch",
    "PrefixMinWeight",
    "PrefixWeight",
    "ProbabilityDifferenceMask",
    "RatioBand",
    "RawWeight",
    "Reduction",
    "SecondMomentBudget",
    "ShapedWeight",
    "StalenessBound",
    "Stat",
    "Stats",
    "TruncateWeight",
    "advantages",
    "losses",
    "presets",
    "proximal",
]
