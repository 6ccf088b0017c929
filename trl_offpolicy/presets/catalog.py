"""The table of named presets: published methods here, configurations of frameworks in ``recommended.py``.

A row holds the method as a function of its options; their names and defaults are read from its signature.
"""

from __future__ import annotations

from dataclasses import replace

from trl_offpolicy.checks import near
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
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    SuffixVeto,
    TruncateWeight,
)
from trl_offpolicy.objective.advantages import OPOB
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import CTPO, FIPO, GPG, P3O, TBPO, PPOClip, QuRL
from trl_offpolicy.objective.shaping import DiscrepancyPenalty, ZeroVariance
from trl_offpolicy.presets.frameworks import NAMES
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.presets.recommended import RECOMMENDED, VERL
from trl_offpolicy.presets.row import DEEPSEEK, DPPO, ICEPOP, Row

TIS = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
MIS = "Liu, Li et al. 2025, 'When speed kills stability: demystifying RL collapse from the training-inference mismatch'"
LOGIT_FUSION = "Zhang et al. 2026, 'Logit fusion'"
GEOMETRIC = "'A geometric view of off-policy sequence masking' 2026; " + MIS
KPOP = "Guo et al. 2026, KPop (ringtech.notion.site/kpop)"
CPPO = "Mao et al. 2026, CPPO, 'Beyond uniform token-level trust region in LLM RL' (arXiv:2606.10968)"
P3O_PAPER = "Fakoor et al. 2026, P3O, 'Trust the batch, on- or off-policy' (arXiv:2605.12380)"
FIPO_PAPER = "Ma et al. 2026, FIPO, 'Eliciting deep reasoning with future-KL' (arXiv:2603.19835)"
MU_GRPO = "Tian et al. 2026, mu-GRPO, 'How off-policy can GRPO be?' (arXiv:2605.17570)"
CTPO_PAPER = "Zhang et al. 2026, CTPO (arXiv:2605.07331); github.com/horizon-llm/CTPO"
VCPO = "Huang et al. 2026, VCPO (arXiv:2602.17616)"
ESS_OF_PRODUCTS = {"metric": "offpolicy/total/ess_sequence", "base": 1}
"""VCPO's signal for the learning rate: the products of ratios, not the length-free means that ``ess_step`` takes."""
QURL = "Li et al. 2026, QuRL, 'Efficient RL with quantized rollout' (arXiv:2602.13953)"
DCMDP = "Liu et al. 2026, DCMDP, 'Reformulate LLM RL under black-box discrepancy' (arXiv:2606.08779)"
SHADOW_MASK = (
    "Zhu et al. 2026, 'How to compress KV cache in RL post-training? Shadow Mask Distillation' (arXiv:2605.06850)"
)
JET_RL = "Xi et al. 2026, Jet-RL, 'Enabling on-policy FP8 RL with unified precision flow' (arXiv:2601.14243)"
QARL = "Gu et al. 2026, QaRL, 'Rollout-aligned quantization-aware RL' (arXiv:2604.07853)"
QERL = "Huang et al. 2025, QeRL, 'Quantization-enhanced RL for LLMs' (arXiv:2510.11696)"
GAC = "Xu et al. 2026, GAC, 'Stabilizing asynchronous RL training via gradient alignment control' (arXiv:2603.01501)"
ALP = "Ye et al. 2026, ALP, 'Adaptive layerwise perturbation' (arXiv:2603.19470)"
MIPU = "Liang et al. 2026, MIPU (arXiv:2606.29526)"
STALENESS = "Song, Xu et al. 2026, 'Staleness-learning rate scaling laws for asynchronous RLHF' (arXiv:2607.01083)"
DORA = "Hu et al. 2026, DORA, 'A scalable asynchronous RL system' (arXiv:2604.26256)"
PERIODIC = "Lu 2025, 'Periodic asynchrony: an on-policy approach' (arXiv:2511.18871)"
RL_ZVP = "Le et al. 2025, RL-ZVP, 'No prompt left behind' (arXiv:2509.21880), Eq. 5"

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
    "paper/vcpo": Row(
        lambda max_weight=5.0: make_preset(
            "paper/vcpo",
            Correction(weight=TruncateWeight(level="sequence", max_weight=max_weight)),
            citation=VCPO,
            notes="",
            advantages=OPOB(),
            trainer={"control": {"policy": "act", "controllers": {"ess_step": ESS_OF_PRODUCTS}}},
        ),
        "For stale rollouts: the learning rate follows the effective sample size of the products of ratios, and the "
        "baseline is the one of least variance under these weights. Needs the control of the trainer.",
        citation=VCPO,
        formula="w = min(prod_t pi_old / mu, C); learning rate times sqrt(ESS)",
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
    "paper/logit-fusion": Row(
        lambda max_weight=3.0: Correction(
            weight=TruncateWeight(level="token", max_weight=max_weight, ratio="current/sampling")
        ),
        "A teacher takes part in the rollouts (engine.logit_fusion). One ratio for the mixture and for staleness, "
        "capped from above alone: tokens that surprise the student keep their weight. There is no clip, because the "
        "teacher's share, which falls to 0, does its work.",
        citation=LOGIT_FUSION + ", mixed ratio with a single-side cap",
        formula="w_t = min(pi / pi_mix, C), and no other clip",
        objective={"policy_loss": GPG(), "mode": "bypass"},
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
    "paper/shadow-mask": Row(
        lambda kl_coef=0.1: make_preset(
            "paper/shadow-mask",
            Correction(),
            citation=SHADOW_MASK,
            notes="",
            kl=KLPenalty(coef=kl_coef),
            trainer={"learner_kv_cache": "engine", "kl_reference": "dense_context"},
        ),
        "For an engine that evicts keys and values (engine.kv_cache): the learner's forward repeats what its cache "
        "held, so no ratio is left to weigh, and is pulled towards its own full context. The paper's form of that term "
        "and its coefficient are not known here: KL(compressed || dense) on sampled tokens, and a starting point of "
        "this kit.",
        citation=SHADOW_MASK,
        formula="pi(y_t | kept context) for pi and mu alike, plus beta KL(pi(. | kept) || pi(. | whole))",
    ),
    "paper/jet-rl": Row(
        lambda: make_preset(
            "paper/jet-rl",
            Correction(),
            citation=JET_RL,
            notes="",
            trainer={"learner_rounding": "engine", "learner_kv_cache": "engine"},
        ),
        "One precision on both sides: the learner's forward rounds weights, keys and values as the engine does "
        "(engine.weight_rounding and engine.kv_cache, in simulation), so that nothing is left to correct. Activations "
        "and gradients are not rounded.",
        citation=JET_RL,
        formula="pi = pi_old = mu at the weights that sampled; no weight",
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
        citation="this kit; ESS as a control signal: " + VCPO,
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
    # ------------------------------------------------------------------------------------- what shapes the advantages
    "paper/dcmdp": Row(
        lambda coef=0.05, target=0.02, rate=1.0, max_coef=1.0: make_preset(
            "paper/dcmdp",
            Correction(),
            citation=DCMDP,
            notes="",
            shaping=(DiscrepancyPenalty(coef=coef, target=target, rate=rate, max_coef=max_coef),),
        ),
        "A mismatch that a policy can learn to avoid: tokens on which trainer and engine disagree cost something while "
        "their mean difference in probability is above the target, and nothing once it is below. Set the target to "
        "what the precision makes (mismatch/prob_diff_mean at the first steps) and a little more. It weighs nothing: "
        "add a weight for the mismatch that is left.",
    ),
    "paper/rl-zvp": Row(
        lambda correct_threshold=0.5, alpha=0.1: make_preset(
            "paper/rl-zvp",
            Correction(),
            citation=RL_ZVP,
            notes="",
            shaping=(ZeroVariance(correct_threshold=correct_threshold, alpha=alpha),),
        ),
        "Prompts that are too easy or too hard for the group's baseline: they learn by the entropy of their tokens. "
        "For rewards of 0 and 1. alpha is this kit's starting point. It corrects no mismatch; add a weight for that.",
    ),
    # ----------------------------------------------------------------- what acts beside the loss, set in the trainer
    "paper/gac": Row(
        lambda max_cosine=0.3: make_preset(
            "paper/gac",
            Correction(),
            citation=GAC,
            notes="",
            trainer={"control": {"policy": "act", "controllers": {}, "max_gradient_cosine": max_cosine}},
        ),
        "Asynchronous runs whose successive gradients stay aligned, which no divergence shows. The bound is this "
        "kit's; the paper's thresholds, and when it skips an update, are not known to us. It corrects no mismatch; add "
        "a weight for that.",
        formula="g <- g - (excess of cos(g, g_prev) over the bound, along g_prev)",
    ),
    "paper/staleness-ceiling": Row(
        lambda lag=1: make_preset(
            "paper/staleness-ceiling",
            Correction(),
            citation=STALENESS,
            notes="",
            trainer={"control": {"policy": "act", "controllers": {"staleness_ceiling": {"lag": lag}}}},
        ),
        "Stale rollouts: learning rate times lag stays what it was where you tuned the rate, at a version lag of `lag` "
        "optimizer steps. Needs an engine that samples ahead, or several steps on a batch. It corrects no mismatch; "
        "add a weight for that.",
        formula="learning rate times min(1, lag / S), S = the largest version lag of the last rows",
    ),
    "paper/mipu": Row(
        lambda growth=2.0: make_preset(
            "paper/mipu",
            Correction(),
            citation=MIPU,
            notes="",
            trainer={"control": {"policy": "act", "controllers": {"accept_update": {"growth": growth}}}},
            mode="bypass",
        ),
        "An update that is good for the trainer need not fit the engine: one ratio to the sampler makes it, and it is "
        "taken back if the engine disagrees with it much more than with those before. Needs a sync that is proved "
        "(vLLM or a server, engine.check_sync; Lightning: sync_check) and whole weights on each rank.",
        formula="PPO's clip on pi / mu; an update stays if its gap to the engine is at most growth times the usual one",
    ),
    "paper/alp": Row(
        lambda std=1e-3: make_preset(
            "paper/alp",
            Correction(),
            citation=ALP,
            notes="",
            trainer={"perturbation": {"std": std}},
            mode="bypass",
        ),
        "Ratios with heavy tails: noise on the hidden states of the forwards that learn flattens the policy, in the "
        "ratio above mu. Its size is learned by layer. Unit, bound and optimizer of the noise are this kit's.",
        formula="PPO's clip on pi_noisy / mu; h_l <- h_l + s_l rms(h_l) e in every layer, s_l learned",
    ),
    "paper/qarl": Row(
        lambda rounding="int4", max_weight=2.0: make_preset(
            "paper/qarl",
            Correction(weight=TruncateWeight(level="sequence_mean", max_weight=max_weight)),
            citation=QARL,
            notes="",
            trainer={"engine": {"weight_rounding": rounding}, "learner_rounding": "engine"},
            policy_loss=TBPO(),
            aggregation="seq_mean_token_mean",
        ),
        "Quantised rollouts: the trainer computes with the engine's rounded weights, so that both are one policy, with "
        "TBPO as the loss. An engine with quantised kernels of its own takes "
        "learner_rounding: fp8 (or its type) in place of engine.weight_rounding.",
        formula="s in its band, s = (prod_t pi / pi_old)^(1/T); w = min((prod_t pi_old / mu)^(1/T), C)",
    ),
    "paper/qerl": Row(
        lambda rounding="int4", start=1e-2, end=1e-4, stages=10, max_weight=2.0: make_preset(
            "paper/qerl",
            Correction(weight=TruncateWeight(level="token", max_weight=max_weight)),
            citation=QERL,
            notes="",
            trainer={
                "engine": {
                    "weight_rounding": rounding,
                    "norm_noise": {"start": start, "end": end, "stages": stages},
                }
            },
        ),
        "Exploration by the noise of a quantised engine, and by noise on its norms that falls over the run. Needs vLLM "
        "in the trainer's process. 4-bit weights are simulated, and the correction is this kit's: the paper's code "
        "compares the learner with itself.",
        formula="mu = the policy of int4 weights with noisy norms; w_t = min(pi_old / mu, C)",
    ),
    "paper/dora": Row(
        lambda lag=2: make_preset(
            "paper/dora",
            Correction(),
            citation=DORA,
            notes="",
            trainer={"async_rollouts": {"lag": lag, "partial": "keep"}, "engine": {"transfer": "adapter"}},
        ),
        "Rollouts of several versions at a time, each response of one version. Needs LoRA and a server that you start: "
        "trl-offpolicy serve --lora-rank R -- --max-loras lag+1. The paper does so with whole models. It corrects "
        "neither lag nor mismatch; add a weight for that.",
        formula="every response of one version, at most lag generations behind",
    ),
    "paper/periodic-async": Row(
        lambda: make_preset(
            "paper/periodic-async",
            Correction(),
            citation=PERIODIC,
            notes="",
            trainer={"async_rollouts": 0},
            aggregation="seq_mean_token_mean",
        ),
        "Sampling and learning overlap although nothing is stale. Needs a server that you start, and several "
        "generations in an optimizer step (TRL: steps_per_generation 1 with gradient_accumulation_steps 8; Lightning: "
        "accumulate_grad_batches 8). It corrects no mismatch; add a weight for that.",
        formula="every response of the weights that learn, requested at once for the whole step",
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
    "paper/minpro-policy": Row(
        lambda: Correction(weight=PrefixMinWeight(ratio="current/sampling")),
        "MinPRO in the policy ratio, mismatch and staleness in one. Detached, without a clip: the paper's own trust "
        "region is not known to us. paper/minpro is the same minimum as a weight on pi_old / mu beside PPO's clip.",
        citation="Lei et al. 2026, MinPRO (arXiv:2601.22718)",
        objective={"policy_loss": GPG(), "mode": "bypass"},
    ),
    "paper/ctpo-clip": Row(
        lambda low=0.025, high=0.05, dual_clip=0.05: make_preset(
            "paper/ctpo-clip",
            Correction(),
            citation=CTPO_PAPER,
            notes="",
            policy_loss=CTPO(low=low, high=high, dual_clip=dual_clip),
        ),
        "CTPO as published: it acts on staleness, in the policy ratio. Long responses, several steps on a batch. It "
        "corrects no mismatch; add a weight for that, or take paper/ctpo, which is the same idea as such a weight.",
        formula="r_1:t = prod_{s <= t} pi / pi_old, in PPO's clip at exp(-low sqrt(t)) and exp(high sqrt(t))",
    ),
    "paper/qurl": Row(
        lambda max_weight=2.0, low=0.2, high=0.2: make_preset(
            "paper/qurl",
            Correction(weight=TruncateWeight(level="token", max_weight=max_weight)),
            citation=QURL,
            notes="",
            policy_loss=QuRL(low=low, high=high, max_weight=max_weight),
        ),
        "Quantised rollouts over a long training: TIS, and PPO's upper clip opens where TIS cuts. It matters once "
        "weights are cut and several steps are made on a batch; before that it is paper/tis. Update-aware quantisation "
        "is not here.",
        formula="w_t = min(rho_t, C), and PPO's upper clip at (1 + high) max(1, rho_t / C)",
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
        hint = hint or (_family(name.lower()) if isinstance(name, str) else "")
        raise ValueError(
            f"{where} must be one of the {len(PRESETS)} presets that `trl-offpolicy presets` lists, but got {name!r}."
            f"{hint or near(str(name), PRESETS)}"
        )


def _family(name: str) -> str:
    """What to write in place of a family's or a framework's name; empty text for any other name."""
    hints = []
    if name in groups():
        hints.append(f" It is a family of presets, which `trl-offpolicy presets {name}` lists.")
    if name in NAMES:
        hints.append(f" Options in {name}'s own names: offpolicy: {{framework: {name}, options: {{...}}}}.")
    return "".join(hints)


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
