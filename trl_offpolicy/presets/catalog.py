"""The table of named presets: published methods, then the configurations that other frameworks name or recommend.

A row holds the method as a function of its options; their names and defaults are read from its signature. Most rows
build a :class:`~trl_offpolicy.Correction`; those of frameworks translate the framework's own options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trl_offpolicy.checks import check_number, near
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import (
    BandWeight,
    DivergenceBand,
    ESSWeight,
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
    SuffixVeto,
    TruncateWeight,
)
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.objective.advantages import RLOO
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import FIPO, GPG, P3O, PPOClip
from trl_offpolicy.presets.frameworks.areal import from_areal
from trl_offpolicy.presets.frameworks.openrlhf import from_openrlhf
from trl_offpolicy.presets.frameworks.skyrl import from_skyrl
from trl_offpolicy.presets.frameworks.slime import from_slime
from trl_offpolicy.presets.frameworks.trl import from_trl
from trl_offpolicy.presets.frameworks.verl.translate import from_verl
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.presets.text import formula_of


@dataclass(frozen=True)
class Row:
    """A named preset.

    Args:
        method: from the preset's options (keyword arguments, each with its default) to the correction, or to the preset
            that a framework's own options give.
        notes: when to use it, and what it does differently from its source.
        citation: paper or repository; None = the framework's, as its translation has it.
        formula: one line; None = written from the terms.
        source_clamp: see :class:`~trl_offpolicy.presets.Preset`; a framework's translation sets it itself.
        objective: fields of :class:`~trl_offpolicy.Objective` that the method sets beside the correction.
    """

    method: Callable[..., Correction | Preset]
    notes: str
    citation: str | None = None
    formula: str | None = None
    source_clamp: float | None = LOG_RATIO_CLAMP
    objective: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """{name: default} of the options, from the signature of the method."""
        return {name: option.default for name, option in inspect.signature(self.method).parameters.items()}

    def build(self, name: str, **options: Any) -> Preset:
        """The preset of this row with the given options, called ``name``."""
        made = self.method(**options)
        if isinstance(made, Correction):
            made = make_preset(name, made, citation="", notes="", source_clamp=self.source_clamp, **self.objective)
        # A formula in words holds for the default ratio. For another ratio it is written from the terms.
        same_ratio = "ratio" not in options or options["ratio"] == self.defaults["ratio"]
        return replace(
            made,
            name=name,
            notes=self.notes,
            citation=self.citation or made.citation,
            formula=self.formula if self.formula and same_ratio else formula_of(made.objective),
        )


TIS = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
MIS = "Liu, Li et al. 2025, 'When speed kills stability: demystifying RL collapse from the training-inference mismatch'"
ICEPOP = "Ling team 2025, Ring-1T, 'Every step evolves' (arXiv:2510.18855), section 2.3.2, IcePop"
LOGIT_FUSION = "Zhang et al. 2026, 'Logit fusion'"
GEOMETRIC = "'A geometric view of off-policy sequence masking' 2026; " + MIS
DEEPSEEK = "DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), Eq. 8-9"
KPOP = "Guo et al. 2026, KPop (ringtech.notion.site/kpop)"
CPPO = "Mao et al. 2026, CPPO, 'Beyond uniform token-level trust region in LLM RL' (arXiv:2606.10968)"
P3O_PAPER = "Fakoor et al. 2026, P3O, 'Trust the batch, on- or off-policy' (arXiv:2605.12380)"
FIPO_PAPER = "Ma et al. 2026, FIPO, 'Eliciting deep reasoning with future-KL' (arXiv:2603.19835)"
MU_GRPO = "Tian et al. 2026, mu-GRPO, 'How off-policy can GRPO be?' (arXiv:2605.17570)"
RLOO_PAPER = "Ahmadian et al. 2024, RLOO, 'Back to basics' (arXiv:2402.14740)"
DPPO = "Qi et al. 2026, DPPO, 'Rethinking the trust region in LLM RL' (arXiv:2602.04879)"

METHODS: dict[str, Row] = {
    "measure": Row(
        lambda: Correction(),
        "No correction; every diagnostic that the batch allows is computed.",
        citation="-",
        formula="w = 1, nothing dropped",
    ),
    # ------------------------------------------------------------------------------- what weighs tokens and responses
    "paper/vanilla-is": Row(
        lambda level="token": Correction(weight=RawWeight(level=level)),
        "The baseline of ablations. At level 'sequence' the only unbiased weight, with a variance that grows "
        "exponentially with length; one outlier can carry a batch.",
        citation=TIS + ", vanilla-IS (NeMo-RL's form)",
    ),
    "paper/ppo-is": Row(
        lambda: Correction(),
        "For comparison: one ratio pi / mu in PPO's clip, which the mismatch alone can make act before the first "
        "step, so that much of a batch gives no gradient. No forward for pi_old.",
        citation=TIS + ", PPO-IS (ColossalAI's form)",
        objective={"mode": "bypass"},
    ),
    "paper/tis": Row(
        lambda max_weight=2.0: Correction(weight=TruncateWeight(level="token", max_weight=max_weight)),
        "First thing to try. Mild mismatch, quantised rollouts. Bias where it truncates, bounded variance.",
        citation=TIS,
        formula="w_t = min(pi_old / mu, C)",
    ),
    "paper/sequence-tis": Row(
        lambda max_weight=5.0: Correction(weight=TruncateWeight(level="sequence", max_weight=max_weight)),
        "Unbiased but for the cap; variance grows with length: watch mismatch/ess_sequence.",
        citation=MIS,
        formula="w = min(prod_t pi_old / mu, C)",
    ),
    "paper/mis": Row(
        lambda max_weight=2.0, min_weight=None: Correction(
            weight=BandWeight(level="sequence", low=min_weight, high=max_weight)
        ),
        "A hard trust region on the sequence; long responses are rejected more often.",
        citation=MIS,
        formula="w = rho_seq if low <= rho_seq <= C else 0",
    ),
    "paper/icepop": Row(
        lambda low=0.5, high=5.0: Correction(weight=BandWeight(level="token", low=low, high=high)),
        "Token-level double-sided masking; made for MoE models. Expect 1 to 2 tokens in a thousand outside.",
        citation=ICEPOP,
        formula="w_t = rho_t if low <= rho_t <= high else 0",
    ),
    "paper/kpop": Row(
        lambda high=0.1: Correction(
            weight=RawWeight(), keep=(DivergenceBand(statistic="binary_kl_both", level="token", high=high),)
        ),
        "IcePop's successor, made for MoE models: a band on probabilities, so that a token is judged by how far it "
        "moved and not by its ratio. Rare tokens may move by large factors, certain ones hardly at all. AReaL's "
        "example has high 2.0.",
        citation=KPOP,
        formula="w_t = rho_t; drop a token where KL_binary(p, q) > high or KL_binary(q, p) > high",
    ),
    "paper/minpro": Row(
        lambda max_weight=None: Correction(weight=PrefixMinWeight(max_weight=max_weight)),
        "A stand-in for the prefix product without its exponential growth: biased, low variance. Long responses. "
        "The paper puts it into the policy ratio; here it weighs pi_old / mu.",
        citation="Lei et al. 2026, MinPRO (arXiv:2601.22718)",
    ),
    "paper/ctpo": Row(
        lambda low=0.8, high=1.25: Correction(weight=PrefixWeight(low=low, high=high)),
        "Unbiased prefix correction until a bound acts, about alike at every position while log-ratios have mean "
        "0. The paper clips the policy ratio; here it weighs pi_old / mu. Bounds: a starting point of this kit (the "
        "authors' code has 0.975 and 1.051, for the policy ratio).",
        citation="Zhang et al. 2026, CTPO (arXiv:2605.07331)",
    ),
    "paper/logit-fusion-cap": Row(
        lambda max_weight=3.0: Correction(weight=TruncateWeight(level="token", max_weight=max_weight)),
        "Deliberate teacher mixing: tokens that surprise the student keep their small weight, extremes are "
        "capped. The study holds pi / pi_mix in one ratio without PPO's clip; here pi_old / mu beside PPO's own.",
        citation=LOGIT_FUSION + ", single-side cap",
    ),
    "paper/logit-fusion-shaped": Row(
        lambda gamma=0.1: Correction(weight=ShapedWeight(gamma=gamma)),
        "For comparison: the study found it unstable. Bounded by 1, and 1 / (1 + gamma) on-policy, not 1, so the "
        "learning rate shrinks by that factor. gamma: a starting point of this kit.",
        citation=LOGIT_FUSION + ", shaped ratio",
    ),
    "paper/turn-is": Row(
        lambda max_weight=2.0, level="turn": Correction(weight=TruncateWeight(level=level, max_weight=max_weight)),
        "Multi-turn agents: a turn is one action. Turns come from turn_ids, else from the gaps that tool output "
        "leaves in the mask. Level 'turn_mean' does not grow with the turn. The paper's clipping-bias correction is "
        "not part of it; the cap is this kit's.",
        citation="Li et al. 2025, ST-PPO (arXiv:2511.20718), turn-level importance sampling",
    ),
    "kit/ess-cap": Row(
        lambda target=0.5, level="token": Correction(weight=ESSWeight(target=target, level=level)),
        "No cap while the weights are healthy, a tight one when a few dominate. Below an ESS of 0.5 more than "
        "half of the batch is wasted. Needs the whole generation batch.",
        citation="this kit; ESS as a control signal: Huang et al. 2026, VCPO (arXiv:2602.17616)",
    ),
    # -------------------------------------------------------------------------------- what drops tokens and responses
    "paper/geometric-mask": Row(
        lambda low=0.99, high=1.01, max_weight=2.0: Correction(
            weight=TruncateWeight(level="token", max_weight=max_weight),
            keep=(RatioBand(level="sequence_mean", low=low, high=high),),
        ),
        "Rejection plus token TIS. Drift counts the same at every length, noise averages out in long responses: "
        "calibrate the band on your lengths; it should drop a few per cent.",
        citation=GEOMETRIC,
        formula="keep if low <= (prod_t rho_t)^(1/T) <= high; w_t = min(rho_t, C)",
    ),
    "paper/geometric-mask-veto": Row(
        lambda low=0.99, high=1.01, veto_low=1e-4, veto_high=None: Correction(
            keep=(OutlierVeto(low=veto_low, high=veto_high), RatioBand(level="sequence_mean", low=low, high=high))
        ),
        "A mean forgives one token that the trainer finds impossible; the veto does not. Long responses, MoE.",
        citation=GEOMETRIC,
    ),
    "paper/product-mask": Row(
        lambda low=0.5, high=2.0: Correction(keep=(RatioBand(level="sequence", low=low, high=high),)),
        "Exact sequence ratio, hard region, weight 1 inside. Drops long responses first (the length trap): for "
        "short responses of similar length; otherwise paper/geometric-mask.",
        citation=MIS,
    ),
    "paper/opsm": Row(
        lambda max_divergence=0.05, ratio="current/sampling": Correction(
            keep=(OffPolicySequenceMask(max_divergence=max_divergence, ratio=ratio),)
        ),
        "Bounds mismatch and staleness together, on sequences that would be pushed down only. With ratio "
        "'current/old' (slime's use_opsm) staleness alone.",
        citation=DEEPSEEK,
        formula="drop if A < 0 and mean_t log(mu / pi) > delta",
    ),
    "paper/trm": Row(
        lambda statistic="k3", high=0.05, ratio="old/sampling": Correction(
            keep=(DivergenceBand(statistic=statistic, level="sequence_max", high=high, ratio=ratio),)
        ),
        "One bad token condemns the response. Long horizons, agents. The paper takes the KL over the whole "
        "vocabulary; here it is estimated from the sampled token (statistic k2, k3, abs, binary_tv or binary_kl). "
        "The paper's is between the engine and the policy that learns: ratio 'current/sampling'. "
        "high: a starting point of this kit; calibrate it with statistic measured on a healthy run.",
        citation="Li et al. 2025, TRM, 'Trust region masking for long-horizon LLM RL' (arXiv:2512.23075)",
    ),
    "paper/m2po": Row(
        lambda budget=0.04: Correction(keep=(SecondMomentBudget(budget=budget),)),
        "Stale data with heavy tails: the worst tokens of the batch go until the mean of log^2 rho, mean shift "
        "included, is inside the budget, which bounds the chi-square divergence. Needs the whole generation batch.",
        citation="Zheng et al. 2025, M2PO (arXiv:2510.01161)",
    ),
    "paper/dppo-mask": Row(
        lambda statistic="binary_tv", high=0.2: Correction(
            keep=(DivergenceBand(statistic=statistic, level="token", high=high, ratio="current/sampling"),)
        ),
        "Rare tokens may change by large factors, frequent ones may not move far. 0.2 for binary_tv, 0.05 for "
        "binary_kl. The mask alone, beside PPO's clip and on both sides; DPPO's loss drops only the side that the "
        "advantage pushes to (prime-rl/probability-difference) and has no clip.",
        citation=DPPO,
    ),
    "paper/cppo": Row(
        lambda high=0.2, budget=0.02, min_weight=0.8, statistic="binary_tv", adaptive=True: Correction(
            weight=RawWeight(ratio="current/sampling"),
            keep=(
                PrefixBudget(high=high, budget=budget, min_weight=min_weight, statistic=statistic, adaptive=adaptive),
            ),
        ),
        "Long responses, stale data: DPPO's mask, tighter for early tokens, and tighter the more the prefix has moved "
        "away. high 0.2 is for MoE models, 0.15 for dense ones; for statistic binary_kl 0.1, with budget 0.002. The "
        "loss is the paper's -(pi / mu) A on kept tokens.",
        citation=CPPO,
        objective={"policy_loss": GPG(unit_ratio=True), "mode": "bypass"},
    ),
    "paper/mu-grpo": Row(
        lambda low=1e-4: Correction(keep=(SuffixVeto(low=low),)),
        "Very stale rollouts, hundreds of steps on one batch: PPO's clip on pi / mu is [0, 5], and after a token that "
        "the policy now finds impossible nothing is pushed down. low: the ratio in the authors' example.",
        citation=MU_GRPO,
        objective={"policy_loss": PPOClip(low=1.0, high=4.0), "mode": "bypass"},
    ),
    # ---------------------------------------------------------------------------------------- losses that do it alone
    "paper/p3o": Row(
        lambda: Correction(),
        "Stale and replayed data without a clip to tune: the batch's own effective sample size caps pi / mu and says "
        "how strongly a KL pulls back to mu. It is taken over a micro-batch: make these large.",
        citation=P3O_PAPER,
        source_clamp=None,
        objective={"policy_loss": P3O(), "mode": "bypass"},
    ),
    "paper/fipo": Row(
        lambda: Correction(),
        "Long reasoning, several steps on a batch: at the first step every factor is 1 and this is PPO. It corrects no "
        "mismatch; add a weight for that. Factors within 0.2 of 1; the authors' 32B run has none below 1.",
        citation=FIPO_PAPER,
        formula="A f_t in the place of A, f_t = clip(exp(sum_{k >= t} 2^(-(k - t) / 32) log r_k), 0.8, 1.2)",
        objective={"policy_loss": FIPO()},
    ),
}


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
}


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

PRESETS: dict[str, Row] = {
    **METHODS,
    **RECOMMENDED,
    **{
        f"verl/{name}": replace(row, citation=f"verl 0.9.1, RolloutCorrectionConfig.{name}")
        for name, row in VERL.items()
    },
}
"""{name: row} of all presets."""


def groups() -> dict[str, list[str]]:
    """Preset names, grouped by the part before the slash; those without a slash come first."""
    found: dict[str, list[str]] = {}
    for name in sorted(PRESETS, key=lambda name: ("/" in name, name)):
        found.setdefault(name.rpartition("/")[0] or "general", []).append(name)
    return found


def names() -> list[str]:
    """The names of all presets, in alphabetical order."""
    return sorted(PRESETS)


def check_name(name: object, *, where: str, hint: str = "") -> None:
    """Raise unless ``name`` is a preset's.

    Args:
        name: what the user wrote.
        where: the field, for the message.
        hint: what to add to the message; empty = the closest names.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(
            f"{where} must be one of the {len(PRESETS)} presets that `trl-offpolicy presets` lists, but got {name!r}."
            f"{hint or near(str(name), PRESETS)}"
        )


def get(name: str, **options: object) -> Preset:
    """A preset by name.

    Raises:
        ValueError: an unknown name (the message lists near matches) or option.
    """
    check_name(name, where="preset")
    row = PRESETS[name]
    for option in options:
        if option not in row.defaults:
            known = list(row.defaults)
            raise ValueError(f"{option} is not an option of preset {name!r}, which has {known}.{near(option, known)}")
    return row.build(name, **options)
