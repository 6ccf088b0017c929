"""The numeric rules of the sources: what each says, a log on either side of its limit, and the verdict.

``draw_diagnosis.py`` writes the tables of docs/diagnosis.md from it, and ``tests/diagnosis/verdict/test_sources.py``
asks the doctor for the verdict of each log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Value = float | None | tuple[float | None, ...]
"""A number for every logged step; a tuple is spread evenly over the steps; None = not logged."""
LIU = "Liu 2026, Off-Policy Drift in LLM RL"
YAO = "Yao et al. 2025, Your Efficient RL Framework"
AREAL = "Off-Policy Corrections in LLM RL Training (after AReaL)"
SKYRL = "SkyRL documentation"
GAC = "Xu et al. 2026, GAC (named by Liu 2026)"
GEOMETRIC = "A geometric view of off-policy sequence masking"


class Rule(NamedTuple):
    """One rule.

    Args:
        source: where it is from.
        rule: what it says.
        limits: fields of ``Thresholds`` that hold its numbers.
        inside: metrics of a log that keeps it, beside healthy ones.
        beyond: metrics of a log that breaks it.
        verdict: the finding, ``cause severity``.
        otherwise: the finding of ``inside``, where a weaker rule is broken there already; empty = ok.
        steps: logged steps.
    """

    source: str
    rule: str
    limits: tuple[str, ...]
    inside: Mapping[str, Value]
    beyond: Mapping[str, Value]
    verdict: str
    otherwise: str = ""
    steps: int = 12


def one(
    source: str, rule: str, limit: str, metric: str, inside: float, beyond: float, verdict: str, otherwise: str = "",
    **beside: Value,
) -> Rule:  # fmt: skip
    """A rule about one metric; ``beside``: other metrics of both logs, with ``__`` for ``/``."""
    others = {name.replace("__", "/"): value for name, value in beside.items()}
    return Rule(source, rule, (limit,), others | {metric: inside}, others | {metric: beyond}, verdict, otherwise)


_PEARSON, _CHI2, _KL = "mismatch/prob_pearson", "mismatch/chi2_token", "mismatch/kl_k3"
_OFF, _BROKEN = "engine_mismatch notice", "engine_mismatch critical"
_STALE, _REJECT, _BEYOND = "policy_staleness notice", "rejection_limit warning", "correction_limit critical"
_DRIFT, _VARIANCE = "token_drift warning", "weight_variance critical"
_RESPONSES, _TOKENS = "keep/dropped_sequence_fraction", "keep/dropped_token_fraction"
_NO_MEAN = {_KL: None, _PEARSON: None}
_BAND, _NOISE, _WEIGHTED = "weight/truncated_fraction", "gradient/noise", "weight_applied/mean"

RULES = (
    one(LIU, "Pearson at least 0.99: nothing is wrong", "pearson_healthy", _PEARSON, 0.992, 0.985, _OFF),
    one(LIU, "Pearson below 0.95: the engine is at fault", "pearson_broken", _PEARSON, 0.955, 0.94, _BROKEN, _OFF),
    one(LIU, "KL below 0.02: nothing is wrong", "kl_healthy", _KL, 0.019, 0.022, _OFF),
    one(LIU, "KL above 0.05 at equal weights: the engine is at fault", "kl_high", _KL, 0.048, 0.053, _BROKEN, _OFF),
    one(LIU, "perplexity ratio far from 1", "log_ppl_high", "mismatch/log_ppl_diff", 0.09, 0.12,
        "engine_mismatch warning"),
    one(LIU, "perplexity ratio below 1: a systematic gap", "ppl_ratio_low", "mismatch/ppl_ratio", 0.995, 0.97, _OFF),
    one(LIU, "the largest probability difference is not averaged away", "prob_diff_high", "mismatch/prob_diff_max",
        0.45, 0.6, _OFF),
    Rule(LIU, "... also where no mean was logged", ("prob_diff_high",), {**_NO_MEAN, "mismatch/prob_diff_max": 0.45},
         {**_NO_MEAN, "mismatch/prob_diff_max": 0.6}, "engine_mismatch warning"),
    one(LIU, "KL that rises only under lag: staleness", "kl_healthy", "total/kl_k3", 0.019, 0.022, _STALE,
        rollout__version_lag_mean=2.0),
    one(LIU, "... and above 0.05", "kl_high", "total/kl_k3", 0.048, 0.053, "policy_staleness warning", _STALE,
        rollout__version_lag_mean=2.0),
    one(LIU, "token chi-square above 0.3 with an ESS of at least 0.5: moderate drift", "chi2_moderate", _CHI2,
        0.28, 0.33, _DRIFT),
    one(LIU, "token chi-square above 1: weights blow up", "chi2_high", _CHI2, 0.95, 1.1, _VARIANCE, _DRIFT),
    one(LIU, "sequence chi-square explodes", "chi2_sequence_high", "mismatch/chi2_sequence", 9.0, 12.0,
        "sequence_variance notice"),
    one(LIU, "ESS below 0.5: weights blow up", "ess_healthy", "weight_applied/ess_token", 0.53, 0.47, _VARIANCE),
    one(LIU, "rejection alone while token chi-square is below 2", "chi2_reject", _CHI2, 1.9, 2.2,
        f"{_VARIANCE}, {_REJECT}", _VARIANCE),
    one(LIU, "rejection with token weights up to 4, then a systems fix", "chi2_systems", _CHI2, 3.8, 4.3, _BEYOND,
        f"{_VARIANCE}, {_REJECT}"),
    one(LIU, "rejection alone while less than a tenth of the responses is dropped", "dropped_high", _RESPONSES,
        0.09, 0.12, _REJECT),
    one(LIU, "systems fix where more than a quarter of the responses is dropped", "dropped_broken", _RESPONSES,
        0.23, 0.6, _BEYOND, _REJECT),
    one(LIU, "the same of tokens", "dropped_broken", _TOKENS, 0.23, 0.27, _BEYOND, _REJECT),
    one(LIU, "systems fix where the ESS stays below 0.3 under rejection", "ess_broken", "weight_applied/ess_token",
        0.32, 0.28, _BEYOND, _VARIANCE, keep__dropped_token_fraction=0.05),
    one(LIU, "IcePop's mask rate above a tenth", "dropped_high", _BAND, 0.09, 0.12, _REJECT, weight_applied__min=0.0),
    one(LIU, "IcePop's mask rate above a quarter: the limit of correction", "dropped_broken", _BAND, 0.23, 0.4, _BEYOND,
        _REJECT, weight_applied__min=0.0),
    one(LIU, "a high truncated fraction: severe mismatch", "dropped_high", _BAND, 0.08, 0.15, "weight_variance notice",
        weight_applied__min=0.1),
    one(LIU, "a mean weight far from 1: systematic bias", "weight_off", "weight/mean", 1.1, 1.3, _OFF),
    Rule(LIU, "proxy3_pure_noise rises after weights are switched on", ("noise_rising",),
         {_NOISE: (1.0, 2.0), _WEIGHTED: (None, 1.0)}, {_NOISE: (1.0, 10.0), _WEIGHTED: (None, 1.0)},
         "weight_variance warning", steps=40),
    Rule(LIU, "proxy3_pure_noise inflates over training", ("noise_rising",), {_NOISE: (1.0, 2.0)},
         {_NOISE: (1.0, 10.0)}, "weight_variance notice", steps=40),
    Rule(LIU, "clip fraction above 0.2", ("clip_high",), {"loss/clip_region_fraction": 0.19},
         {"loss/clip_region_fraction": 0.22}, "clip_saturation notice"),
    Rule(LIU, "... and rising", ("clip_rising",), {"loss/clip_region_fraction": (0.3, 0.31)},
         {"loss/clip_region_fraction": (0.28, 0.35)}, "clip_saturation warning", "clip_saturation notice"),
    one(LIU, "responses 20 % longer than 100 steps before", "length_surge", "rollout/length_surge", 1.18, 1.25,
        "length_surge critical"),
    one(LIU, "total variation moderate, chi-square low: token weights or geometric rejection", "tv_moderate",
        "mismatch/tv", 0.075, 0.09, "token_drift notice"),
    Rule(LIU, "collapse: the reward falls by 30 % and does not recover in 100 updates",
         ("reward_drop", "reward_drop_steps"), {"reward": (1.0, 0.8)}, {"reward": (1.0, 0.6)}, "collapse warning",
         steps=300),
    Rule(LIU, "collapse: a gradient norm ten times its rolling median, then a falling reward", ("gradient_spike",),
         {"grad_norm": (1.0, 1.0, 1.0, 1.0, 1.0, 8.0, 1.0, 1.0), "reward": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9)},
         {"grad_norm": (1.0, 1.0, 1.0, 1.0, 1.0, 12.0, 1.0, 1.0), "reward": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9)},
         "collapse warning", steps=48),
    one(LIU, "router flip rate below 0.001 an expert needs no correction", "expert_flip_high",
        "routing/expert_flip_mean", 9e-4, 2e-3, "routing notice"),
    one(LIU, "routers that flip (no number): a tenth of the token-layers", "flip_high", "routing/flip_fraction",
        0.09, 0.3, "routing warning"),
    one(GAC, "successive gradients near orthogonal; persistently aligned under staleness", "cosine_high",
        "gradient/cosine_previous", 0.25, 0.9, _STALE),
    Rule(GAC, "... and a queue that holds rollouts back", ("cosine_high",),
         {"gradient/cosine_previous": 0.25, "rollout/version_lag_mean": 2.0, "rollout/version_lag_max": 2.0},
         {"gradient/cosine_previous": 0.9, "rollout/version_lag_mean": 2.0, "rollout/version_lag_max": 2.0},
         "policy_staleness warning"),
    one(YAO, "a token's probabilities differ by more than 0.5", "prob_diff_high", "mismatch/prob_diff_max", 0.48, 1.0,
        _OFF),
    Rule(YAO, "entropy falls below 0.2", ("entropy_low", "entropy_fallen"), {"loss/entropy": (1.0, 0.22, 0.22, 0.22)},
         {"loss/entropy": (1.0, 0.05, 0.05, 0.05)}, "entropy_collapse notice", steps=40),
    Rule(YAO, "... and still falls", ("entropy_falling",), {"loss/entropy": (1.0, 1.0, 0.15, 0.149)},
         {"loss/entropy": (1.0, 1.0, 0.15, 0.1)}, "entropy_collapse warning", "entropy_collapse notice", steps=40),
    Rule(YAO, "KL k1 of the trainer is frequently negative", ("k1_negative", "k1_negative_share"),
         {"staleness/kl_k1": (0.004, -0.002, 0.004)}, {"staleness/kl_k1": (-0.004, 0.002, -0.004)}, _OFF),
    Rule(YAO, "the logged reward is not the learner's", ("reward_gap",),
         {"reward": 0.5, "rollout/reward_reweighted": 0.47}, {"reward": 0.5, "rollout/reward_reweighted": 0.4},
         "biased_reward notice"),
    one(YAO, "abnormally long responses", "length_surge", "rollout/length_surge", 1.15, 1.3, "length_surge critical"),
    one(SKYRL, "a token's ratio beyond 100", "logp_diff_outlier", "mismatch/logp_diff_max", 4.4, 9.0, _OFF),
    one(AREAL, "staleness of at most 8 with decoupled PPO", "lag_high", "rollout/version_lag_max", 8.0, 50.0, _STALE),
    Rule(AREAL, "PPO without a correction collapsed at a staleness of 4", ("lag_uncorrected",),
         {"rollout/version_lag_mean": 3.0, "rollout/version_lag_max": 3.0},
         {"rollout/version_lag_mean": 4.0, "rollout/version_lag_max": 4.0}, "policy_staleness warning"),
)  # fmt: skip
"""Every rule with a symptom that a log shows."""

ELSEWHERE = (
    (LIU, "total variation and chi-square both low, moderate and low, low and high, both high",
     "`verdict/sga.py`: nothing, token weights or geometric rejection, truncation or masks by response, repair"),
    (LIU, "no correction is needed below a total variation of 1e-4 (95th percentile), a sequence chi-square of 0.1 "
     "and a flip rate of 0.001 (conjecture 4)", "anti-pattern; `tv_budget`, `chi2_budget`, `expert_flip_high`"),
    (LIU, "lag of at most 50 times the sequence ESS for losses that regress on the lagged policy (conjecture 5)",
     "anti-pattern, for `OAPL`; `lag_per_ess`"),
    (LIU, "five diagnostic mistakes, and the length trap", "anti-patterns; `length_trap`"),
    (GEOMETRIC, "0.1 % a token is a factor of 7.4 over 2,000 tokens: product bounds drop long responses",
     "anti-pattern; `length_trap`"),
    (LIU, "escalation from rejection to weights to a systems fix", "`control: {controllers: [escalation]}`"),
    (LIU, "halve the learning rate at a length surge", "`control: {controllers: [length_guard]}`"),
)  # fmt: skip
"""Rules that something else than the tree reads: source, rule, where."""

UNREAD = (
    (LIU, "`vf_explained_var` is low", "GRPO has no value function, and the source gives no number"),
    (LIU, "bias and variance frontier; bias of routers; AUROC of a predictor (conjectures 1 to 3)",
     "experiments, no symptom of a run"),
    (LIU, "caps of 1.5 to 5 by token and 2 to 10 by response; bands 0.5 to 5 and 0.99 to 1.01",
     "settings: the defaults of the presets"),
    (AREAL, "a cap of 10 to 100; staleness of 4 for code (8 for mathematics)",
     "settings; `--threshold lag_high=4` takes the stricter one"),
    (AREAL, "replay of routes: none at one update, R2 at 2, R3 from 4 on", "settings: [moe.md](moe.md)"),
    (SKYRL, "token cap 2, sequence cap 5, geometric mask 0.99 to 1.01, outliers 1e-4 to 100", "settings: `skyrl/*`"),
    (YAO, "a ratio of 16 makes the noise of a token 256 times as large, 4 times with a cap of 2",
     "arithmetic; chi-square and ESS measure it"),
)  # fmt: skip
"""Rules that nothing reads: source, rule, why."""
