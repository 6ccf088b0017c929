"""AReaL's ``rejection_sampling`` under its decoupled loss as a preset."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, RawWeight, TermInputs, Violations, Weight
from trl_offpolicy.correction.terms.checks import check_order
from trl_offpolicy.correction.terms.keep import reach
from trl_offpolicy.functional.kl import k3
from trl_offpolicy.functional.levels import Level, aggregate
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.functional.masks import Statistic
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, tell, warn_no_effect
from trl_offpolicy.presets.preset import Preset, make_preset

CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"),
    "agg": ("mean", "sum", "max"),
}
_NEVER_NEGATIVE = ("kl_k2", "kl_k3", "binary_kl")
AGGREGATES: dict[str, Level] = {"mean": "sequence_mean", "sum": "sequence", "max": "sequence_max"}


@dataclass(frozen=True, kw_only=True)
class ARealOptions:
    """``rejection_sampling`` with AReaL's names and defaults, and the actor's ``use_decoupled_loss``."""

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None
    use_decoupled_loss: bool = True

    @property
    def decision(self) -> Level:
        """Level of the statistic that is compared with the bounds."""
        return "token" if self.level == "token" else AGGREGATES[self.agg]


@dataclass(frozen=True, kw_only=True)
class ReversedK3Band(KeepTerm):
    """AReaL's ``kl_k3``: exp(-l) - 1 + l with l = log(pi_old / mu), nats, inside [low, high].

    This is Schulman's k3 of the opposite direction, so its expectation under mu is not a KL. See
    :class:`~trl_offpolicy.DivergenceBand` for k3 itself.
    """

    high: float
    low: float | None
    level: Level

    def __post_init__(self) -> None:
        check_order("low", self.low, "high", self.high)
        if self.high <= 0:
            raise ValueError(f"high must be positive, because it bounds what is never negative, but got {self.high}.")

    @property
    def name(self) -> str:
        """Name in the metrics, ``areal_kl_k3_<level>``."""
        return f"areal_kl_k3_{self.level}"

    def violations(self, inputs: TermInputs) -> Violations:
        """Where exp(-l) - 1 + l is above ``high``, and where it is below ``low``."""
        held = inputs.log_ratios.clamp(min=-LOG_RATIO_CLAMP)  # upwards it grows as l does, which no float minds
        value = aggregate(k3(-held), inputs.mask, self.level)
        return Violations(value > self.high, None if self.low is None else value < self.low)


def from_areal(**rejection_sampling: object) -> Preset:
    """A preset from AReaL's ``rejection_sampling`` options and ``use_decoupled_loss``.

    - level: "token", or "sequence" with agg "mean", "sum" or "max" (of the log-ratio, or of the KL estimate).
    - action: "mask" drops what is outside [lower, upper] and leaves the weight raw; "clamp" (metric "ratio" only)
      holds the weight inside. The weight is pi_old / mu per token. At level "sequence" with metric "ratio" it is the
      geometric mean, whatever agg says.
    - metric: "ratio"; "kl_k1" = log rho; "kl_k2" = log^2 rho / 2; "kl_k3"; "binary_kl" (KPop): the larger of both
      directions of the KL of "this token or another", per token, then aggregated by agg.
    - upper (default 5.0), lower: inclusive.
    - use_decoupled_loss: True by default here. In AReaL it is False, but ``rejection_sampling`` acts only with it.

    pi_old is AReaL's proximal policy. Dropped tokens stay in the denominator. AReaL does not clamp log-ratios; here
    those of "kl_k2" are held within +-20 nats, so that a mean over a long response may keep what AReaL drops.
    Non-finite log-ratios are neutral here; in AReaL they fail the KL bounds (but -inf the upper one of "kl_k1", and a
    probability of 0 counts as 1e-8 in "binary_kl"). "binary_kl" clamps probabilities to
    [1e-6, 1 - 1e-6] as its authors do; AReaL's upper clamp, 1 - 1e-8, is 1 in float32, so that a token of probability
    1 gives NaN there and is dropped. AReaL's own check of the configuration still refuses the name "binary_kl" at
    cbff54d.

    **Bugs reproduced:** "kl_k3" is exp(-l) - 1 + l, the estimator of the other direction (its documentation says
    r - log r - 1): :class:`ReversedK3Band`. "kl_k1" has the opposite sign of Schulman's k1.

    This kit warns in three cases. A bound that nothing reaches (1e9) is left open. Without any ``rejection_sampling``
    option the decoupled loss applies no weight at all. Without ``use_decoupled_loss`` the options do nothing (AReaL
    then tests a log-ratio of 0, which only bounds that exclude it would drop), and the loss's ratio is pi / mu, unless
    AReaL's ``recompute_logprob`` is on, which makes it pi / pi_old.

    Raises:
        UnknownOptionError: an option that AReaL does not have.
        ValueError: a value that AReaL refuses.
        NotImplementedError: "clamp" with a lower bound and agg "max", or with one above 1 and agg "sum", which clamps
            only some responses' weights.

    Example:
        >>> from_areal(level="token", action="mask", upper=5.0).formula
        'w = rho_t; keep if rho_t <= 5'

    Reference: AReaL 4aef98d8d, ``areal/utils/functional/functional.py``, ``apply_rejection_sampling``; "binary_kl":
    the same function at cbff54d.
    """
    options = read_options(
        ARealOptions, rejection_sampling, framework="AReaL's rejection_sampling", numbers_as_text=True
    )
    given = [name for name in rejection_sampling if name != "use_decoupled_loss"]
    _check(options, given)
    acts = options.use_decoupled_loss and given
    return make_preset(
        "areal",
        Correction(weight=_weight(options), keep=_keep(options)) if acts else Correction(),
        citation="AReaL, rejection_sampling",
        notes="What AReaL computes with these options.",
        source_clamp=None,
        mode="decoupled" if options.use_decoupled_loss else "bypass",
    )


def _check(options: ARealOptions, given: list[str]) -> None:
    for name, allowed in CHOICES.items():
        check_choice(name, getattr(options, name), allowed)
    bounds.check_bound("upper", options.upper)
    if options.metric in _NEVER_NEGATIVE and options.upper <= 0:
        raise ValueError(f"upper must be positive for metric {options.metric!r}, but got {options.upper}.")
    if options.lower is not None and options.lower > options.upper:
        raise ValueError(f"lower must be at most upper={options.upper}, but got {options.lower}.")
    if options.metric == "ratio" and options.upper <= 1:
        raise ValueError(f"upper must be above 1 for metric 'ratio', but got {options.upper}.")
    if options.action == "clamp" and options.metric != "ratio":
        raise ValueError(f"metric must be 'ratio' with action 'clamp', but got {options.metric!r}.")
    if options.level == "token":
        warn_no_effect(options, ("agg",), "at level 'token'", framework="AReaL")
    if not options.use_decoupled_loss and given:
        tell(f"{', '.join(given)} have no effect with use_decoupled_loss=False, in AReaL as here.")
    if options.use_decoupled_loss and not given:
        tell("use_decoupled_loss without rejection_sampling applies no behaviour weight, in AReaL as here.")


def _weight(options: ARealOptions) -> Weight:
    level: Level = "sequence_mean" if (options.level, options.metric) == ("sequence", "ratio") else "token"
    if options.action == "mask":
        return RawWeight(level=level)
    low = options.lower
    of_others = low is not None and (options.agg == "max" or (options.agg == "sum" and low > 1))
    if options.level == "sequence" and of_others:
        raise NotImplementedError(
            f"action 'clamp' with agg {options.agg!r} and lower={low} is not expressible here: AReaL raises the "
            "geometric mean to lower only in responses whose largest ratio, or product, is out of bounds. Use agg "
            "'mean', or lower=None."
        )
    return bounds.truncate(level, bounds.lower("lower", options.lower), bounds.upper("upper", options.upper))


def _keep(options: ARealOptions) -> tuple[KeepTerm, ...]:
    if options.action == "clamp":
        return ()
    level, low = options.decision, options.lower
    if options.metric == "ratio":
        return bounds.ratio_band(level, bounds.lower("lower", low), bounds.upper("upper", options.upper))
    if options.metric == "kl_k1":
        least, largest = reach("k1", level)
        return _log_ratio_band(level, bounds.lower("lower", low, least), bounds.upper("upper", options.upper, largest))
    if low is not None and low <= 0:
        tell(f"lower={low} has no effect on {options.metric}, which is never negative, in AReaL as here.")
        low = None
    # Both directions of k3 have the same limit.
    statistics: dict[str, Statistic] = {"kl_k2": "k2", "kl_k3": "k3", "binary_kl": "binary_kl_both"}
    statistic = statistics[options.metric]
    high = bounds.upper("upper", options.upper, reach(statistic, level)[1])
    if low is None and high == math.inf:
        return ()
    if options.metric != "kl_k3":
        return bounds.divergence_band(statistic, level, low, high)
    return (ReversedK3Band(level=level, low=low, high=high),)


def _log_ratio_band(level: Level, low: bounds.Bound, high: bounds.Bound) -> tuple[KeepTerm, ...]:
    """Keeps log rho in [low, high]: as a band on k1 = -log rho, or on rho where the maximum over tokens decides."""
    if level == "sequence_max":
        return bounds.ratio_band(level, _exp(low), _exp(high))
    return bounds.divergence_band("k1", level, _negative(high), _negative(low))


def _exp(bound: bounds.Bound) -> bounds.Bound:
    return bound if bound is None or bound == -math.inf else math.exp(bound)


def _negative(bound: bounds.Bound) -> bounds.Bound:
    return None if bound is None else -bound
