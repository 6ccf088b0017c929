"""verl's ``algorithm.adv_estimator`` as one of :mod:`trl_offpolicy.advantages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trl_offpolicy.checks import check_number
from trl_offpolicy.objective import advantages
from trl_offpolicy.objective.advantages import AdvantageEstimator
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.presets.frameworks.options import check_choice, tell, warn_no_effect
from trl_offpolicy.presets.frameworks.verl.losses import KL_TYPES, MAX_K3

EPSILON = 1e-6
"""verl adds this to a group's standard deviation."""
KL_COEF = 0.001
"""verl's ``algorithm.kl_ctrl.kl_coef``."""


@dataclass(frozen=True, kw_only=True)
class VerlAdvantageOptions:
    """The part of verl's ``AlgoConfig`` that makes the advantages. ``adv_estimator=None`` means the trainer's own.

    ``handle_zero_tail`` is an argument of verl's optimal token baselines that its configuration cannot set. It is True.
    If it is False, a group of one gets 0 here, and its return in verl.
    """

    adv_estimator: str | None = None
    norm_adv_by_std_in_grpo: bool = True
    gamma: float = 1.0
    handle_zero_tail: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: Mapping[str, Any] | None = None
    use_pf_ppo: bool = False


_GRPO = ("grpo", "grpo_vectorized")
_TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
_BUILD: dict[str, Callable[[], AdvantageEstimator]] = {
    "rloo": lambda: advantages.RLOO(alone="return"),
    "rloo_vectorized": advantages.RLOO,  # a group of one gets 0 here alone
    "opo": lambda: advantages.OPO(alone="return"),
    "reinforce_plus_plus_baseline": lambda: advantages.REINFORCEPlusPlusBaseline(alone="return"),
    "gdpo": advantages.GDPO,
    "gpg": lambda: advantages.GPG(alone="return"),
    "remax": advantages.ReMax,
}
_MISSING = {
    "gae": "needs a critic, which the trainers here do not have; take 'grpo', 'rloo' or 'reinforce_plus_plus'",
}
_SCALED = (*_GRPO, "grpo_passk")
ESTIMATORS = (*_SCALED, *_BUILD, "reinforce_plus_plus", *_TOKEN_BASELINES)


def estimator(options: VerlAdvantageOptions, *, weighted: bool) -> AdvantageEstimator | None:
    """The estimator of the advantages that verl's options name; None = the trainer's own.

    Args:
        options: verl's options.
        weighted: importance weights are decided before the advantages are made (decoupled mode), so the optimal token
            baseline reads them.

    Raises:
        ValueError: an unknown estimator.
        NotImplementedError: an estimator without a counterpart here, or an option that changes the rewards or the
            batch.
    """
    name = options.adv_estimator
    if options.use_pf_ppo:
        raise NotImplementedError("use_pf_ppo must be False: resampling the batch by reward has no counterpart here.")
    if name in _MISSING:
        raise NotImplementedError(f"adv_estimator {name!r} {_MISSING[name]}.")
    if name is not None:
        check_choice("adv_estimator", name, ESTIMATORS)
    why = "without adv_estimator" if name is None else f"with adv_estimator={name!r}"
    if name not in _SCALED:
        warn_no_effect(options, ("norm_adv_by_std_in_grpo",), why, framework="verl")
    if name != "reinforce_plus_plus":
        warn_no_effect(options, ("gamma",), why, framework="verl")
    if name not in _TOKEN_BASELINES:
        warn_no_effect(options, ("handle_zero_tail",), why, framework="verl")
    if name == "gdpo":
        tell("adv_estimator 'gdpo' normalises over responses here; verl counts each response once for every token.")
    return _estimator(name, options, weighted)


def reward_kl(options: VerlAdvantageOptions) -> KLPenalty | None:
    """The KL penalty that verl takes from the rewards; None without ``use_kl_in_reward``.

    Raises:
        ValueError: an unknown estimator or a coefficient that is no number.
        NotImplementedError: a coefficient that adapts.
    """
    if not options.use_kl_in_reward:
        warn_no_effect(options, ("kl_penalty",), "without use_kl_in_reward", framework="verl")
        return None
    control: dict[str, Any] = {"type": "fixed", "kl_coef": KL_COEF} | dict(options.kl_ctrl or {})
    if control["type"] != "fixed":
        raise NotImplementedError(
            f"kl_ctrl.type must be 'fixed' with use_kl_in_reward, but got {control['type']!r}: a coefficient moves "
            "only in the loss here (use_kl_loss)."
        )
    kind = options.kl_penalty.removesuffix("+")  # straight through: another gradient, which a reward has not
    check_choice("kl_penalty", kind, [name for name in KL_TYPES if not name.endswith("+")])
    check_number("kl_ctrl.kl_coef", control["kl_coef"])
    if control["kl_coef"] == 0:
        return None
    estimator = KL_TYPES[kind]
    return KLPenalty(
        coef=control["kl_coef"],
        estimator=estimator,
        max_value=MAX_K3 if estimator == "k3" else None,
        place="reward",
    )


def _estimator(name: str | None, options: VerlAdvantageOptions, weighted: bool) -> AdvantageEstimator | None:
    if name is None:
        return None
    if name in _GRPO:
        scale: Literal["group", "none"] = "group" if options.norm_adv_by_std_in_grpo else "none"
        return advantages.GRPO(scale=scale, epsilon=EPSILON, alone="return")
    if name == "grpo_passk":
        return advantages.PassK(scale="group" if options.norm_adv_by_std_in_grpo else "none", epsilon=EPSILON)
    if name == "reinforce_plus_plus":
        return advantages.REINFORCEPlusPlus(discount=options.gamma)
    if name in _TOKEN_BASELINES:
        return advantages.OptimalTokenBaseline(
            is_aware=weighted,
            multi_turn=name == "tir_optimal_token_baseline",
            alone="return" if options.handle_zero_tail else "zero",
        )
    return _BUILD[name]()
