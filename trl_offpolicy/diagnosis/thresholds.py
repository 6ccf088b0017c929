"""All thresholds of verdicts and controllers in one place, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trl_offpolicy.checks import near

TREE = "Liu 2026, Off-Policy Drift in LLM RL, decision tree"
ESCALATION = "Liu 2026, Off-Policy Drift in LLM RL, when to escalate from RS to IS to systems fix"
YAO = "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
CONJECTURES = "Liu 2026, Off-Policy Drift in LLM RL, open problems"
DIAGNOSTICS = "Liu 2026, Off-Policy Drift in LLM RL, diagnostics; the number is this kit's"
SGA = "Li and Liu 2025, When Speed Kills Stability; the number is this kit's (Pinsker at a KL of 0.01 to 0.02)"
YAO_OURS = f"{YAO}; the number is this kit's"
AREAL = "Fu et al. 2025, AReaL: the largest staleness that matched synchronous training, in steps"
SKYRL = "SkyRL documentation, Off policy correction, outlier mask"
GAC = "Xu et al. 2026, GAC; the number is this kit's"
OURS = "this kit"

SAME_POLICY_KL = 1e-10
"""Below this many nats per token the two sides are called the same: float32 log-probs resolve about 1e-7, and
KL is about half the square of the log-ratio, so anything smaller is arithmetic, not policy."""


def _number(default: float, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"meaning": meaning, "source": source})


@dataclass(frozen=True)
class Thresholds:
    """Operational defaults, not laws: calibrate them on a run with ``offpolicy: measure``.

    ``meaning`` and ``source`` of each threshold are in the metadata of its field. ``trl-offpolicy doctor RUN_DIR
    --threshold help`` prints them. KL is in nats per token, fractions are in [0, 1].

    Raises:
        ValueError: a value is not a positive finite number, or a pair is in the wrong order.
    """

    pearson_healthy: float = _number(0.99, "correlation of the two probabilities from which nothing is wrong", TREE)
    pearson_broken: float = _number(0.95, "below it the engine is at fault", TREE)
    kl_healthy: float = _number(0.02, "KL (k3) up to which drift means nothing", TREE)
    kl_high: float = _number(0.05, "above it at equal weights the engine is at fault", TREE)
    log_ppl_high: float = _number(0.1, "|log perplexity ratio| that is far from 0; the source gives no number", OURS)
    prob_diff_high: float = _number(0.5, "largest difference of a token's two probabilities", YAO)
    chi2_moderate: float = _number(0.3, "token chi-square from which rejection helps", TREE)
    chi2_high: float = _number(1.0, "token chi-square at which weights blow up", TREE)
    chi2_sequence_high: float = _number(
        10.0, "sequence chi-square that explodes: raw weights of sequences would count for a tenth", OURS
    )
    chi2_reject: float = _number(2.0, "token chi-square up to which rejection alone works", ESCALATION)
    chi2_systems: float = _number(4.0, "token chi-square above which no correction works", ESCALATION)
    ess_healthy: float = _number(0.5, "effective sample size below which weights blow up", TREE)
    ess_broken: float = _number(0.3, "below it after rejection the system must be fixed", ESCALATION)
    dropped_high: float = _number(0.1, "share of responses or tokens rejected up to which rejection does", ESCALATION)
    dropped_broken: float = _number(0.25, "share rejected at which the system must be fixed", ESCALATION)
    clip_high: float = _number(0.2, "share of clipped units", TREE)
    clip_rising: float = _number(1.1, "last half of the window over its first half that counts as rising", OURS)
    length_surge: float = _number(1.2, "mean response length over that of length_window steps before", TREE)
    length_window: float = _number(100.0, "optimizer steps over which a length surge is measured", TREE)
    floor_factor: float = _number(2.0, "times the noise floor up to which a distance says nothing", OURS)
    logp_diff_spike: float = _number(1.0, "largest |log-ratio| (a factor of e) beside a small mean", OURS)
    post_tool_ratio: float = _number(3.0, "KL k3 after tool output over that before it", OURS)
    length_trap: float = _number(
        2.0, "times as often dropped: the longest quarter of responses against the shortest, or the reverse", OURS
    )
    ppl_ratio_low: float = _number(
        0.99,
        "perplexity ratio below which the gap is systematic (any below 1, less 0.01 for chance)",
        DIAGNOSTICS,
    )
    logp_diff_outlier: float = _number(4.605, "largest |log-ratio|: a factor of 100", SKYRL)
    logp_diff_small: float = _number(
        0.05, "mean |log-ratio| that rounding to bfloat16 explains, where no KL k3 was logged", OURS
    )
    k1_negative: float = _number(0.001, "nats below 0 from which a step's KL k1 counts as negative", OURS)
    k1_negative_share: float = _number(0.5, "share of the steps with a negative KL k1 that is frequent", YAO_OURS)
    weight_off: float = _number(0.2, "|mean weight - 1| that is far from 0", DIAGNOSTICS)
    noise_rising: float = _number(3.0, "gradient noise of the window over that before, or before weights", DIAGNOSTICS)
    tv_moderate: float = _number(0.08, "total variation from which token weights are biased without a correction", SGA)
    entropy_low: float = _number(0.2, "entropy of the next token (nats) below which it has collapsed", YAO)
    entropy_falling: float = _number(0.95, "last half of the window over its first half that counts as falling", OURS)
    entropy_fallen: float = _number(0.7, "entropy over that of the run's first steps that counts as fallen", OURS)
    entropy_lost: float = _number(0.35, "the same where it has fallen so far that it is a warning", OURS)
    entropy_rising: float = _number(3.0, "entropy over that of the first steps, if the reward falls", OURS)
    cut_rising: float = _number(
        0.2, "share of responses at the length limit, less that of length_window steps before", OURS
    )
    mismatch_growth: float = _number(
        3.0, "KL k3 of engine and trainer over that of the first steps, from a quarter of kl_healthy on", OURS
    )
    reward_gap: float = _number(
        0.1, "difference between the engine's reward and the trainer's, as a share of the larger", YAO_OURS
    )
    lag_high: float = _number(8.0, "oldest token, in optimizer steps", AREAL)
    lag_uncorrected: float = _number(
        3.0, "optimizer steps by which a queue may hold back rollouts that nothing corrects (4 collapsed)", AREAL
    )
    cosine_high: float = _number(0.3, "cosine of successive gradients, near 0 without staleness", GAC)
    flip_high: float = _number(0.1, "share of a token's layers whose set of experts differs", OURS)
    expert_flip_high: float = _number(1e-3, "mean rate at which an expert is chosen by one side only", CONJECTURES)
    reward_drop: float = _number(0.3, "fall of the reward from its best that is a collapse", CONJECTURES)
    reward_drop_steps: float = _number(100.0, "optimizer steps without recovery that make it one", CONJECTURES)
    reward_lost: float = _number(0.7, "fall of the reward, with no step of ten near half of its best", OURS)
    signal_lost: float = _number(
        0.9, "share of groups with equal rewards, or of steps with a gradient of 0, that leaves nothing to learn", OURS
    )
    length_left: float = _number(0.15, "response length over the longest before: next to nothing is left", OURS)
    gradient_spike: float = _number(10.0, "gradient norm over its median before, if the reward falls", CONJECTURES)
    confident_high: float = _number(
        0.005, "share of tokens that the engine gives at least half and the trainer 2 nats less, at lag 0", OURS
    )
    logprobs_missing: float = _number(0.99, "share of tokens without a log-ratio at which the engine gives none", OURS)
    sync_visible_low: float = _number(0.5, "share of the changed weights that survive the engine's rounding", OURS)
    copied_high: float = _number(0.05, "share of improbable completions that equal another one of their group", OURS)
    tv_budget: float = _number(
        1e-4, "95th percentile of total variation by response that needs no correction", CONJECTURES
    )
    chi2_budget: float = _number(0.1, "sequence chi-square that needs no correction", CONJECTURES)
    lag_per_ess: float = _number(
        50.0, "tolerable lag over the sequence ESS, for losses that regress on it", CONJECTURES
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{one.name} must be a positive number, but got {value!r}.")
        for low, high in _ORDERED:
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"{low} must not exceed {high}, but got {getattr(self, low):g} and {getattr(self, high):g}."
                )


_ORDERED = (
    ("pearson_broken", "pearson_healthy"),
    ("kl_healthy", "kl_high"),
    ("chi2_moderate", "chi2_high"),
    ("chi2_high", "chi2_reject"),
    ("chi2_reject", "chi2_systems"),
    ("ess_broken", "ess_healthy"),
    ("dropped_high", "dropped_broken"),
    ("logp_diff_spike", "logp_diff_outlier"),
)


def thresholds_from(values: Mapping[str, float]) -> Thresholds:
    """The default thresholds, with those in ``values`` replaced.

    Raises:
        ValueError: a name is not a threshold, or a value does not fit.

    Example:
        >>> thresholds_from({"kl_high": 0.1}).kl_high
        0.1
    """
    known = [one.name for one in fields(Thresholds)]
    unknown = [name for name in values if name not in known]
    if unknown:
        meant = "".join(near(name, known) for name in unknown)
        raise ValueError(
            f"thresholds must be among the {len(known)} that `trl-offpolicy doctor --threshold help` lists, but got "
            f"{', '.join(unknown)}.{meant}"
        )
    return replace(Thresholds(), **values)


def limit(*names: str, to: Callable[[float], Any] = float) -> Any:
    """A dataclass field whose default is the threshold of that name, or a tuple for several names.

    Args:
        names: fields of :class:`Thresholds`.
        to: converts the number, e.g. to ``int``.
    """
    metadata = {"thresholds": names, "to": to}
    return field(default=_values(metadata, Thresholds()), metadata=metadata)


def limits_of(cls: type, limits: Thresholds) -> dict[str, Any]:
    """Values for the fields of a dataclass that :func:`limit` made, from these thresholds.

    Example:
        >>> @dataclass
        ... class Guard:
        ...     surge: float = limit("length_surge")
        >>> Guard().surge, limits_of(Guard, thresholds_from({"length_surge": 1.5}))
        (1.2, {'surge': 1.5})
    """
    return {one.name: _values(one.metadata, limits) for one in fields(cls) if "thresholds" in one.metadata}


def _values(metadata: Mapping[str, Any], limits: Thresholds) -> Any:
    found = tuple(metadata["to"](getattr(limits, name)) for name in metadata["thresholds"])
    return found if len(found) > 1 else found[0]


def short_source(name: str) -> str:
    """Author and year of a threshold's source, for a line of text.

    Example:
        >>> short_source("kl_high"), short_source("floor_factor")
        ('Liu 2026', 'this kit')
    """
    (one,) = (one for one in fields(Thresholds) if one.name == name)
    return str(one.metadata["source"]).split(",")[0].split(";")[0]
