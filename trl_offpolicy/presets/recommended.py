"""Named configurations of other frameworks and of training reports: advice, defaults, or what a model was trained with.

Most translate the framework's own options (:mod:`trl_offpolicy.presets.frameworks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_offpolicy.checks import check_number
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
from trl_offpolicy.objective.advantages import RLOO
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import GPG, PPOClip
from trl_offpolicy.presets.frameworks.areal import from_areal
from trl_offpolicy.presets.frameworks.openrlhf import from_openrlhf
from trl_offpolicy.presets.frameworks.skyrl import from_skyrl
from trl_offpolicy.presets.frameworks.slime import from_slime
from trl_offpolicy.presets.frameworks.trl import from_trl
from trl_offpolicy.presets.frameworks.verl.translate import from_verl
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.presets.row import DEEPSEEK, DPPO, ICEPOP, Row

RLOO_PAPER = "Ahmadian et al. 2024, RLOO, 'Back to basics' (arXiv:2402.14740)"

RECOMMENDED: dict[str, Row] = {
    "skyrl/token-tis": Row(
        lambda max_weight=2.0: from_skyrl(tis_ratio_type="token", token_tis_ratio_clip_high=max_weight),
        "SkyRL's advice: try it first.",
    ),
    "skyrl/sequence-tis": Row(
        lambda max_weight=5.0: from_skyrl(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=max_weight),
        "Sequence-level TIS; recommended caps 2 to 10.",
    ),
    "skyrl/geometric-mask": Row(
        lambda low=0.99, high=1.01: from_skyrl(sequence_mask_metric="geometric", geo_mask_low=low, geo_mask_high=high),
        "SkyRL's advice for long contexts and MoE models; tune the band.",
    ),
    "skyrl/product-mask": Row(
        lambda low=0.5, high=2.0: from_skyrl(
            sequence_mask_metric="product", product_mask_low=low, product_mask_high=high
        ),
        "Mask on the product of ratios: short responses.",
    ),
    "skyrl/token-mask": Row(
        lambda low=0.5, high=2.0: from_skyrl(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high),
        "SkyRL's alternative for long contexts and MoE models (GLM-5's IcePop without the weight inside the band).",
    ),
    "skyrl/long-context-moe": Row(
        lambda low=0.99, high=1.01, outlier_low=1e-4, outlier_high=100.0: from_skyrl(
            sequence_mask_metric="geometric",
            geo_mask_low=low,
            geo_mask_high=high,
            outlier_token_is_threshold_low=outlier_low,
            outlier_token_is_threshold_high=outlier_high,
        ),
        "SkyRL's recommendation for long contexts and MoE models.",
    ),
    "slime/mis": Row(
        lambda: from_slime(
            use_tis=True,
            use_rs=True,
            tis_level="token",
            rs_level="token",
            tis_mode="truncate",
            tis_lower_bound=0.5,
            tis_upper_bound=2.0,
            rs_veto_threshold=1e-4,
            tis_batch_normalize=True,
        ),
        "slime's mis.yaml as it is: capped weights of mean 1, token mask and veto.",
    ),
    "openrlhf/tis": Row(
        lambda low=0.5, high=5.0: _openrlhf("tis", low, high),
        "Token weights held in a band: the floor adds bias where the trainer disagrees.",
    ),
    "openrlhf/icepop": Row(
        lambda low=0.5, high=5.0: _openrlhf("icepop", low, high),
        "Weight 0 outside the band.",
    ),
    "openrlhf/seq-mask-tis": Row(
        lambda low=0.5, high=5.0: _openrlhf("seq-mask-tis", low, high),
        "Geometric mean decides, token weights stay raw; the default band is very wide.",
    ),
    "areal/decoupled": Row(
        lambda upper=5.0, lower=None: from_areal(
            level="token", action="mask", metric="ratio", upper=upper, lower=lower, use_decoupled_loss=True
        ),
        "Fu et al. 2025, AReaL (arXiv:2505.24298): asynchronous training. pi_old is the proximal policy, recomputed "
        "at the start of the step; tokens above the cap are dropped.",
    ),
    "trl/token-truncate": Row(
        lambda max_weight=3.0, min_weight=None: _trl("token_truncate", max_weight, min_weight),
        "TRL's form of TIS.",
    ),
    "trl/token-mask": Row(
        lambda max_weight=3.0, min_weight=None: _trl("token_mask", max_weight, min_weight),
        "TRL's form of IcePop.",
    ),
    "trl/sequence-truncate": Row(
        lambda max_weight=3.0, min_weight=None: _trl("sequence_truncate", max_weight, min_weight),
        "TRL's form of sequence TIS.",
    ),
    "trl/sequence-mask": Row(
        lambda max_weight=3.0, min_weight=None: _trl("sequence_mask", max_weight, min_weight),
        "TRL's default: MIS on the product, long responses go first.",
    ),
    "trl/rloo": Row(
        lambda beta=0.05, epsilon=0.2, epsilon_high=None, normalize_advantages=False: _trl_rloo(
            beta, epsilon, epsilon_high, normalize=normalize_advantages
        ),
        "The loss of TRL's RLOOTrainer, which corrects no mismatch; add a weight for that. The ratio is the product "
        "over the response, so that long responses leave the clip early. Its reward_clip_range belongs into the reward "
        "function here.",
        formula="r of the response = prod_t pi / pi_old; R - beta log(pi_old / ref), less the mean of the others",
    ),
    "prime-rl/probability-difference": Row(
        lambda low=-0.2, high=0.2, tau=1e-3: make_preset(
            "prime-rl/probability-difference",
            Correction(
                weight=RawWeight(ratio="current/sampling"),
                keep=(ProbabilityDifferenceMask(low=low, high=high, ratio="current/sampling"),),
            ),
            citation="prime-rl 559b44772, default_loss_fn and docs/algorithms.md; " + DPPO,
            notes="",
            source_clamp=None,
            policy_loss=GPG(unit_ratio=True),
            mode="bypass",
            drift_coef=tau,
        ),
        "Asynchronous training on two policies: prime-rl's default loss, -(pi / mu) A on kept "
        "tokens, plus tau log^2(pi / mu) on all trainable ones, which draws back also those that the mask dropped.",
    ),
    "roll/token-filter": Row(
        lambda low=0.8, high=1.2, max_weight=1.2: Correction(
            weight=TruncateWeight(level="token", max_weight=max_weight),
            keep=(RatioBand(level="token", low=low, high=high),),
        ),
        "The defaults of ROLL's is_weight and of a filter, both enabled: a tight token band. A filtered token loses "
        "its KL term too. The denominator stays whole here; ROLL's mean over a response, its default, counts the "
        "tokens that are left.",
        citation="ROLL 8eb27cc2, train_infer_correction",
        source_clamp=None,
        objective={"kl_on": "kept"},
    ),
    "roll/segment-filter": Row(
        lambda ratio_low=0.8, ratio_high=1.05, diff_low=-0.1, diff_high=0.1: Correction(
            keep=(
                RatioBand(level="turn_mean", low=ratio_low, high=ratio_high),
                DivergenceBand(statistic="prob_diff", level="turn_mean", low=diff_low, high=diff_high),
            )
        ),
        "Agents: a turn is kept if its geometric ratio and its mean probability difference are in their bands. "
        "Otherwise it loses its KL term too.",
        citation="ROLL 8eb27cc2, train_infer_correction, agent_val_frozen_lake-pg_var_is_correct.yaml",
        source_clamp=None,
        objective={"kl_on": "kept"},
    ),
    "ring-1t/icepop": Row(
        lambda low=0.5, high=5.0: Correction(weight=BandWeight(level="token", low=low, high=high)),
        "As trained at trillion scale (with a frozen router bias): 1 to 2 tokens in a thousand have weight 0.",
        citation=ICEPOP,
    ),
    "deepseek-v3.2/opsm": Row(
        lambda max_divergence=0.05: Correction(keep=(OffPolicySequenceMask(max_divergence=max_divergence),)),
        "In the report beside a KL term weighted by pi / pi_old (Eq. 7: KLPenalty(ratio_weighted=True)), routing "
        "replay and sampling-mask replay. The report does not print delta; 0.05 nats is a starting point.",
        citation=DEEPSEEK,
    ),
    "deepseek-v3.2/objective": Row(
        lambda max_divergence=0.05, kl_coef=0.01: _deepseek(max_divergence, kl_coef),
        "The whole objective of the report on two policies: PPO's clip on pi / mu, OPSM, and the KL term that pi / mu "
        "makes unbiased. Keep Routing and Keep Sampling Mask are settings of the trainer beside it, which "
        "deepseek-v3.2/whole brings. The report prints neither delta nor the KL's coefficient: starting points.",
        source_clamp=None,
    ),
    "deepseek-v3.2/whole": Row(
        lambda max_divergence=0.05, kl_coef=0.01: _deepseek(max_divergence, kl_coef, trainer={"routing_replay": "r3"}),
        "The objective with Keep Routing (routing_replay r3: a mixture of experts, sampled by vLLM). Keep Sampling "
        "Mask is on by itself where top_p, top_k or min_p cut and the engine reports what they kept.",
        source_clamp=None,
    ),
}


def _deepseek(max_divergence: float, kl_coef: float, *, trainer: Mapping[str, Any] | None = None) -> Preset:
    return make_preset(
        "deepseek-v3.2",
        Correction(keep=(OffPolicySequenceMask(max_divergence=max_divergence),)),
        citation=DEEPSEEK + ", and Eq. 7",
        notes="",
        trainer=trainer,
        mode="bypass",
        kl=KLPenalty(coef=kl_coef, estimator="k3", ratio_weighted=True),
    )


def _openrlhf(kind: str, low: float, high: float) -> Preset:
    return from_openrlhf(
        enable_vllm_is_correction=True, vllm_is_correction_type=kind, vllm_is_truncated_threshold=[low, high]
    )


def _trl(mode: str, max_weight: float, min_weight: float | None) -> Preset:
    return from_trl(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=max_weight,
        vllm_importance_sampling_clip_min=min_weight,
    )


def _trl_rloo(beta: float, epsilon: float, epsilon_high: float | None, *, normalize: bool) -> Preset:
    """The options are ``RLOOConfig``'s, with its defaults. beta 0 = no KL term."""
    check_number("beta", beta)
    return make_preset(
        "trl/rloo",
        Correction(),
        citation="TRL 1.16 RLOOTrainer; " + RLOO_PAPER,
        notes="",
        source_clamp=None,
        advantages=RLOO(normalize=normalize),
        policy_loss=PPOClip(low=epsilon, high=epsilon if epsilon_high is None else epsilon_high, level="sequence"),
        kl=KLPenalty(coef=beta, estimator="k1", place="reward") if beta else None,
        aggregation="seq_mean_token_mean",
    )


def _verl(level: str | None = None, cap: float | str | None = None, reject: str | None = None,
          bound: float | str | None = None, loss: str | None = None) -> Preset:  # fmt: skip
    """From verl: ``rollout_is`` and its threshold, ``rollout_rs`` and its threshold, the loss of the bypass mode."""
    given: dict[str, Any] = {}
    if level is not None:
        given |= {"rollout_is": level, "rollout_is_threshold": cap}
    if reject is not None:
        given |= {"rollout_rs": reject, "rollout_rs_threshold": bound}
    if loss is not None:
        given |= {"bypass_mode": True, "loss_type": loss}
    return from_verl(**given)


_GEO, _K3 = "seq_mean_k1", "seq_mean_k3"
_GEO_BAND = "0.999_1.001"

VERL: dict[str, Row] = {
    "decoupled_token_is": Row(
        lambda threshold=2.0: _verl("token", threshold),
        "Mild lag or mismatch: low variance, biased where it truncates.",
    ),
    "decoupled_seq_is": Row(
        lambda threshold=2.0: _verl("sequence", threshold),
        "Short responses: the product is almost always truncated on long ones.",
    ),
    "decoupled_token_icepop": Row(
        lambda threshold=5.0, threshold_lower=0.5: _verl("token", f"{threshold_lower}_{threshold}"),
        "MoE models, a few tokens that dominate. Above 10 % outside, fix the engines instead.",
    ),
    "decoupled_seq_is_rs": Row(
        lambda is_threshold=2.0, rs_threshold="0.5_2.0": _verl("sequence", is_threshold, "seq_sum_k1", rs_threshold),
        "A hard region on the product beside the weight; keeps rho_seq in [1/2, 1/0.5] by verl's sign of k1.",
    ),
    "decoupled_geo_rs": Row(
        lambda rs_threshold=_GEO_BAND: _verl(reject=_GEO, bound=rs_threshold),
        "Outliers in long responses; the default band is tight, 0.99_1.01 is milder.",
    ),
    "decoupled_geo_rs_seq_tis": Row(
        lambda is_threshold=2.0, rs_threshold=_GEO_BAND: _verl("sequence", is_threshold, _GEO, rs_threshold),
        "Queue lag, long responses.",
    ),
    "decoupled_geo_rs_token_tis": Row(
        lambda is_threshold=2.0, rs_threshold=_GEO_BAND: _verl("token", is_threshold, _GEO, rs_threshold),
        "Heavy tails: rejection first, then a mild weight.",
    ),
    "decoupled_k3_rs": Row(
        lambda rs_threshold=0.01: _verl(reject=_K3, bound=rs_threshold),
        "Rejects responses whose tokens differ in both directions, which cancel in a geometric mean.",
    ),
    "decoupled_k3_rs_seq_tis": Row(
        lambda is_threshold=2.0, rs_threshold=0.01: _verl("sequence", is_threshold, _K3, rs_threshold),
        "Steadier than the geometric mean at a small KL.",
    ),
    "decoupled_k3_rs_token_tis": Row(
        lambda is_threshold=2.0, rs_threshold=0.01: _verl("token", is_threshold, _K3, rs_threshold),
        "Steadier than the geometric mean at a small KL, low variance.",
    ),
    "bypass_ppo_clip": Row(
        lambda: _verl(loss="ppo_clip"),
        "Saves verl the forward of pi_old, which aligned steps never pay here; with a large mismatch the clip acts "
        "before the first step.",
    ),
    "bypass_ppo_clip_geo_rs": Row(
        lambda rs_threshold=_GEO_BAND: _verl(reject=_GEO, bound=rs_threshold, loss="ppo_clip"),
        "One-step asynchronous training.",
    ),
    "bypass_ppo_clip_k3_rs": Row(
        lambda rs_threshold=0.01: _verl(reject=_K3, bound=rs_threshold, loss="ppo_clip"),
        "One-step asynchronous training, k3 in place of the geometric mean.",
    ),
    "bypass_pg_is": Row(
        lambda threshold=2.0: _verl("sequence", threshold, loss="reinforce"),
        "No clip, an explicit sequence weight.",
    ),
    "bypass_pg_token_icepop": Row(
        lambda threshold=5.0, threshold_lower=0.5: _verl("token", f"{threshold_lower}_{threshold}", loss="reinforce"),
        "No clip; tokens outside the band have weight 0.",
    ),
    "bypass_pg_geo_rs": Row(
        lambda rs_threshold=_GEO_BAND: _verl(reject=_GEO, bound=rs_threshold, loss="reinforce"),
        "Rejection only; after a length surge, with half the learning rate.",
    ),
    "bypass_pg_geo_rs_seq_tis": Row(
        lambda is_threshold=2.0, rs_threshold=_GEO_BAND: _verl(
            "sequence", is_threshold, _GEO, rs_threshold, "reinforce"
        ),
        "Rejection and an explicit sequence weight.",
    ),
    "bypass_pg_geo_rs_token_tis": Row(
        lambda is_threshold=2.0, rs_threshold=_GEO_BAND: _verl("token", is_threshold, _GEO, rs_threshold, "reinforce"),
        "A saturated PPO clip: tight rejection, plain policy gradient, token weights.",
    ),
    "disabled": Row(lambda: _verl(), "The first hundred steps: measure before correcting."),
}
"""verl's 19 named configurations, under the names and options of its ``RolloutCorrectionConfig`` class methods."""
