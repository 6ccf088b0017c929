"""Presets of papers that drop tokens and responses."""

from __future__ import annotations

from collections.abc import Callable

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import (
    DivergenceBand,
    OffPolicySequenceMask,
    OutlierVeto,
    RatioBand,
    SecondMomentBudget,
    TruncateWeight,
)
from trl_offpolicy.functional.masks import Statistic
from trl_offpolicy.presets.papers_weights import MIS
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.types import Ratio

GEOMETRIC = "'A geometric view of off-policy sequence masking' 2026; " + MIS
DEEPSEEK = "DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), Eq. 8-9"
DPPO = "Qi et al. 2026, DPPO, 'Rethinking the trust region in LLM RL' (arXiv:2602.04879)"


def geometric_mask(low: float = 0.99, high: float = 1.01, max_weight: float = 2.0) -> Preset:
    """Length-invariant sequence mask with token TIS."""
    return make_preset(
        "paper/geometric-mask",
        Correction(
            weight=TruncateWeight(level="token", max_weight=max_weight),
            keep=(RatioBand(level="sequence_mean", low=low, high=high),),
        ),
        citation=GEOMETRIC,
        formula="keep if low <= (prod_t rho_t)^(1/T) <= high; w_t = min(rho_t, C)",
        notes="Rejection plus token TIS. Drift counts the same at every length, noise averages out in long responses: "
        "calibrate the band on your lengths; it should drop a few per cent.",
    )


def geometric_mask_veto(
    low: float = 0.99, high: float = 1.01, veto_low: float = 1e-4, veto_high: float | None = None
) -> Preset:
    """Geometric mask, and a veto against single catastrophic tokens."""
    return make_preset(
        "paper/geometric-mask-veto",
        Correction(
            keep=(
                OutlierVeto(low=veto_low, high=veto_high),
                RatioBand(level="sequence_mean", low=low, high=high),
            )
        ),
        citation=GEOMETRIC,
        notes="A mean forgives one token that the trainer finds impossible; the veto does not. Long responses, MoE.",
    )


def product_mask(low: float = 0.5, high: float = 2.0) -> Preset:
    """Sequence mask on the product of ratios."""
    return make_preset(
        "paper/product-mask",
        Correction(keep=(RatioBand(level="sequence", low=low, high=high),)),
        citation=MIS,
        notes="Exact sequence ratio, hard region, weight 1 inside. Drops long responses first (the length trap): for "
        "short responses of similar length; otherwise paper/geometric-mask.",
    )


def opsm(max_divergence: float = 0.05, ratio: Ratio = "current/sampling") -> Preset:
    """DeepSeek's off-policy sequence mask."""
    return make_preset(
        "paper/opsm",
        Correction(keep=(OffPolicySequenceMask(max_divergence=max_divergence, ratio=ratio),)),
        citation=DEEPSEEK,
        formula="drop if A < 0 and mean_t log(mu / pi) > delta" if ratio == "current/sampling" else None,
        notes="Bounds mismatch and staleness together, on sequences that would be pushed down only. With ratio "
        "'current/old' (slime's use_opsm) staleness alone.",
    )


def trm(statistic: Statistic = "k3", high: float = 0.05) -> Preset:
    """Trust region masking."""
    return make_preset(
        "paper/trm",
        Correction(keep=(DivergenceBand(statistic=statistic, level="sequence_max", high=high),)),
        citation="Li et al. 2025, TRM, 'Trust region masking for long-horizon LLM RL' (arXiv:2512.23075)",
        notes="One bad token condemns the response. Long horizons, agents. The paper takes the KL over the whole "
        "vocabulary; here it is estimated from the sampled token (statistic k2, k3, abs, binary_tv or binary_kl). "
        "high: a starting point of this kit; calibrate it with statistic measured on a healthy run.",
    )


def m2po(budget: float = 0.04) -> Preset:
    """Second-moment budget of the log-ratio."""
    return make_preset(
        "paper/m2po",
        Correction(keep=(SecondMomentBudget(budget=budget),)),
        citation="Zheng et al. 2025, M2PO (arXiv:2510.01161)",
        notes="Stale data with heavy tails: the worst tokens of the batch go until the mean of log^2 rho, mean shift "
        "included, is inside the budget, which bounds the chi-square divergence. Needs the whole generation batch.",
    )


def dppo_mask(statistic: Statistic = "binary_tv", high: float = 0.2) -> Preset:
    """Token band on a probability divergence instead of a ratio."""
    return make_preset(
        "paper/dppo-mask",
        Correction(
            keep=(DivergenceBand(statistic=statistic, level="token", high=high, ratio="current/sampling"),),
        ),
        citation=DPPO,
        notes="Rare tokens may change by large factors, frequent ones may not move far. 0.2 for binary_tv, 0.05 for "
        "binary_kl. The mask alone, beside PPO's clip and on both sides; DPPO's loss drops only the side that the "
        "advantage pushes to (prime-rl/probability-difference) and has no clip.",
    )


BUILDERS: dict[str, Callable[..., Preset]] = {
    "paper/geometric-mask": geometric_mask,
    "paper/geometric-mask-veto": geometric_mask_veto,
    "paper/product-mask": product_mask,
    "paper/opsm": opsm,
    "paper/trm": trm,
    "paper/m2po": m2po,
    "paper/dppo-mask": dppo_mask,
}
