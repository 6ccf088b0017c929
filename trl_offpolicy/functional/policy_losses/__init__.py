"""Policy losses as pure functions of tensors, by what they treat as one action."""

from trl_offpolicy.functional.policy_losses.common import LossTerms, masked_mean, unit_ratio
from trl_offpolicy.functional.policy_losses.covariance import (
    CovPenalty,
    clip_cov,
    first_ranked,
    kl_cov,
    token_covariance,
)
from trl_offpolicy.functional.policy_losses.responses import (
    ctpo,
    entropy_groups,
    espo,
    future_influence,
    oapl,
    soft_value,
    st_ppo,
    topr,
)
from trl_offpolicy.functional.policy_losses.sequences import VESPO_LOG_FLOOR, gmpo, gspo_token, tbpo, vespo_phi
from trl_offpolicy.functional.policy_losses.tokens import aspo, cispo, dispo, dro, ppo_clip, qurl, sapo
from trl_offpolicy.functional.policy_losses.trust_regions import (
    BinaryDivergence,
    dppo,
    group_ratio_variance,
    m2po,
    p3o,
    quatro,
    r2vpo,
)

__all__ = [
    "VESPO_LOG_FLOOR",
    "BinaryDivergence",
    "CovPenalty",
    "LossTerms",
    "aspo",
    "cispo",
    "clip_cov",
    "ctpo",
    "dispo",
    "dppo",
    "dro",
    "entropy_groups",
    "espo",
    "first_ranked",
    "future_influence",
    "gmpo",
    "group_ratio_variance",
    "gspo_token",
    "kl_cov",
    "m2po",
    "masked_mean",
    "oapl",
    "p3o",
    "ppo_clip",
    "quatro",
    "qurl",
    "r2vpo",
    "sapo",
    "soft_value",
    "st_ppo",
    "tbpo",
    "token_covariance",
    "topr",
    "unit_ratio",
    "vespo_phi",
]
