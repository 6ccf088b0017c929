"""Policy losses as small frozen dataclasses, usable in :class:`~trl_offpolicy.Objective` and in YAML.

Each takes a :class:`LossInputs` and returns :class:`LossTerms`. :class:`PolicyLoss` explains what a loss declares.
"""

from trl_offpolicy.functional.policy_losses import LossTerms
from trl_offpolicy.objective.losses.base import LossInputs, PolicyLoss, RatioLevel, WeightUse
from trl_offpolicy.objective.losses.responses import CTPO, ESPO, FIPO, OAPL, STPPO, TOPR
from trl_offpolicy.objective.losses.sequences import GMPO, GSPO, LUSPO, TBPO, VESPO, GSPOToken
from trl_offpolicy.objective.losses.tokens import ASPO, CISPO, DISPO, DRO, GPG, PPOIS, SAPO, PPOClip, QuRL
from trl_offpolicy.objective.losses.trust_regions import DPPO, M2PO, P3O, QUATRO, R2VPO, ClipCov, KLCov

__all__ = [
    "ASPO",
    "CISPO",
    "CTPO",
    "DISPO",
    "DPPO",
    "DRO",
    "ESPO",
    "FIPO",
    "GMPO",
    "GPG",
    "GSPO",
    "LUSPO",
    "M2PO",
    "OAPL",
    "P3O",
    "PPOIS",
    "QUATRO",
    "R2VPO",
    "SAPO",
    "STPPO",
    "TBPO",
    "TOPR",
    "VESPO",
    "ClipCov",
    "GSPOToken",
    "KLCov",
    "LossInputs",
    "LossTerms",
    "PPOClip",
    "PolicyLoss",
    "QuRL",
    "RatioLevel",
    "WeightUse",
]
