"""Presets of papers that weigh tokens and responses."""

from __future__ import annotations

from collections.abc import Callable

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import (
    BandWeight,
    ESSWeight,
    PrefixMinWeight,
    PrefixWeight,
    RawWeight,
    ShapedWeight,
    TruncateWeight,
)
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.presets.preset import Preset, make_preset

TIS = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
MIS = "Liu, Li et al. 2025, 'When speed kills stability: demystifying RL collapse from the training-inference mismatch'"
ICEPOP = "Ling team 2025, Ring-1T, 'Every step evolves' (arXiv:2510.18855), section 2.3.2, IcePop"
LOGIT_FUSION = "Zhang et al. 2026, 'Logit fusion'"


def vanilla_is(level: Level = "token") -> Preset:
    """Untruncated importance sampling."""
    return make_preset(
        "paper/vanilla-is",
        Correction(weight=RawWeight(level=level)),
        citation=TIS + ", vanilla-IS (NeMo-RL's form)",
        notes="The baseline of ablations. At level 'sequence' the only unbiased weight, with a variance that grows "
        "exponentially with length; one outlier can carry a batch.",
    )


def ppo_is() -> Preset:
    """PPO's clip on the whole shift."""
    return make_preset(
        "paper/ppo-is",
        Correction(),
        citation=TIS + ", PPO-IS (ColossalAI's form)",
        notes="For comparison: one ratio pi / mu in PPO's clip, which the mismatch alone can make act before the first "
        "step, so that much of a batch gives no gradient. No forward for pi_old.",
        mode="bypass",
    )


def tis(max_weight: float = 2.0) -> Preset:
    """Token-level truncated importance sampling."""
    return make_preset(
        "paper/tis",
        Correction(weight=TruncateWeight(level="token", max_weight=max_weight)),
        citation=TIS,
        formula="w_t = min(pi_old / mu, C)",
        notes="First thing to try. Mild mismatch, quantised rollouts. Bias where it truncates, bounded variance.",
    )


def sequence_tis(max_weight: float = 5.0) -> Preset:
    """Sequence-level truncated importance sampling."""
    return make_preset(
        "paper/sequence-tis",
        Correction(weight=TruncateWeight(level="sequence", max_weight=max_weight)),
        citation=MIS,
        formula="w = min(prod_t pi_old / mu, C)",
        notes="Unbiased but for the cap; variance grows with length: watch mismatch/ess_sequence.",
    )


def mis(max_weight: float = 2.0, min_weight: float | None = None) -> Preset:
    """Sequence-level masked importance sampling."""
    return make_preset(
        "paper/mis",
        Correction(weight=BandWeight(level="sequence", low=min_weight, high=max_weight)),
        citation=MIS,
        formula="w = rho_seq if low <= rho_seq <= C else 0",
        notes="A hard trust region on the sequence; long responses are rejected more often.",
    )


def icepop(low: float = 0.5, high: float = 5.0) -> Preset:
    """Token-level double-sided masking."""
    return make_preset(
        "paper/icepop",
        Correction(weight=BandWeight(level="token", low=low, high=high)),
        citation=ICEPOP,
        formula="w_t = rho_t if low <= rho_t <= high else 0",
        notes="Token-level double-sided masking; made for MoE models. Expect 1 to 2 tokens in a thousand outside.",
    )


def minpro(max_weight: float | None = None) -> Preset:
    """The token's ratio times the smallest ratio before it."""
    return make_preset(
        "paper/minpro",
        Correction(weight=PrefixMinWeight(max_weight=max_weight)),
        citation="Lei et al. 2026, MinPRO (arXiv:2601.22718)",
        notes="A stand-in for the prefix product without its exponential growth: biased, low variance. Long responses. "
        "The paper puts it into the policy ratio; here it weighs pi_old / mu.",
    )


def ctpo(low: float = 0.8, high: float = 1.25) -> Preset:
    """The cumulative prefix ratio inside bounds that widen with sqrt(t)."""
    return make_preset(
        "paper/ctpo",
        Correction(weight=PrefixWeight(low=low, high=high)),
        citation="Zhang et al. 2026, CTPO (arXiv:2605.07331)",
        notes="Unbiased prefix correction until a bound acts, about alike at every position while log-ratios have mean "
        "0. The paper bounds the policy ratio; here it weighs pi_old / mu. Bounds: a starting point of this kit.",
    )


def logit_fusion_cap(max_weight: float = 3.0) -> Preset:
    """Cap without a floor, for rollouts that a teacher took part in."""
    return make_preset(
        "paper/logit-fusion-cap",
        Correction(weight=TruncateWeight(level="token", max_weight=max_weight)),
        citation=LOGIT_FUSION + ", single-side cap",
        notes="Deliberate teacher mixing: tokens that surprise the student keep their small weight, extremes are "
        "capped. The study holds pi / pi_mix in one ratio without PPO's clip; here pi_old / mu beside PPO's own.",
    )


def logit_fusion_shaped(gamma: float = 0.1) -> Preset:
    """Shaped ratio r / (r + gamma)."""
    return make_preset(
        "paper/logit-fusion-shaped",
        Correction(weight=ShapedWeight(gamma=gamma)),
        citation=LOGIT_FUSION + ", shaped ratio",
        notes="For comparison: the study found it unstable. Bounded by 1, and 1 / (1 + gamma) on-policy, not 1, so the "
        "learning rate shrinks by that factor. gamma: a starting point of this kit.",
    )


def turn_is(max_weight: float = 2.0, level: Level = "turn") -> Preset:
    """One weight a turn."""
    return make_preset(
        "paper/turn-is",
        Correction(weight=TruncateWeight(level=level, max_weight=max_weight)),
        citation="Li et al. 2025, ST-PPO (arXiv:2511.20718), turn-level importance sampling",
        notes="Multi-turn agents: a turn is one action. Turns come from turn_ids, else from the gaps that tool output "
        "leaves in the mask. Level 'turn_mean' does not grow with the turn. The paper's clipping-bias correction is "
        "not part of it; the cap is this kit's.",
    )


def ess_cap(target: float = 0.5, level: Level = "token") -> Preset:
    """Truncation that follows the batch."""
    return make_preset(
        "kit/ess-cap",
        Correction(weight=ESSWeight(target=target, level=level)),
        citation="this kit; ESS as a control signal: Huang et al. 2026, VCPO (arXiv:2602.17616)",
        notes="No cap while the weights are healthy, a tight one when a few dominate. Below an ESS of 0.5 more than "
        "half of the batch is wasted. Needs the whole generation batch.",
    )


BUILDERS: dict[str, Callable[..., Preset]] = {
    "paper/vanilla-is": vanilla_is,
    "paper/ppo-is": ppo_is,
    "paper/tis": tis,
    "paper/sequence-tis": sequence_tis,
    "paper/mis": mis,
    "paper/icepop": icepop,
    "paper/minpro": minpro,
    "paper/ctpo": ctpo,
    "paper/logit-fusion-cap": logit_fusion_cap,
    "paper/logit-fusion-shaped": logit_fusion_shaped,
    "paper/turn-is": turn_is,
    "kit/ess-cap": ess_cap,
}
