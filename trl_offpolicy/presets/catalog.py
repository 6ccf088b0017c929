"""The named presets. Each builder's keyword arguments are the options that ``presets.get`` accepts."""

from __future__ import annotations

from collections.abc import Callable

from trl_offpolicy.corrections import Correction
from trl_offpolicy.objectives import Objective
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.terms import BandWeight, OffPolicySequenceMask, OutlierVeto, RatioBand, TruncateWeight

_SAMPLING = ("sampling_per_token_logps",)
_TIS = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
_MIS = (
    "Liu, Li et al. 2025, 'When speed kills stability: demystifying RL collapse from the training-inference mismatch'"
)


def measure() -> Preset:
    """Diagnostics only."""
    return Preset(
        name="measure",
        objective=Objective(correction=Correction()),
        requires=(),
        citation="-",
        formula="w = 1, nothing dropped",
        notes="No correction; every diagnostic that the batch allows is computed.",
    )


def tis(max_weight: float = 2.0) -> Preset:
    """Token-level truncated importance sampling."""
    return Preset(
        name="paper/tis",
        objective=Objective(correction=Correction(weight=TruncateWeight(level="token", max_weight=max_weight))),
        requires=_SAMPLING,
        citation=_TIS,
        formula="w_t = min(pi_old / mu, C)",
        notes="First thing to try. Mild mismatch, quantised rollouts. Bias where it truncates, bounded variance.",
    )


def sequence_tis(max_weight: float = 5.0) -> Preset:
    """Sequence-level truncated importance sampling."""
    return Preset(
        name="paper/sequence-tis",
        objective=Objective(correction=Correction(weight=TruncateWeight(level="sequence", max_weight=max_weight))),
        requires=_SAMPLING,
        citation=_MIS,
        formula="w = min(prod_t pi_old / mu, C)",
        notes="Unbiased but for the cap; variance grows with length: watch weight_applied/ess_sequence.",
    )


def mis(max_weight: float = 2.0, min_weight: float | None = None) -> Preset:
    """Sequence-level masked importance sampling."""
    return Preset(
        name="paper/mis",
        objective=Objective(
            correction=Correction(weight=BandWeight(level="sequence", low=min_weight, high=max_weight))
        ),
        requires=_SAMPLING,
        citation=_MIS,
        formula="w = rho_seq if low <= rho_seq <= C else 0",
        notes="A hard trust region on the sequence; long responses are rejected more often.",
    )


def icepop(low: float = 0.5, high: float = 5.0) -> Preset:
    """Token-level double-sided masking."""
    return Preset(
        name="paper/icepop",
        objective=Objective(correction=Correction(weight=BandWeight(level="token", low=low, high=high))),
        requires=_SAMPLING,
        citation="Ling team 2025, 'Every step evolves' (Ring-1T), IcePop",
        formula="w_t = rho_t if low <= rho_t <= high else 0",
        notes="Token-level double-sided masking; made for MoE models.",
    )


def geometric_mask(low: float = 0.99, high: float = 1.01, max_weight: float = 2.0) -> Preset:
    """Length-invariant sequence mask with token TIS."""
    return Preset(
        name="paper/geometric-mask",
        objective=Objective(
            correction=Correction(
                weight=TruncateWeight(level="token", max_weight=max_weight),
                keep=(RatioBand(level="sequence_mean", low=low, high=high),),
            )
        ),
        requires=_SAMPLING,
        citation="'A geometric view of off-policy sequence masking' 2026; " + _MIS,
        formula="keep if low <= (prod_t rho_t)^(1/T) <= high; w_t = min(rho_t, C)",
        notes="Length-invariant rejection plus token TIS. Calibrate the band: it should drop a few per cent.",
    )


def geometric_mask_veto(
    low: float = 0.99, high: float = 1.01, outlier_low: float = 1e-4, outlier_high: float = 100.0
) -> Preset:
    """SkyRL's outlier veto and geometric mask."""
    return Preset(
        name="skyrl/long-context-moe",
        objective=Objective(
            correction=Correction(
                keep=(
                    OutlierVeto(low=outlier_low, high=outlier_high),
                    RatioBand(level="sequence_mean", low=low, high=high),
                ),
                measure_on="remaining",
            )
        ),
        requires=_SAMPLING,
        citation="SkyRL documentation, 'Off policy correction'",
        formula="drop if any rho_t leaves [1e-4, 100]; keep if low <= rho_geo <= high",
        notes="SkyRL's recommendation for long contexts and MoE models.",
    )


def opsm(max_divergence: float = 0.05) -> Preset:
    """DeepSeek's off-policy sequence mask."""
    return Preset(
        name="paper/opsm",
        objective=Objective(correction=Correction(keep=(OffPolicySequenceMask(max_divergence=max_divergence),))),
        requires=_SAMPLING,
        citation="DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), Eq. 8-9",
        formula="drop if A < 0 and mean_t log(mu / pi) > delta",
        notes="Bounds mismatch and staleness together, on sequences that would be pushed down only.",
    )


BUILDERS: dict[str, Callable[..., Preset]] = {
    "measure": measure,
    "paper/tis": tis,
    "paper/sequence-tis": sequence_tis,
    "paper/mis": mis,
    "paper/icepop": icepop,
    "paper/geometric-mask": geometric_mask,
    "paper/opsm": opsm,
    "skyrl/long-context-moe": geometric_mask_veto,
}
