"""Weights and keep terms: what can be asked of a ratio, as small frozen dataclasses.

A weight maps a ratio to a factor of the policy loss; a keep term says which tokens leave it. Both only hold their
settings and check them; :class:`~trl_offpolicy.Correction` runs them on a batch.
"""

from trl_offpolicy.correction.terms.base import KeepTerm, TermInputs, Violations, Weighed, Weight
from trl_offpolicy.correction.terms.batchwide import GroupRejection, SecondMomentBudget
from trl_offpolicy.correction.terms.keep import (
    DivergenceBand,
    OffPolicySequenceMask,
    OutlierVeto,
    ProbabilityDifferenceMask,
    RatioBand,
    StalenessBound,
)
from trl_offpolicy.correction.terms.weights import (
    BandWeight,
    ESSWeight,
    PrefixMinWeight,
    PrefixWeight,
    RawWeight,
    ShapedWeight,
    TruncateWeight,
)

__all__ = [
    "BandWeight",
    "DivergenceBand",
    "ESSWeight",
    "GroupRejection",
    "KeepTerm",
    "OffPolicySequenceMask",
    "OutlierVeto",
    "PrefixMinWeight",
    "PrefixWeight",
    "ProbabilityDifferenceMask",
    "RatioBand",
    "RawWeight",
    "SecondMomentBudget",
    "ShapedWeight",
    "StalenessBound",
    "TermInputs",
    "TruncateWeight",
    "Violations",
    "Weighed",
    "Weight",
]
