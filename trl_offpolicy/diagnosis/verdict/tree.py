"""The decision tree as data: which symptom leads to which cause, in the order in which they are tested.

A branch is taken if any of its symptoms holds and none of its exceptions does; of the branches that lead to one cause
the most severe ones count. Metrics are named without their
``offpolicy/`` prefix, thresholds by their field in :class:`~trl_offpolicy.diagnosis.thresholds.Thresholds`.
Source: Liu 2026, "Off-Policy Drift in LLM RL", section "Diagnosing and fixing off-policy drift: a decision tree".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trl_offpolicy.diagnosis.thresholds import Thresholds

Severity = Literal["ok", "notice", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("ok", "notice", "warning", "critical")
NOT_JUDGED: Literal["not judged"] = "not judged"
Verdict = Literal["not judged", "ok", "notice", "warning", "critical"]
"""A severity, or that no distance between sampler and trainer was logged and nothing else was found."""
Readings = Mapping[str, float]
"""Metric name without ``offpolicy/`` -> value over the window that is judged; finite. ``<metric>_ci95`` is the
half-width of the 95 % interval of that value. Beside the logged ones there are numbers that follow from them:

- ``rising/<metric>``, ``falling/<metric>``: last half of the window over its first half;
- ``floor/kl_k3``: times the noise floor; ``lagged/kl_k3``: of current/sampling, only under version lag;
- ``alone/<ratio>/kl_k1``, ``atleast/<ratio>/kl_k3``, ``atmost/<ratio>/kl_k3``: where KL k3 was not logged, KL k1, or
  bounds of k3 from the mean and the largest |log-ratio|; ``negative/<ratio>/kl_k1``: share of steps with a negative k1;
- ``drift/tv``: total variation of current/sampling, else of old/sampling;
- ``rejecting/ess``: only where something is dropped; ``one_term/dropped_fraction``: if only single terms were logged;
  ``zeroed/weight``, ``capped/weight``: share of weights outside a band, at a cap; ``off/weight_mean``: |mean - 1|,
  ``capped/weight_mean``: the same after cap and masks, where only that was logged;
- ``close/<metric>``: a maximum over tokens where KL k3 and correlation are known to be healthy, ``lone/<metric>``:
  where only a small mean |log-ratio| is, else ``open/<metric>``;
- ``equal/<metric>``: of current/sampling at version lag 0, ``undivided/<metric>``: where neither lag nor the old policy
  was logged; ``known/distances``: 1 if a distance and the clipping were logged;
- ``queue/version_lag``: lag beyond that of several steps on one generation; ``uncorrected/version_lag``: the same, only
  where nothing is weighted or dropped; ``late/gradient_cosine``: the cosine, only under such a lag;
- ``growth/gradient_noise``: over what it was; ``weighted/gradient_noise``: over what it was without weights;
- ``measured/entropy``: over the steps that measured it; ``gap/reward``: engine's against trainer's;
- what :mod:`~.course` compares with earlier steps: ``fallen/*``, ``growth/*``, ``collapse/*``, ``learning/*``,
  ``holds/reward``, ``regained/reward``, ``still/*``, ``gained/reward``."""
INTERVAL = "_ci95"
CONFIDENT = "mismatch/confident_disagreement_fraction"
"""Share of tokens that the engine gave at least half and the trainer more than 2 nats less, at version lag 0."""
APPLIED_ESS = ("weight_applied/ess_token", "weight_applied/ess_sequence")
"""``rejecting/ess``, where anything is dropped, is the smallest of these. Not that of the products over responses
(``kept/ess_sequence``): a mean ratio of 1.01, which a geometric mask lets pass, is a product of e^4 over 400 tokens."""


@dataclass(frozen=True)
class Symptom:
    """``metric sign threshold``, e.g. ``mismatch/prob_pearson < pearson_broken``; ``label`` is its name for people."""

    metric: str
    sign: Literal["<", ">"]
    threshold: str | float
    label: str

    def limit(self, thresholds: Thresholds) -> float:
        """The number to compare the metric with: the threshold itself, or the field of that name."""
        return self.threshold if isinstance(self.threshold, float) else float(getattr(thresholds, self.threshold))

    def holds(self, readings: Readings, thresholds: Thresholds) -> bool:
        """True if the metric is beyond the limit, by more than the half-width of its 95 % interval if there is one.

        False if the metric was not logged.
        """
        value = readings.get(self.metric)
        if value is None:
            return False
        limit, half_width = self.limit(thresholds), readings.get(f"{self.metric}{INTERVAL}", 0.0)
        return value + half_width < limit if self.sign == "<" else value - half_width > limit


@dataclass(frozen=True)
class Step:
    """A branch: any of ``any_of`` leads to ``cause`` if all of ``all_of`` hold and none of ``unless`` does.

    ``instead`` takes the place of the cause's fix and settings where nothing is to be changed yet. What is ``given``
    must hold as well, but is no symptom: it chooses the words.
    """

    cause: str
    severity: Severity
    any_of: tuple[Symptom, ...]
    all_of: tuple[Symptom, ...] = ()
    unless: tuple[Symptom, ...] = ()
    given: tuple[Symptom, ...] = ()
    instead: str = ""

    def taken(self, readings: Readings, thresholds: Thresholds) -> tuple[Symptom, ...]:
        """The symptoms that lead here; empty if the branch is not taken."""
        if any(one.holds(readings, thresholds) for one in self.unless):
            return ()
        if not all(one.holds(readings, thresholds) for one in (*self.all_of, *self.given)):
            return ()
        found = tuple(one for one in self.any_of if one.holds(readings, thresholds))
        return found + self.all_of if found else ()


def _of_one_token(how: str) -> tuple[Symptom, ...]:
    of_probabilities, of_logps = "largest difference of a token's probabilities", "largest |log-ratio| of a token"
    return (
        Symptom(f"{how}/mismatch/prob_diff_max", ">", "prob_diff_high", of_probabilities),
        Symptom(f"{how}/mismatch/logp_diff_max", ">", "logp_diff_outlier", of_logps),
    )


_PEARSON, _KL = "mismatch/prob_pearson", "mismatch/kl_k3"
_AT_FLOOR = Symptom("floor/kl_k3", "<", "floor_factor", "KL k3 over its noise floor")
_NOISY = Symptom("noise_floor/kl_k3", ">", "kl_high", "KL k3 of the trainer against itself")
_ESS_LOW = Symptom("weight_applied/ess_token", "<", "ess_healthy", "ESS of the applied token weights")
_ESS_LOW_SEQUENCE = Symptom("weight_applied/ess_sequence", "<", "ess_healthy", "ESS of the responses' applied weights")
_CHI2_HIGH = Symptom("mismatch/chi2_token", ">", "chi2_high", "token chi-square")
_VARIANCE = (
    _ESS_LOW,
    _ESS_LOW_SEQUENCE,
    _CHI2_HIGH,
    Symptom("total/chi2_token", ">", "chi2_high", "token chi-square of current/sampling"),
)
_BEYOND = (
    Symptom("mismatch/chi2_token", ">", "chi2_systems", "token chi-square"),
    Symptom("total/chi2_token", ">", "chi2_systems", "token chi-square of current/sampling"),
    Symptom("keep/dropped_sequence_fraction", ">", "dropped_broken", "share of responses dropped"),
    Symptom("keep/dropped_token_fraction", ">", "dropped_broken", "share of tokens dropped"),
    Symptom("one_term/dropped_fraction", ">", "dropped_broken", "share dropped by one term"),
    Symptom("zeroed/weight", ">", "dropped_broken", "share of weights that a band set to 0"),
    Symptom("rejecting/ess", "<", "ess_broken", "ESS under rejection"),
)
_ENGINE = (
    Symptom(_PEARSON, "<", "pearson_broken", "correlation of the two probabilities"),
    Symptom(_KL, ">", "kl_high", "KL k3 at equal weights"),
    Symptom("alone/mismatch/kl_k1", ">", "kl_high", "KL k1 at equal weights"),
    Symptom("atleast/mismatch/kl_k3", ">", "kl_high", "KL k3 at equal weights, at least"),
    Symptom("equal/kl_k3", ">", "kl_high", "KL k3 of current/sampling at version lag 0"),
    Symptom("equal/prob_pearson", "<", "pearson_broken", "correlation of the two probabilities at version lag 0"),
)
_UNDIVIDED = (
    Symptom("undivided/kl_k3", ">", "kl_high", "KL k3 of current/sampling, of rollouts whose age was not logged"),
    Symptom("undivided/prob_pearson", "<", "pearson_broken", "correlation of the two probabilities, of any age"),
)
_ENGINE_FAR = (
    Symptom("mismatch/log_ppl_diff", ">", "log_ppl_high", "log perplexity ratio"),
    Symptom("mismatch/-log_ppl_diff", ">", "log_ppl_high", "negative log perplexity ratio"),
    *_of_one_token("open"),
)
_MOVED = "KL k3 between the sampling and the current weights"
_GROWS = Symptom("growth/mismatch", ">", "mismatch_growth", "distance of engine and trainer over that of the start")
_ENGINE_NEAR = (
    Symptom(_PEARSON, "<", "pearson_healthy", "correlation of the two probabilities"),
    Symptom(_KL, ">", "kl_healthy", "KL k3 at equal weights"),
    Symptom("alone/mismatch/kl_k1", ">", "kl_healthy", "KL k1 at equal weights"),
    Symptom("atleast/mismatch/kl_k3", ">", "kl_healthy", "KL k3 at equal weights, at least"),
    Symptom("equal/kl_k3", ">", "kl_healthy", "KL k3 of current/sampling at version lag 0"),
    Symptom("equal/prob_pearson", "<", "pearson_healthy", "correlation of the two probabilities at version lag 0"),
    Symptom("mismatch/ppl_ratio", "<", "ppl_ratio_low", "perplexity ratio, which chance puts above 1"),
    Symptom("negative/mismatch/kl_k1", ">", "k1_negative_share", "share of steps with a negative KL k1"),
    Symptom("negative/staleness/kl_k1", ">", "k1_negative_share", "share of steps with a negative KL k1"),
    Symptom("off/weight_mean", ">", "weight_off", "distance of the mean weight from 1"),
    Symptom(CONFIDENT, ">", "confident_high", "share of tokens that the engine is sure of and the trainer not"),
    _GROWS,
)
_STALE = (
    Symptom("staleness/kl_k3", ">", "kl_high", _MOVED),
    Symptom("lagged/kl_k3", ">", "kl_high", "KL k3 of current/sampling under version lag"),
    Symptom("alone/staleness/kl_k1", ">", "kl_high", "KL k1 between the sampling and the current weights"),
    Symptom("alone/total/kl_k1", ">", "kl_high", "KL k1 of current/sampling"),
    Symptom("atleast/staleness/kl_k3", ">", "kl_high", f"{_MOVED}, at least"),
    Symptom("uncorrected/version_lag", ">", "lag_uncorrected", "lag of a queue that nothing corrects"),
    Symptom("late/gradient_cosine", ">", "cosine_high", "cosine of successive gradients under lag"),
)
_NOISE_OF_WEIGHTS = Symptom("weighted/gradient_noise", ">", "noise_rising", "gradient noise over that without weights")
_NOISE_GROWS = Symptom("growth/gradient_noise", ">", "noise_rising", "gradient noise over what it was")
_AT_CAP = Symptom("capped/weight", ">", "dropped_high", "share of weights at the cap")
_FLIPS = Symptom("routing/flip_fraction", ">", "flip_high", "share of routed token-layers with other experts")
_ENTROPY = Symptom("measured/entropy", "<", "entropy_low", "entropy of the next token")
_ENTROPY_FELL = Symptom("fallen/entropy", "<", "entropy_fallen", "over that of the start")
_ENTROPY_LOST = replace(_ENTROPY_FELL, threshold="entropy_lost")
_ENTROPY_FALLS = Symptom("falling/loss/entropy", "<", "entropy_falling", "its last half over its first half")
_ENTROPY_GOES = (_ENTROPY_LOST, _ENTROPY_FALLS)
_CLOSE = (
    Symptom(_KL, "<", "kl_healthy", "KL k3 of engine and trainer"),
    Symptom("total/kl_k3", "<", "kl_healthy", "KL k3 of current/sampling"),
)
_TOTAL_FAR = Symptom("total/kl_k3", ">", "kl_healthy", "KL k3 of current/sampling")
_NO_ENGINE = (
    "Engine and trainer agree, so no correction mends it: halve the learning rate, or give the loss an entropy bonus "
    "(offpolicy: {objective: {entropy_coef: 0.001}}). A task that is solved has a low entropy too: look at the reward."
)
_SURGE = Symptom("rollout/length_surge", ">", "length_surge", "response length over that of 100 steps before")
_CUT = Symptom("growth/cut", ">", "cut_rising", "share of responses cut at the length limit less that of then")
LEARNS = Symptom("learning/reward_gain", ">", 0.0, "gain of the reward in these steps")
_KNOWN_SANE = Symptom("known/distances", ">", 0.0, "KL and clipping logged, and healthy")
_HOLDS = Symptom("holds/reward", ">", 0.0, "reward still at its best")
_STILL = (
    Symptom("still/gradient", ">", "signal_lost", "share of steps whose gradient norm is 0"),
    Symptom("still/rewards", ">", "signal_lost", "share of groups with equal rewards"),
    Symptom("still/advantages", ">", "signal_lost", "share of steps whose advantages are all 0"),
)
_GAINED = Symptom("gained/reward", ">", 0.0, "gain of the reward since the start")
_COLLAPSE = (
    Symptom("collapse/gradient_spike", ">", "gradient_spike", "gradient norm over the median before it"),
    Symptom("collapse/entropy_rise", ">", "entropy_rising", "entropy over that of the start, while the reward fell"),
    Symptom("collapse/length_left", "<", "length_left", "response length over the longest before"),
)
_CLIP = Symptom("loss/clip_region_fraction", ">", "clip_high", "share of clipped units")
_CLIP_RISES = Symptom("rising/loss/clip_region_fraction", ">", "clip_rising", "its last half over its first half")

_ENGINE_STEPS = (
    # 1. agreement of rollout and trainer at the same weights
    Step("engine_mismatch", "critical", _ENGINE, unless=(_AT_FLOOR,)),
    # the engine, or rollouts that are old: the log does not say which
    Step(
        "engine_mismatch",
        "warning",
        _UNDIVIDED,
        unless=_ENGINE,
        instead="Find out first which it is: log the age of the rollouts and the log-probs of the old policy "
        "(offpolicy/mismatch and staleness of this kit), or compare engine and trainer at one set of weights with "
        "trl-offpolicy probe. Between equal weights it is the engine's precision or settings; else train on fewer "
        "steps per generation.",
    ),
    Step("engine_mismatch", "warning", (*_ENGINE_FAR, replace(_GROWS, threshold=30.0)), unless=(_AT_FLOOR, *_ENGINE)),
    Step(
        "engine_mismatch",
        "notice",
        _ENGINE_NEAR,
        unless=(_AT_FLOOR, *_ENGINE, *_ENGINE_FAR),
    ),
    # a mixture of experts or a long run meets such a token now and then while all others agree
    Step(
        "engine_mismatch",
        "notice",
        _of_one_token("close"),
        unless=(_AT_FLOOR, *_ENGINE, *_ENGINE_FAR, *_ENGINE_NEAR),
        instead="Nothing yet: KL k3 and the correlation are healthy. Look at the worst tokens of the report; a "
        "mixture of experts, or many tokens, has such a one now and then.",
    ),
    Step(
        "engine_mismatch",
        "notice",
        _of_one_token("lone"),
        unless=(_AT_FLOOR, *_ENGINE, *_ENGINE_FAR, *_ENGINE_NEAR),
        instead="Nothing yet: on average the tokens differ by no more than rounding. Whether such ones are rare, KL k3 "
        "tells, and which they are, recorded rollouts: trl_offpolicy.attach measures both in a run of TRL, and "
        "trl-offpolicy probe without one.",
    ),
    # the trainer against itself: a floor that is a fault of its own, which would hide all others
    Step("dropout", "critical", (_NOISY,)),
    Step(
        "dropout",
        "warning",
        (Symptom("noise_floor/kl_k3", ">", "kl_healthy", "KL k3 of the trainer against itself"),),
        unless=(_NOISY,),
    ),
    Step("routing", "warning", (_FLIPS,)),
    Step(
        "routing",
        "notice",
        (Symptom("routing/expert_flip_mean", ">", "expert_flip_high", "mean rate at which an expert differs"),),
        unless=(_FLIPS,),
    ),
    Step("biased_reward", "notice", (Symptom("gap/reward", ">", "reward_gap", "logged reward against the trainer's"),)),
)
_STALENESS_STEPS = (
    # 2. agreement is sane: how far the weights have moved since
    Step("policy_staleness", "warning", _STALE),
    Step(
        "policy_staleness",
        "notice",
        (
            Symptom("staleness/kl_k3", ">", "kl_healthy", _MOVED),
            Symptom("lagged/kl_k3", ">", "kl_healthy", "KL k3 of current/sampling under version lag"),
            Symptom("alone/staleness/kl_k1", ">", "kl_healthy", "KL k1 between the sampling and the current weights"),
            Symptom("alone/total/kl_k1", ">", "kl_healthy", "KL k1 of current/sampling"),
            Symptom("atleast/staleness/kl_k3", ">", "kl_healthy", f"{_MOVED}, at least"),
            Symptom("rollout/version_lag_max", ">", "lag_high", "age of the oldest token in optimizer steps"),
            Symptom("gradient/cosine_previous", ">", "cosine_high", "cosine of successive gradients"),
        ),
        unless=_STALE,
    ),
)
_DRIFT_STEPS = (
    # 3. drift exists: what it does to the weights
    Step(
        "token_drift",
        "warning",
        (
            Symptom("mismatch/chi2_token", ">", "chi2_moderate", "token chi-square"),
            Symptom("total/chi2_token", ">", "chi2_moderate", "token chi-square of current/sampling"),
        ),
        unless=_VARIANCE,
    ),
    Step(
        "token_drift",
        "notice",
        (Symptom("drift/tv", ">", "tv_moderate", "total variation"),),
        unless=(
            *_VARIANCE,
            Symptom("mismatch/chi2_token", ">", "chi2_moderate", ""),
            Symptom("total/chi2_token", ">", "chi2_moderate", ""),
        ),
    ),
    # escalation: rejection alone, with token weights, then nothing but a fix of the system
    Step(
        "rejection_limit",
        "warning",
        (
            Symptom("mismatch/chi2_token", ">", "chi2_reject", "token chi-square"),
            Symptom("total/chi2_token", ">", "chi2_reject", "token chi-square of current/sampling"),
            Symptom("keep/dropped_sequence_fraction", ">", "dropped_high", "share of responses dropped"),
            Symptom("keep/dropped_token_fraction", ">", "dropped_high", "share of tokens dropped"),
            Symptom("one_term/dropped_fraction", ">", "dropped_high", "share dropped by one term"),
            Symptom("zeroed/weight", ">", "dropped_high", "share of weights that a band set to 0"),
        ),
        unless=_BEYOND,
    ),
    Step("correction_limit", "critical", _BEYOND),
    Step("weight_variance", "critical", _VARIANCE, unless=_BEYOND),
    Step("weight_variance", "warning", (_NOISE_OF_WEIGHTS,), unless=(*_VARIANCE, *_BEYOND)),
    Step(
        "weight_variance",
        "notice",
        (
            _NOISE_GROWS,
            _AT_CAP,
        ),
        unless=(*_VARIANCE, _NOISE_OF_WEIGHTS),
    ),
    Step(
        "weight_variance",
        "notice",
        (Symptom("capped/weight_mean", ">", "weight_off", "distance of the mean weight from 1 after cap and masks"),),
        unless=(*_VARIANCE, _NOISE_OF_WEIGHTS, _NOISE_GROWS, _AT_CAP, *_ENGINE),
    ),
    Step(
        "sequence_variance",
        "notice",
        (
            Symptom("mismatch/chi2_sequence", ">", "chi2_sequence_high", "chi-square of whole sequences"),
            Symptom("mismatch/ess_sequence", "<", "ess_healthy", "ESS of the products over whole sequences"),
            Symptom("total/ess_sequence", "<", "ess_healthy", "ESS of the products of current/sampling"),
        ),
        unless=_VARIANCE,
    ),
)


def _of_entropy(severity: Severity, all_of: tuple[Symptom, ...], unless: tuple[Symptom, ...] = ()) -> tuple[Step, ...]:
    """A low entropy: what corrects the engine's distance helps, unless both sides are known to agree."""
    plain = Step("entropy_collapse", severity, (_ENTROPY,), all_of=all_of, unless=unless)
    agreeing = replace(plain, unless=(*unless, _TOTAL_FAR), instead=_NO_ENGINE)
    return (
        replace(plain, unless=(*unless, *_CLOSE)),
        replace(plain, given=(_CLOSE[0], _TOTAL_FAR)),
        *(replace(agreeing, given=(near,)) for near in _CLOSE),
    )


_LOSS_STEPS = (
    # 4. loss mechanics, and what is left of the policy
    Step("clip_saturation", "warning", (_CLIP,), all_of=(_CLIP_RISES,)),
    Step("clip_saturation", "notice", (_CLIP,), unless=(_CLIP_RISES,)),
    Step(
        "collapse",
        "critical",
        (
            Symptom(
                "collapse/reward_lost", ">", "reward_lost", "fall of the reward from its best, in each of ten steps"
            ),
        ),
    ),
    Step("collapse", "warning", _COLLAPSE),
    # a reward that rises again since a harder part of the data began has not collapsed
    Step(
        "collapse",
        "warning",
        (Symptom("collapse/reward_drop", ">", "reward_drop", "fall of the reward from its best"),),
        unless=(Symptom("regained/reward", ">", 0.1, "share of it that came back in 100 steps"),),
    ),
    Step(
        "collapse",
        "notice",
        (
            Symptom("collapse/reward_fall", ">", "reward_drop", "fall of the reward from its best, so far"),
            Symptom("collapse/gradient_level", ">", "gradient_spike", "gradient norm over the median before"),
        ),
    ),
    Step("length_surge", "critical", (_SURGE,), unless=(LEARNS, _HOLDS)),
    Step("length_surge", "warning", (_SURGE, _CUT), unless=(LEARNS,)),
    # responses that grow with the reward, in a run without another symptom, are learned
    Step(
        "length_surge",
        "notice",
        (_SURGE, _CUT),
        all_of=(LEARNS,),
        given=(_KNOWN_SANE,),
        instead="Nothing yet: the reward rises with the length, and KL and clipping are healthy. Read some of the "
        "longest responses (a reward can be won by length alone), and raise the length limit if many reach it.",
    ),
    Step(
        "length_surge",
        "notice",
        (_SURGE, _CUT),
        all_of=(LEARNS,),
        unless=(_KNOWN_SANE,),
        instead="The reward rises with the length, which learning does, and a reward that is won by length alone. KL "
        "and clipping, which would tell, were not logged: log them, and read some of the longest responses.",
    ),
    *_of_entropy("warning", _ENTROPY_GOES, unless=(LEARNS,)),
    *_of_entropy("notice", (_ENTROPY_FELL,)),
    Step(
        "no_signal",
        "critical",
        (Symptom("lost/reward", ">", 0.0, "last steps in a row whose reward is NaN or infinite"),),
        instead="Call the reward functions on recorded completions (rollouts.parquet): most likely one returns NaN, "
        "or None for all of them. Advantages have no number then, and nothing is learned.",
    ),
    Step(
        "no_signal",
        "critical",
        (Symptom("lost/gradient", ">", 0.0, "last steps in a row whose gradient norm is NaN or infinite"),),
        instead="The other numbers are finite, so updates are most likely skipped and the weights stand still: look at "
        "the loss scale (float16 overflows; bfloat16 does not), at the batches of these steps, and lower the "
        "learning rate.",
    ),
    Step(
        "no_signal",
        "notice",
        (Symptom("lost/first_gradients", ">", 0.0, "first steps, whose gradient norm is NaN or infinite"),),
        instead="Nothing yet, in float16: its loss scale is found in the first steps, whose updates are skipped. If it "
        "goes on beyond ten steps, or in another precision, look at these batches and the learning rate.",
    ),
    Step("no_signal", "warning", _STILL, unless=(_GAINED,)),
    Step(
        "no_signal",
        "notice",
        _STILL,
        all_of=(_GAINED,),
        instead="Nothing, if the task is solved: end the run, or go on with harder prompts. If nearly all responses "
        "are still wrong: easier prompts, or more responses per prompt.",
    ),
)

_ROUNDED_AWAY = Symptom(
    "rollout/sync_visible_fraction",
    "<",
    "sync_visible_low",
    "share of the changed weights that the engine's rounding lets through",
)
_AGREE = (*_CLOSE, _AT_FLOOR)
_APART = (*_ENGINE, *_ENGINE_FAR, _GROWS)
SYNC_ROUNDING = (
    Step("sync_rounding", "warning", (_ROUNDED_AWAY,), unless=_AGREE),
    Step("sync_rounding", "warning", _APART, all_of=(_ROUNDED_AWAY,)),
    # Steps of 1e-6 are below the last digit of nearly every bfloat16 weight, in any run with a 16-bit engine. What the
    # engine misses is part of its distance from the trainer; while that is small, there is nothing to repair.
    *(
        Step(
            "sync_rounding",
            "notice",
            (_ROUNDED_AWAY,),
            all_of=(agrees,),
            unless=_APART,
            instead="Nothing yet: every engine of 16 bits or fewer rounds small steps away until they add up, and this "
            "one agrees with the trainer. Watch KL k3; if it grows, give the engine more bits.",
        )
        for agrees in _AGREE
    ),
)
"""An engine that never sees most of a step: the trainer moves weights by less than the engine's precision resolves."""

_REPEATED_DRAWS = Step(
    "repeated_draws",
    "critical",
    (
        Symptom(
            "rollout/copied_fraction",
            ">",
            "copied_high",
            "share of completions too improbable to come up twice that did",
        ),
    ),
)

_NO_LOGPS = tuple(
    Symptom(f"{ratio}/nonfinite_fraction", ">", "logprobs_missing", f"share of tokens without a finite {words}")
    for ratio, words in (("mismatch", "log-ratio"), ("total", "log-ratio of current/sampling"))
)


def _of_tokens(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Branches that compare engine and trainer: they say nothing where no token can be compared."""
    return tuple(replace(step, unless=(*step.unless, *_NO_LOGPS)) for step in steps)


TREE: tuple[Step, ...] = (
    Step("engine_logprobs_missing", "critical", _NO_LOGPS),
    Step(
        "nonfinite",
        "warning",
        (
            Symptom("mismatch/nonfinite_fraction", ">", 0.0, "share of tokens without a finite log-ratio"),
            Symptom("lost/distance", ">", 0.0, "last steps in a row whose KL or log-ratio is NaN or infinite"),
        ),
        unless=_NO_LOGPS,
    ),
    _REPEATED_DRAWS,
    *_of_tokens(_ENGINE_STEPS),
    *SYNC_ROUNDING,
    *_STALENESS_STEPS,
    *_of_tokens(_DRIFT_STEPS),
    *_LOSS_STEPS,
)
