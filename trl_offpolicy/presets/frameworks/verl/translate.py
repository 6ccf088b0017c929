"""verl's ``algorithm.rollout_correction`` and policy losses as a preset: the same numbers as verl 0.9.1."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.correction.terms.keep import reach
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.functional.masks import Statistic
from trl_offpolicy.objective.losses import GPG
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, tell, warn_no_effect
from trl_offpolicy.presets.frameworks.verl.advantages import VerlAdvantageOptions, estimator, reward_kl
from trl_offpolicy.presets.frameworks.verl.config import configuration, flatten
from trl_offpolicy.presets.frameworks.verl.losses import (
    SEQUENCE_MEAN,
    VerlLossOptions,
    check_loss_options,
    policy_loss,
    reduced,
)
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.types import Ratio

REJECTION_MODES: dict[str, tuple[Statistic, Level]] = {
    "token_k1": ("k1", "token"),
    "token_k2": ("k2", "token"),
    "token_k3": ("k3", "token"),
    "seq_sum_k1": ("k1", "sequence"),
    "seq_sum_k2": ("k2", "sequence"),
    "seq_sum_k3": ("k3", "sequence"),
    "seq_mean_k1": ("k1", "sequence_mean"),
    "seq_mean_k2": ("k2", "sequence_mean"),
    "seq_mean_k3": ("k3", "sequence_mean"),
    "seq_max_k2": ("k2", "sequence_max"),
    "seq_max_k3": ("k3", "sequence_max"),
    "binary_kl": ("binary_kl_both", "token"),  # of verl's pull request 6800 (KPop), which 0.9.1 does not have
}
LEVELS: dict[str, Level] = {"token": "token", "sequence": "sequence"}
LOSSES = ("ppo_clip", "reinforce")
OVER_RESPONSE = ("gspo", "geo_mean", "sapo")
OVER_BATCH = ("clip_cov", "kl_cov")
"""Losses that average over the tokens of a response, or of the micro-batch."""
Read = TypeVar("Read")
_NUMBER = re.compile(r"\s*[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf)\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class VerlOptions:
    """``algorithm.rollout_correction`` with the defaults of verl's ``rollout_correction.yaml``, and ``use_v1``."""

    rollout_is: str | None = None
    rollout_is_threshold: float | str | None = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str | None = None
    use_v1: bool = True

    @property
    def reinforce(self) -> bool:
        """True in bypass mode with explicit weights (``loss_type="reinforce"``)."""
        return self.bypass_mode and self.loss_type == "reinforce"

    @property
    def ratio(self) -> Ratio:
        """The ratio of weights and rejection: current/sampling in bypass mode, which has no pi_old."""
        return "current/sampling" if self.bypass_mode else "old/sampling"


_OWN = tuple(item.name for item in fields(VerlOptions))
_KNOWN = configuration(
    tuple(name for name in _OWN if name != "use_v1"), tuple(item.name for item in fields(VerlAdvantageOptions))
)


def from_verl(**options_given: Any) -> Preset:
    """A preset from verl's configuration; an option that is left out has the default of verl's YAML.

    Pass options one by one (``rollout_is="token"``) or in verl's sections: ``from_verl(**config)`` with all of
    ``ppo_trainer.yaml``, with ``actor_rollout_ref.actor`` or ``algorithm`` alone, or
    ``from_verl(actor=..., algorithm=...)``. Options that are not about the loss (``optim``, ``fsdp_config``,
    ``ppo_mini_batch_size``) are ignored. One warning lists them and says why.

    - rollout_is: "token" or "sequence" (product of ratios); None = no weights. (verl's Python dataclass says
      "sequence", but its trainers read the YAML, which says null.)
    - rollout_is_threshold: ``2.0`` caps; ``"0.5_5.0"`` is IcePop: weight 0 outside, nothing rejected.
    - rollout_is_batch_normalize: weights divided by their mean over the original tokens (or sequences): over the whole
      batch in decoupled mode, over each micro-batch in bypass mode (here of one rank; verl takes all ranks).
    - rollout_rs: comma-joined names of :data:`REJECTION_MODES`, which must all keep a token; each measures the original
      mask.
    - rollout_rs_threshold: one value for all or one each, comma-joined. k1: ``"low_high"``, or ``u`` for ``1/u_u``;
      k2, k3, binary_kl: an upper bound.
    - bypass_mode, loss_type: there are two policies, and terms read pi / mu. "ppo_clip" (default) clips pi / mu and
      applies no weight, "reinforce" multiplies -A log pi by the weights.
    - use_v1: verl's ``trainer.use_v1`` (True in its ``ppo_trainer.yaml``; the trainer without it is deprecated). See
      "Denominator" below.

    Loss: the actor's ``loss_mode`` (vanilla, dppo_tv, dppo_kl, gspo, sapo, gpg, clip_cov, kl_cov, geo_mean, dro,
    cispo) with its settings (:class:`VerlLossOptions`). The default is clip 0.2 and dual clip 3 (Eq. 5 of Ye et al.
    2020). ``loss_agg_mode`` is verl's "token-mean" for all of them, GSPO too; sapo and geo_mean do not read it.
    ``clip_ratio`` counts only where ``clip_ratio_low`` or ``clip_ratio_high`` is None, and dppo's truncation is
    ``clip_ratio_c``. In bypass mode ``loss_type`` names the loss.
    Denominator: in decoupled mode verl replaces ``response_mask``, so rejected tokens leave the sum and the KL term.
    Its V1 trainer counts the tokens of ``loss_mask``, which the correction does not touch, so rejected tokens stay in
    the denominator. With ``use_v1=False``, the deprecated trainer, they leave it too, which needs the whole generation
    batch here. In bypass mode they stay in both, and keep their KL term. verl's ``global_batch_info`` comes from the
    trainer here: ``Reduction(world_size=dp_size, tokens=batch_num_tokens, sequences=global_batch_size)``.
    Beside the loss: ``use_kl_loss``, ``kl_loss_coef``, ``kl_loss_type`` (:data:`~.losses.KL_TYPES`; k3 capped at
    10 nats), ``entropy_coeff`` (reduced as the loss is), ``loss_scale_factor`` (L of seq-mean-token-sum-norm).
    Advantages: ``adv_estimator`` with ``norm_adv_by_std_in_grpo``, ``gamma`` and ``handle_zero_tail``
    (:data:`~.advantages.ESTIMATORS`); without it they are the trainer's own. ``use_kl_in_reward`` with ``kl_penalty``
    and ``kl_ctrl`` takes the KL from the rewards.

    **Bug reproduced:** the k1 statistic is -log rho but is compared with log low and log high, so ``"0.5_4.0"`` keeps
    rho in [1/4, 2], not in [0.5, 4]. :class:`~trl_offpolicy.RatioBand` says what is meant.

    Not reproduced: ``"0.5_5_0"`` is an error here (verl reads 0.5 to 50). A bound that no ratio reaches (1e9) is left
    open with a warning. Non-finite log-probs are neutral (verl spreads NaN). A batch without a kept token has loss 0
    (verl: 0/0). The seq-mean aggregations count empty responses, as verl's trainers do. Means are over all trainable
    tokens, in verl over the kept ones. A warning says where that differs: gspo, geo_mean, sapo and
    "seq-mean-token-mean" if single tokens are rejected, the covariance of clip_cov and kl_cov if anything is.
    geo_mean's mean over the responses is that of the whole step (verl: of each micro-batch, whatever their number).
    Advantages are made in float64, so that equal rewards have none (verl: float32, whose rounding is divided by 1e-6).
    The log-ratio of clip_cov, kl_cov and geo_mean is held within +-20 nats, as that of the others (verl: not theirs).

    Raises:
        UnknownOptionError: an option that verl does not have.
        ValueError: a value that verl would refuse or would read as something else, or an option that is given twice.
        NotImplementedError: what verl has and this kit lacks (GAE, an adaptive KL in the reward).

    Example:
        >>> from_verl(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01).formula
        'w = min(rho_t, 2); keep if mean_t k3 <= 0.01'

    Reference: verl 0.9.1, ``trainer/ppo/rollout_corr_helper.py``, ``trainer/ppo/core_algos.py``.
    """
    options, loss, advantages = _read(options_given)
    _check(options)
    check_loss_options(loss, bypass=options.bypass_mode, reinforce=options.reinforce)
    if options.bypass_mode:
        loss = replace(loss, loss_mode="vanilla")
    weight, keep = _weight(options), _keep(options)
    _say_what_sees_rejected_tokens(loss, keep)
    correction = Correction(weight=weight, keep=keep)
    if options.bypass_mode:
        correction = replace(correction, normalize_over="micro_batch")
    if options.rollout_is_batch_normalize and weight is not None:
        correction = replace(correction, normalize="original")
    # In decoupled mode rejection replaces verl's response mask; its V1 trainer counts another mask, which stays whole.
    leaves = bool(keep) and not options.bypass_mode and not options.use_v1
    how: dict[str, Any] = {"mode": "decoupled", "kl_on": "kept", "denominator": "kept" if leaves else "all"}
    if options.bypass_mode:
        how |= {"mode": "bypass", "kl_on": "all"}
    how |= reduced(loss)
    if (in_reward := reward_kl(advantages)) is not None:
        if how.get("kl") is not None:
            raise NotImplementedError(
                "use_kl_loss must be False with use_kl_in_reward: one KL penalty is possible here."
            )
        how["kl"] = in_reward
    return make_preset(
        "verl",
        correction,
        citation="verl 0.9.1, algorithm.rollout_correction",
        notes="What verl computes with these options.",
        advantages=estimator(advantages, weighted=weight is not None and not options.bypass_mode),
        policy_loss=GPG() if options.reinforce else policy_loss(loss),
        **how,
    )


def _read(given: dict[str, Any]) -> tuple[VerlOptions, VerlLossOptions, VerlAdvantageOptions]:
    """The options of the rollout correction, of the loss and of the advantages, sorted by their names."""
    flat = flatten(given, _KNOWN)

    def read(cls: type[Read], section: str) -> Read:
        own = {item.name: flat[item.name] for item in fields(cls) if item.name in flat}  # type: ignore[arg-type]
        return read_options(cls, own, framework=section, numbers_as_text=True)

    return (
        read(VerlOptions, "verl's rollout_correction"),
        read(VerlLossOptions, "verl's actor"),
        read(VerlAdvantageOptions, "verl's algorithm"),
    )


def _check(options: VerlOptions) -> None:
    """Refuse an unknown choice, and warn about options that verl would silently ignore."""
    if options.rollout_is is not None:
        check_choice("rollout_is", options.rollout_is, LEVELS)
    if options.loss_type is not None:
        check_choice("loss_type", options.loss_type, LOSSES)
    if not options.bypass_mode and options.loss_type == "reinforce":
        tell("loss_type='reinforce' has no effect without bypass_mode, in verl as here.")
    if options.rollout_is is None:
        unread = ("rollout_is_threshold", "rollout_is_batch_normalize")
        warn_no_effect(options, unread, "without rollout_is", framework="verl")
    elif options.rollout_is_threshold is None:
        tell(f"rollout_is={options.rollout_is!r} has no effect without rollout_is_threshold, in verl as here.")
    elif options.bypass_mode and not options.reinforce:
        tell(
            f"rollout_is={options.rollout_is!r} has no effect in bypass_mode with loss_type 'ppo_clip', in verl as "
            "here: the loss's own ratio pi / mu holds the whole shift."
        )
    if options.rollout_rs is None:
        warn_no_effect(options, ("rollout_rs_threshold",), "without rollout_rs", framework="verl")


def _say_what_sees_rejected_tokens(loss: VerlLossOptions, keep: tuple[KeepTerm, ...]) -> None:
    """Warn about means that include rejected tokens: in verl these are padding, here they stay in the means."""
    by_token = any(getattr(term, "level", None) == "token" for term in keep)
    averaged = loss.loss_mode if loss.loss_mode in (*OVER_RESPONSE, *OVER_BATCH) else loss.loss_agg_mode
    over_rows = averaged in OVER_RESPONSE or loss.loss_agg_mode == SEQUENCE_MEAN
    if (keep and averaged in OVER_BATCH) or (by_token and over_rows):
        tell(
            f"{averaged} averages over the tokens that rollout_rs rejects as well; verl leaves them out there, so that "
            "the loss differs where some are rejected."
        )


def _weight(options: VerlOptions) -> Weight | None:
    if options.rollout_is is None or options.rollout_is_threshold is None:
        return None
    low, high = _is_bounds(options.rollout_is_threshold)
    if options.bypass_mode and not options.reinforce:
        return None
    level, where = LEVELS[options.rollout_is], "rollout_is_threshold"
    if low is None:
        return bounds.truncate(level, None, bounds.upper(where, high), options.ratio)
    return bounds.band(level, bounds.lower(where, low), bounds.upper(where, high), options.ratio)


def _keep(options: VerlOptions) -> tuple[KeepTerm, ...]:
    if options.rollout_rs is None:
        return ()
    modes = list(dict.fromkeys(_split("rollout_rs", options.rollout_rs)))
    for mode in modes:
        check_choice("rollout_rs", mode, REJECTION_MODES)
    thresholds = _thresholds(options.rollout_rs_threshold, modes)
    terms = [_term(mode, spec, options.ratio) for mode, spec in zip(modes, thresholds, strict=True)]
    return tuple(term for found in terms for term in found)


def _term(mode: str, spec: str, ratio: Ratio) -> tuple[KeepTerm, ...]:
    statistic, level = REJECTION_MODES[mode]
    where = f"rollout_rs_threshold of {mode}"
    least, largest = reach(statistic, level)
    if statistic != "k1":
        if "_" in spec:
            raise ValueError(f"{where} must be one upper bound, but got {spec!r}.")
        high = bounds.upper(where, _positive(where, spec), largest)
        return bounds.divergence_band(statistic, level, None, high, ratio)
    low, high = _bounds(where, spec)
    low = 1 / high if low is None else low
    if low > high:
        raise ValueError(f"{where} must be 'low_high' with low <= high, or a number >= 1, but got {spec!r}.")
    # verl compares -log rho with the logs of bounds on rho; its sign is reproduced here.
    low, high = (math.log(bound) for bound in (low, high))
    floor, cap = bounds.lower(f"log {where}", low, least), bounds.upper(f"log {where}", high, largest)
    return bounds.divergence_band("k1", level, floor, cap, ratio)


def _thresholds(given: float | str | None, modes: list[str]) -> list[str]:
    if given is None:
        raise ValueError("rollout_rs_threshold must be given with rollout_rs, but got None.")
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ValueError(f"rollout_rs_threshold must be a number or a string, but got {given!r}.")
    specs = _split("rollout_rs_threshold", given) if isinstance(given, str) else [repr(float(given))]
    if len(specs) not in (1, len(modes)):
        raise ValueError(f"rollout_rs_threshold must hold 1 or {len(modes)} values for {modes}, but got {given!r}.")
    return specs * len(modes) if len(specs) == 1 else specs


def _is_bounds(given: float | str) -> tuple[float | None, float]:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ValueError(f"rollout_is_threshold must be a number or a string, but got {given!r}.")
    low, high = _bounds("rollout_is_threshold", given if isinstance(given, str) else repr(float(given)))
    if low is not None and low > high:
        raise ValueError(f"rollout_is_threshold must be 'low_high' with low <= high, but got {given!r}.")
    return low, high


def _bounds(where: str, spec: str) -> tuple[float | None, float]:
    """The bounds in ``"2.0"`` or ``"0.5_5.0"``. Anything else is refused, also ``5_0``, which Python reads as 50."""
    parts = spec.split("_")
    if len(parts) > 2:
        raise ValueError(f"{where} must be 'high' or 'low_high', but got {spec!r} with {len(parts)} parts.")
    numbers = [_positive(where, part) for part in parts]
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _positive(where: str, text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not value > 0:
        raise ValueError(f"{where} must hold positive numbers, but got {text!r}.")
    return value


def _split(where: str, text: object) -> list[str]:
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
    parts = [part for part in parts if part]
    if not parts:
        raise ValueError(f"{where} must be a non-empty string (or None), but got {text!r}.")
    return parts
