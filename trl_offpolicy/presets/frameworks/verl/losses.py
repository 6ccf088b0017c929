"""verl's ``actor.policy_loss`` and clip options as a policy loss and an aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_offpolicy.checks import check_number, check_positive
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.functional.kl import KLEstimator
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GPG,
    SAPO,
    ClipCov,
    GSPOToken,
    KLCov,
    PolicyLoss,
    PPOClip,
)
from trl_offpolicy.presets.frameworks.options import check_choice, tell, warn_no_effect

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
SEQUENCE_MEAN = "seq-mean-token-mean"
FIXED_AGGREGATION = ("sapo", "geo_mean")
"""Losses that do not read ``loss_agg_mode``: both take the mean over responses of their token mean."""

KL_TYPES: dict[str, KLEstimator] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "kl+": "k1+",
    "k1+": "k1+",
    "mse+": "k2",  # mse has the gradient of k2 already
    "k2+": "k2",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
}
"""verl's ``kl_loss_type`` -> estimator. "+" is the straight-through form, with the gradient of k2."""
MAX_K3 = 10.0
"""Nats at which verl clamps k3."""


@dataclass(frozen=True, kw_only=True)
class VerlLossOptions:
    """The part of verl's ``ActorConfig`` that shapes the loss, with the defaults of verl's ``actor.yaml``.

    None for a covariance setting means verl's default in code, which for ``ppo_kl_coef`` is 1.0, not the YAML's 0.1.
    """

    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.2
    clip_ratio_high: float | None = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float | None = 0.0002
    clip_cov_lb: float | None = 1.0
    clip_cov_ub: float | None = 5.0
    kl_cov_ratio: float | None = 0.0002
    ppo_kl_coef: float | None = 0.1
    dro_beta: float | None = None
    loss_scale_factor: int | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"

    @property
    def low(self) -> float:
        """``clip_ratio_low``, or ``clip_ratio`` if that is None."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """``clip_ratio_high``, or ``clip_ratio`` if that is None."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_READS: dict[str, tuple[str, ...]] = {
    "vanilla": (*_CLIP, "clip_ratio_c"),
    "dppo_tv": (*_CLIP, "clip_ratio_c"),
    "dppo_kl": (*_CLIP, "clip_ratio_c"),
    "gspo": _CLIP,
    "sapo": ("tau_pos", "tau_neg"),
    "gpg": (),
    "clip_cov": (*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "geo_mean": _CLIP,
    "dro": ("dro_beta",),
    "cispo": _CLIP,
}
_SETTINGS = tuple(dict.fromkeys(name for names in _READS.values() for name in names))

_BUILD: dict[str, Callable[[VerlLossOptions], PolicyLoss]] = {
    "vanilla": lambda o: PPOClip(low=o.low, high=o.high, dual_clip=o.clip_ratio_c),
    "dppo_tv": lambda o: DPPO(divergence="tv", low=o.low, high=o.high, max_ratio=o.clip_ratio_c),
    "dppo_kl": lambda o: DPPO(divergence="kl", low=o.low, high=o.high, max_ratio=o.clip_ratio_c),
    "gspo": lambda o: GSPOToken(low=o.low, high=o.high),
    "sapo": lambda o: SAPO(temperature_pos=o.tau_pos, temperature_neg=o.tau_neg),
    "gpg": lambda o: GPG(),
    "clip_cov": lambda o: ClipCov(
        low=o.low,
        high=o.high,
        fraction=_or(o.clip_cov_ratio, 0.0002),
        cov_low=_or(o.clip_cov_lb, 1.0),
        cov_high=_or(o.clip_cov_ub, 5.0),
    ),
    "kl_cov": lambda o: KLCov(fraction=_or(o.kl_cov_ratio, 0.0002), coef=_or(o.ppo_kl_coef, 1.0)),
    "geo_mean": lambda o: GMPO(low=o.low, high=o.high),
    "dro": lambda o: DRO(beta=_dro_beta(o)),
    "cispo": lambda o: CISPO(low=1 - o.low if o.low < 1 else None, high=1 + o.high),
}
LOSS_MODES = tuple(_BUILD)


def policy_loss(options: VerlLossOptions) -> PolicyLoss:
    """The loss that ``loss_mode`` names, with verl's settings."""
    return _BUILD[options.loss_mode](options)


def reduced(options: VerlLossOptions) -> dict[str, Any]:
    """The fields of an ``Objective`` that say how verl reduces the loss, and its KL and entropy terms.

    Raises:
        ValueError: a coefficient that is not a number, or negative.
        NotImplementedError: a KL term that has no counterpart here, or that verl reduces otherwise than the loss.
    """
    fixed = options.loss_mode in FIXED_AGGREGATION
    mode = SEQUENCE_MEAN if fixed else options.loss_agg_mode
    found: dict[str, Any] = {"aggregation": AGGREGATIONS[mode], "kl": _kl(options)}
    if mode == "seq-mean-token-sum-norm" and options.loss_scale_factor is not None:
        check_positive(loss_scale_factor=options.loss_scale_factor)
        found["max_length"] = options.loss_scale_factor
    check_number("entropy_coeff", options.entropy_coeff)
    if options.entropy_coeff != 0:
        found |= {"entropy_coef": options.entropy_coeff, "entropy_aggregation": "loss"}
    beside = [name for name, on in (("use_kl_loss", found["kl"]), ("entropy_coeff", options.entropy_coeff)) if on]
    if fixed and beside and options.loss_agg_mode != SEQUENCE_MEAN:
        raise NotImplementedError(
            f"loss_agg_mode must be {SEQUENCE_MEAN!r} with loss_mode {options.loss_mode!r} and {' and '.join(beside)}: "
            f"verl reduces this loss so whatever loss_agg_mode says, and the terms beside it by loss_agg_mode, which "
            f"is {options.loss_agg_mode!r}."
        )
    return found


def check_loss_options(options: VerlLossOptions, *, bypass: bool, reinforce: bool) -> None:
    """Refuse an unknown choice, and warn about options that verl would silently ignore.

    Raises:
        ValueError: an unknown loss or aggregation, or a setting of the loss that is None where verl fails.
    """
    if options.loss_mode == "bypass_mode":  # verl's trainer puts this name there itself
        if not bypass:
            raise ValueError("bypass_mode must be True with loss_mode 'bypass_mode', but got False.")
    else:
        check_choice("loss_mode", options.loss_mode, LOSS_MODES)
    check_choice("loss_agg_mode", options.loss_agg_mode, AGGREGATIONS)
    if bypass and options.loss_mode not in ("vanilla", "bypass_mode"):
        tell(
            f"loss_mode={options.loss_mode!r} has no effect in bypass_mode, in verl as here: loss_type names the loss."
        )
    mode = options.loss_mode
    if bypass:
        mode = "gpg" if reinforce else "vanilla"
    unread = [name for name in _SETTINGS if name not in _READS[mode]]
    warn_no_effect(options, unread, f"on the loss {mode!r}", framework="verl")
    if mode in FIXED_AGGREGATION and options.loss_agg_mode != SEQUENCE_MEAN:
        warn_no_effect(options, ("loss_agg_mode",), f"on the loss {mode!r}", framework="verl")
    if mode == "gspo" and options.loss_agg_mode != SEQUENCE_MEAN:
        tell(
            f"gspo is reduced by loss_agg_mode={options.loss_agg_mode!r}, as in verl 0.9.1; verl up to 0.9.0 always "
            f"took {SEQUENCE_MEAN!r}, as the paper does. Set it to have that."
        )
    if "clip_ratio_c" in _READS[mode]:
        check_number("clip_ratio_c", options.clip_ratio_c)  # None would leave out the clip
    bounds: Any = (options.clip_ratio_low, options.clip_ratio_high)
    if "clip_ratio" in _READS[mode]:
        if None not in bounds:
            why = "unless clip_ratio_low or clip_ratio_high is None (both are 0.2)"
            warn_no_effect(options, ("clip_ratio",), why, framework="verl")
        else:
            check_number("clip_ratio", options.clip_ratio)
    if mode in FIXED_AGGREGATION or options.loss_agg_mode != "seq-mean-token-sum-norm":
        why = "unless loss_agg_mode is 'seq-mean-token-sum-norm'"
        warn_no_effect(options, ("loss_scale_factor",), why, framework="verl")
    if not options.use_kl_loss:
        warn_no_effect(options, ("kl_loss_coef", "kl_loss_type"), "without use_kl_loss", framework="verl")


def _kl(options: VerlLossOptions) -> KLPenalty | None:
    if not options.use_kl_loss:
        return None
    kind = options.kl_loss_type
    if kind in ("full", "full+", "abs+"):
        why = "verl does not implement it either" if kind != "abs+" else "its gradient is that of k2, its value not"
        raise NotImplementedError(f"kl_loss_type must be one of {list(KL_TYPES)}, but got {kind!r} ({why}).")
    check_choice("kl_loss_type", kind, KL_TYPES)
    check_number("kl_loss_coef", options.kl_loss_coef)
    if options.kl_loss_coef < 0:
        raise ValueError(f"kl_loss_coef must be at least 0, but got {options.kl_loss_coef}.")
    if options.kl_loss_coef == 0:
        tell("use_kl_loss has no effect with kl_loss_coef=0: the KL term is left out.")
        return None
    estimator = KL_TYPES[kind]
    return KLPenalty(
        coef=options.kl_loss_coef, estimator=estimator, max_value=MAX_K3 if estimator in ("k3", "k3+") else None
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _dro_beta(options: VerlLossOptions) -> float:
    if options.dro_beta is None:
        raise ValueError("dro_beta must be a positive number with loss_mode='dro', but got None.")
    return options.dro_beta
