"""prime-rl's ``[trainer.loss]`` as a preset."""

from __future__ import annotations

from dataclasses import dataclass

from trl_offpolicy.checks import check_number
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import DivergenceBand, KeepTerm, ProbabilityDifferenceMask, RawWeight
from trl_offpolicy.objective.losses import GPG
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
    - adv_tau must be 1; kl_tau is not reproduced: the regulariser kl_tau log^2(pi / mu) has no counterpart here, and a
      warning says so unless it is 0.

    Dropped tokens stay in the denominator, which counts the tokens of the whole step.

    Not reproduced: with an advantage of 0 the default mask drops nothing here; that token has no gradient in either.

    Raises:
        UnknownOptionError: an option that prime-rl does not have.
        ValueError: an unknown type, or a bound that is out of range.
        NotImplementedError: type "custom", or adv_tau other than 1.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> from_prime_rl(type="ipo", ipo_threshold=0.1).correction.keep[0].statistic
        'binary_tv'

    Reference: prime-rl 559b44772, ``src/prime_rl/trainer/rl/loss.py``.
    """
    if loss.get("type") == "custom":
        raise NotImplementedError("type 'custom' is a function of your own: write it as a policy loss of this kit.")
    options = read_options(PrimeRLOptions, loss, framework="prime-rl's trainer.loss")
    check_choice("type", options.type, TYPES)
    check_number("adv_tau", options.adv_tau)
    if options.adv_tau != 1:
        raise NotImplementedError(f"adv_tau must be 1: scale the learning rate instead, but got {options.adv_tau}.")
    unread = ("ipo_threshold",) if options.type == "default" else ("dppo_mask_low", "dppo_mask_high")
    warn_no_effect(options, unread, f"with type {options.type!r}", framework="prime-rl")
    if options.kl_tau != 0:
        tell(f"kl_tau={options.kl_tau:g} is left out: the regulariser kl_tau log^2(pi / mu) has no counterpart here.")
    return make_preset(
        "prime-rl",
        Correction(weight=RawWeight(ratio="current/sampling"), keep=(_keep(options),)),
        citation="prime-rl 559b44772, trainer.loss",
        notes="What prime-rl computes with these options, without its regulariser.",
        source_clamp=None,
        policy_loss=GPG(),
        mode="bypass",
    )


def _keep(options: PrimeRLOptions) -> KeepTerm:
    if options.type == "ipo":
        return DivergenceBand(
            statistic="binary_tv", level="token", high=options.ipo_threshold, ratio="current/sampling"
        )
    return ProbabilityDifferenceMask(low=-options.dppo_mask_low, high=options.dppo_mask_high, ratio="current/sampling")
