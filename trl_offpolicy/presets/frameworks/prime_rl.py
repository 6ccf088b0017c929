"""prime-rl's ``[trainer.loss]`` as a preset."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trl_offpolicy.checks import check_not_negative, check_number
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, ProbabilityDifferenceMask, RawWeight
from trl_offpolicy.objective.losses import GPG
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, tell, warn_no_effect
from trl_offpolicy.presets.preset import Preset, make_preset

TYPES = ("default", "ipo")


@dataclass(frozen=True, kw_only=True)
class PrimeRLOptions:
    """``[trainer.loss]`` with prime-rl's names and defaults."""

    type: str = "default"
    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    ipo_threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3


def from_prime_rl(**loss: object) -> Preset:
    """A preset from the options of prime-rl's ``[trainer.loss]``; an option that is left out has prime-rl's default.

    There are two policies: the loss is -(pi / mu) A on the kept tokens.

    - type: "default" (DPPO) drops a token whose probability has moved beyond ``dppo_mask_high`` upwards with a
      positive advantage, or beyond ``dppo_mask_low`` downwards with one that is not positive; "ipo" drops one that has
      moved by more than ``ipo_threshold`` in either direction.
    - kl_tau: the regulariser kl_tau log^2(pi / mu) on every trainable token, also on dropped ones.
    - adv_tau must be 1.

    Dropped tokens stay in the denominator, which counts the tokens of the whole step. A bound of 1 or more, which no
    difference of probabilities reaches, is left open with a warning. prime-rl does not clamp log-ratios.

    Not reproduced: with an advantage of 0 the default mask drops nothing here; that token has no gradient of the policy
    term in either.

    Raises:
        UnknownOptionError: an option that prime-rl does not have.
        ValueError: an unknown type, or a bound that is out of range.
        NotImplementedError: type "custom", or adv_tau other than 1.

    Example:
        >>> from_prime_rl(type="ipo", ipo_threshold=0.1, kl_tau=0.0).formula
        'w = rho_t; keep if |p - q|_t <= 0.1; GPG on pi / mu; rho = pi / mu'

    Reference: prime-rl 559b44772, ``src/prime_rl/trainer/rl/loss.py``.
    """
    if loss.get("type") == "custom":
        raise NotImplementedError("type 'custom' is a function of your own: write it as a policy loss of this kit.")
    options = read_options(PrimeRLOptions, loss, framework="prime-rl's trainer.loss")
    check_choice("type", options.type, TYPES)
    check_number("adv_tau", options.adv_tau)
    check_not_negative(kl_tau=options.kl_tau)
    if options.adv_tau != 1:
        raise NotImplementedError(
            "adv_tau must be 1: multiply the learning rate by it and divide kl_tau by it instead, but got "
            f"{options.adv_tau}."
        )
    unread = ("ipo_threshold",) if options.type == "default" else ("dppo_mask_low", "dppo_mask_high")
    warn_no_effect(options, unread, f"with type {options.type!r}", framework="prime-rl")
    return make_preset(
        "prime-rl",
        Correction(weight=RawWeight(ratio="current/sampling"), keep=_keep(options)),
        citation="prime-rl 559b44772, trainer.loss",
        notes="What prime-rl computes with these options.",
        source_clamp=None,
        policy_loss=GPG(unit_ratio=True),
        mode="bypass",
        drift_coef=options.kl_tau,
    )


def _keep(options: PrimeRLOptions) -> tuple[KeepTerm, ...]:
    if options.type == "ipo":
        high = _threshold("ipo_threshold", options.ipo_threshold)
        return bounds.divergence_band("binary_tv", "token", None, high, "current/sampling")
    low, high = (_threshold(name, getattr(options, name)) for name in ("dppo_mask_low", "dppo_mask_high"))
    if low == high == math.inf:
        return ()
    # The term wants both bounds below 1: the largest number below it acts as seldom as 1.
    low, high = (min(value, _NEVER) for value in (low, high))
    return (ProbabilityDifferenceMask(low=-low, high=high, ratio="current/sampling"),)


_NEVER = math.nextafter(1.0, 0.0)


def _threshold(name: str, value: float) -> float:
    """The threshold, or infinity with a warning where a difference of probabilities cannot reach it.

    The terms want a bound above 0. The least number there is drops what 0 drops.
    """
    if not value >= 0:
        raise ValueError(f"{name} must be 0 or more, but got {value}.")
    if value >= 1:
        tell(f"{name}={value:g} is taken as no bound: probabilities differ by less than 1.")
        return math.inf
    return max(value, math.nextafter(0.0, 1.0))
