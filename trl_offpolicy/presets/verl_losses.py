"""verl's ``actor.policy_loss`` and clip options as a policy loss and an aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.losses import CISPO, DPPO, DRO, GMPO, GPG, SAPO, ClipCov, GSPOToken, KLCov, PolicyLoss, PPOClip
from trl_offpolicy.presets.options import check_choice, tell, warn_no_effect

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
FIXED_AGGREGATION = ("sapo", "geo_mean")
"""Losses that do not read ``loss_agg_mode``: both are the mean over responses of their token mean."""


@dataclass(frozen=True, kw_only=True)
class VerlLossOptions:
    """The part of verl's ``ActorConfig`` that its policy losses read, with the defaults of verl's ``actor.yaml``."""

    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.2
    clip_ratio_high: float | None = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None

    @property
    def low(self) -> float:
        """``clip_ratio_low``, or ``clip_ratio`` in its place."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """``clip_ratio_high``, or ``clip_ratio`` in its place."""
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
        low=o.low, high=o.high, fraction=o.clip_cov_ratio, cov_low=o.clip_cov_lb, cov_high=o.clip_cov_ub
    ),
    "kl_cov": lambda o: KLCov(fraction=o.kl_cov_ratio, coef=o.ppo_kl_coef),
    "geo_mean": lambda o: GMPO(low=o.low, high=o.high),
    "dro": lambda o: DRO(beta=_dro_beta(o)),
    "cispo": lambda o: CISPO(low=1 - o.low if o.low < 1 else None, high=1 + o.high),
}
LOSS_MODES = tuple(_BUILD)


def policy_loss(options: VerlLossOptions) -> PolicyLoss:
    """The loss that ``loss_mode`` names, with verl's settings."""
    return _BUILD[options.loss_mode](options)


def aggregation(options: VerlLossOptions) -> Aggregation:
    """How verl reduces that loss."""
    if options.loss_mode in FIXED_AGGREGATION:
        return "seq_mean_token_mean"
    return AGGREGATIONS[options.loss_agg_mode]


def check_loss_options(options: VerlLossOptions, *, bypass: bool, reinforce: bool) -> None:
    """Choices are known, and what verl would silently leave out is said.

    Raises:
        ValueError: an unknown loss or aggregation.
    """
    check_choice("loss_mode", options.loss_mode, LOSS_MODES)
    check_choice("loss_agg_mode", options.loss_agg_mode, AGGREGATIONS)
    if bypass and options.loss_mode != "vanilla":
        tell(
            f"loss_mode={options.loss_mode!r} has no effect in bypass_mode, in verl as here: loss_type names the loss."
        )
    mode = ("gpg" if reinforce else "vanilla") if bypass else options.loss_mode
    unread = [name for name in _SETTINGS if name not in _READS[mode]]
    warn_no_effect(options, unread, f"on the loss {mode!r}", framework="verl")
    if mode in FIXED_AGGREGATION:
        warn_no_effect(options, ("loss_agg_mode",), f"on the loss {mode!r}", framework="verl")
    bounds: Any = (options.clip_ratio_low, options.clip_ratio_high)
    if "clip_ratio" in _READS[mode] and None not in bounds:
        why = "unless clip_ratio_low or clip_ratio_high is None (both are 0.2)"
        warn_no_effect(options, ("clip_ratio",), why, framework="verl")


def _dro_beta(options: VerlLossOptions) -> float:
    if options.dro_beta is None:
        raise ValueError("dro_beta must be a positive number with loss_mode='dro', but got None.")
    return options.dro_beta
