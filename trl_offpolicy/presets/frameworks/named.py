"""Presets that run other frameworks' recommended configurations. Their numbers come from ``from_<framework>``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import (
    BandWeight,
    DivergenceBand,
    OffPolicySequenceMask,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    TruncateWeight,
)
from trl_offpolicy.objective.losses import GPG
from trl_offpolicy.presets.frameworks.areal import from_areal
from trl_offpolicy.presets.frameworks.openrlhf import from_openrlhf
from trl_offpolicy.presets.frameworks.skyrl import from_skyrl
from trl_offpolicy.presets.frameworks.slime import from_slime
from trl_offpolicy.presets.frameworks.trl import from_trl
from trl_offpolicy.presets.papers_masks import DEEPSEEK, DPPO
from trl_offpolicy.presets.papers_weights import ICEPOP
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.presets.text import formula_of


def skyrl_token_tis(max_weight: float = 2.0) -> Preset:
    """SkyRL's first recommendation."""
    return _named(
        "skyrl/token-tis",
        from_skyrl(tis_ratio_type="token", token_tis_ratio_clip_high=max_weight),
        "SkyRL's advice: try it first.",
    )


def skyrl_sequence_tis(max_weight: float = 5.0) -> Preset:
    """SkyRL's sequence form."""
    return _named(
        "skyrl/sequence-tis",
        from_skyrl(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=max_weight),
        "Sequence-level TIS; recommended caps 2 to 10.",
    )


def skyrl_geometric_mask(low: float = 0.99, high: float = 1.01) -> Preset:
    """SkyRL's geometric sequence mask."""
    return _named(
        "skyrl/geometric-mask",
        from_skyrl(sequence_mask_metric="geometric", geo_mask_low=low, geo_mask_high=high),
        "SkyRL's advice for long contexts and MoE models; tune the band.",
    )


def skyrl_product_mask(low: float = 0.5, high: float = 2.0) -> Preset:
    """SkyRL's product sequence mask."""
    return _named(
        "skyrl/product-mask",
        from_skyrl(sequence_mask_metric="product", product_mask_low=low, product_mask_high=high),
        "Mask on the product of ratios: short responses.",
    )


def skyrl_token_mask(low: float = 0.5, high: float = 2.0) -> Preset:
    """SkyRL's token mask."""
    return _named(
        "skyrl/token-mask",
        from_skyrl(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high),
        "SkyRL's alternative for long contexts and MoE models (GLM-5's IcePop without the weight inside the band).",
    )


def skyrl_long_context_moe(
    low: float = 0.99, high: float = 1.01, outlier_low: float = 1e-4, outlier_high: float = 100.0
) -> Preset:
    """SkyRL's outlier veto and geometric mask."""
    preset = from_skyrl(
        sequence_mask_metric="geometric",
        geo_mask_low=low,
        geo_mask_high=high,
        outlier_token_is_threshold_low=outlier_low,
        outlier_token_is_threshold_high=outlier_high,
    )
    return _named("skyrl/long-context-moe", preset, "SkyRL's recommendation for long contexts and MoE models.")


def slime_mis() -> Preset:
    """The mis.yaml of slime."""
    preset = from_slime(
        use_tis=True,
        use_rs=True,
        tis_level="token",
        rs_level="token",
        tis_mode="truncate",
        tis_lower_bound=0.5,
        tis_upper_bound=2.0,
        rs_veto_threshold=1e-4,
        tis_batch_normalize=True,
    )
    return _named("slime/mis", preset, "slime's mis.yaml as it is: capped weights of mean 1, token mask and veto.")


def openrlhf_tis(low: float = 0.5, high: float = 5.0) -> Preset:
    """OpenRLHF's default type."""
    return _openrlhf("tis", low, high, "Token weights held in a band: the floor adds bias where the trainer disagrees.")


def openrlhf_icepop(low: float = 0.5, high: float = 5.0) -> Preset:
    """OpenRLHF's token filter."""
    return _openrlhf("icepop", low, high, "Weight 0 outside the band.")


def openrlhf_seq_mask_tis(low: float = 0.5, high: float = 5.0) -> Preset:
    """OpenRLHF's sequence filter."""
    return _openrlhf(
        "seq-mask-tis", low, high, "Geometric mean decides, token weights stay raw; the default band is very wide."
    )


def areal_decoupled(upper: float = 5.0, lower: float | None = None) -> Preset:
    """AReaL's decoupled PPO with its former default filter."""
    return _named(
        "areal/decoupled",
        from_areal(level="token", action="mask", metric="ratio", upper=upper, lower=lower, use_decoupled_loss=True),
        "Fu et al. 2025, AReaL (arXiv:2505.24298): asynchronous training. pi_old is the proximal policy, recomputed "
        "at the start of the step; tokens above the cap are dropped.",
    )


def trl_token_truncate(max_weight: float = 3.0, min_weight: float | None = None) -> Preset:
    """TRL's token_truncate."""
    return _trl("token_truncate", max_weight, min_weight, "TRL's form of TIS.")


def trl_token_mask(max_weight: float = 3.0, min_weight: float | None = None) -> Preset:
    """TRL's token_mask."""
    return _trl("token_mask", max_weight, min_weight, "TRL's form of IcePop.")


def trl_sequence_truncate(max_weight: float = 3.0, min_weight: float | None = None) -> Preset:
    """TRL's sequence_truncate."""
    return _trl("sequence_truncate", max_weight, min_weight, "TRL's form of sequence TIS.")


def trl_sequence_mask(max_weight: float = 3.0, min_weight: float | None = None) -> Preset:
    """TRL's default mode."""
    return _trl("sequence_mask", max_weight, min_weight, "TRL's default: MIS on the product, long responses go first.")


def prime_rl_probability_difference(low: float = -0.2, high: float = 0.2) -> Preset:
    """prime-rl's default loss without its KL term."""
    return make_preset(
        "prime-rl/probability-difference",
        Correction(
            weight=RawWeight(ratio="current/sampling"),
            keep=(ProbabilityDifferenceMask(low=low, high=high, ratio="current/sampling"),),
        ),
        citation="prime-rl 559b44772, default_loss_fn; " + DPPO,
        notes="Asynchronous training on two policies. The gradient is that of prime-rl's -(pi / mu) A on kept tokens; "
        "its regulariser 1e-3 log^2(pi / mu) is left out.",
        source_clamp=None,
        policy_loss=GPG(),
        mode="bypass",
    )


def roll_token_filter(low: float = 0.8, high: float = 1.2, max_weight: float = 1.2) -> Preset:
    """ROLL's token weight and filter."""
    return make_preset(
        "roll/token-filter",
        Correction(
            weight=TruncateWeight(level="token", max_weight=max_weight),
            keep=(RatioBand(level="token", low=low, high=high),),
        ),
        citation="ROLL 8eb27cc2, train_infer_correction",
        notes="The defaults of ROLL's is_weight and of a filter, both enabled: a tight token band. The denominator "
        "stays whole as in ROLL's workers; its pipeline-level pass shrinks it.",
        source_clamp=None,
    )


def roll_segment_filter(
    ratio_low: float = 0.8, ratio_high: float = 1.05, diff_low: float = -0.1, diff_high: float = 0.1
) -> Preset:
    """ROLL's agentic filter."""
    return make_preset(
        "roll/segment-filter",
        Correction(
            keep=(
                RatioBand(level="turn_mean", low=ratio_low, high=ratio_high),
                DivergenceBand(statistic="prob_diff", level="turn_mean", low=diff_low, high=diff_high),
            )
        ),
        citation="ROLL 8eb27cc2, train_infer_correction, agent_val_frozen_lake-pg_var_is_correct.yaml",
        notes="Agents: a turn is kept if its geometric ratio and its mean probability difference are in their bands.",
        source_clamp=None,
    )


def ring_icepop(low: float = 0.5, high: float = 5.0) -> Preset:
    """Ring-1T's IcePop."""
    return make_preset(
        "ring-1t/icepop",
        Correction(weight=BandWeight(level="token", low=low, high=high)),
        citation=ICEPOP,
        notes="As trained at trillion scale (with a frozen router bias): 1 to 2 tokens in a thousand have weight 0.",
    )


def deepseek_opsm(max_divergence: float = 0.05) -> Preset:
    """DeepSeek-V3.2's off-policy sequence mask."""
    return make_preset(
        "deepseek-v3.2/opsm",
        Correction(keep=(OffPolicySequenceMask(max_divergence=max_divergence),)),
        citation=DEEPSEEK,
        notes="In the report beside a KL term weighted by pi / pi_old (Eq. 7: KLPenalty(ratio_weighted=True)), routing "
        "replay and sampling-mask replay. The report does not print delta; 0.05 nats is a starting point.",
    )


def _named(name: str, preset: Preset, notes: str) -> Preset:
    return replace(preset, name=name, notes=notes)


def _openrlhf(kind: str, low: float, high: float, notes: str) -> Preset:
    preset = from_openrlhf(
        enable_vllm_is_correction=True, vllm_is_correction_type=kind, vllm_is_truncated_threshold=[low, high]
    )
    return _named(f"openrlhf/{kind}", preset, notes)


def _trl(mode: str, max_weight: float, min_weight: float | None, notes: str) -> Preset:
    preset = from_trl(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=max_weight,
        vllm_importance_sampling_clip_min=min_weight,
    )
    return replace(_named(f"trl/{mode.replace('_', '-')}", preset, notes), formula=formula_of(preset.objective))


BUILDERS: dict[str, Callable[..., Preset]] = {
    "skyrl/token-tis": skyrl_token_tis,
    "skyrl/sequence-tis": skyrl_sequence_tis,
    "skyrl/geometric-mask": skyrl_geometric_mask,
    "skyrl/product-mask": skyrl_product_mask,
    "skyrl/token-mask": skyrl_token_mask,
    "skyrl/long-context-moe": skyrl_long_context_moe,
    "slime/mis": slime_mis,
    "openrlhf/tis": openrlhf_tis,
    "openrlhf/icepop": openrlhf_icepop,
    "openrlhf/seq-mask-tis": openrlhf_seq_mask_tis,
    "areal/decoupled": areal_decoupled,
    "trl/token-truncate": trl_token_truncate,
    "trl/token-mask": trl_token_mask,
    "trl/sequence-truncate": trl_sequence_truncate,
    "trl/sequence-mask": trl_sequence_mask,
    "prime-rl/probability-difference": prime_rl_probability_difference,
    "roll/token-filter": roll_token_filter,
    "roll/segment-filter": roll_segment_filter,
    "ring-1t/icepop": ring_icepop,
    "deepseek-v3.2/opsm": deepseek_opsm,
}
