"""NeMo-RL's ``loss_fn`` (ClippedPGLossFn) as a preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trl_offpolicy.checks import check_number, check_positive_or_none
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import RawWeight
from trl_offpolicy.functional.kl import k3
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.functional.policy_losses import unit_ratio
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import CISPO, GPG, PolicyLoss, PPOClip
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, warn_no_effect
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.types import Ratio

TYPES = ("tis", "icepop", "seq-mask-tis")
ESTIMATORS = ("k1", "k2", "k3")
_TRUNCATED = (
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
)


@dataclass(frozen=True, kw_only=True)
class NeMoRLOptions:
    """``loss_fn`` with NeMo-RL's names and defaults."""

    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    use_cispo: bool = False
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    positive_example_nll_weight: float = 0.0

    @property
    def level(self) -> Level:
        """Level of the weight: the product of ratios with ``sequence_level_importance_ratios``."""
        return "sequence" if self.sequence_level_importance_ratios else "token"

    @property
    def ratio(self) -> Ratio:
        """The ratio of the weights. With ``force_on_policy_ratio`` NeMo-RL takes pi for pi_old everywhere."""
        return "current/sampling" if self.force_on_policy_ratio else "old/sampling"


@dataclass(frozen=True, kw_only=True)
class ScoreFunctionKL(KLPenalty):
    """NeMo-RL's KL term: the estimate times pi / sg[pi], a factor of 1 that adds the score-function gradient.

        clip(pi / sg[pi] k(clip(x, -c, c)), -max_value, max_value), x = log(pi / ref)

    where k is k1, k2 or k3 and sg stops the gradient. The gradient is (k + dk/dx) times that of log pi, which for k3 is
    x: that of k2. It ends where either clip acts.

    Args:
        input_clamp: c, nats; None = no clip.
    """

    input_clamp: float | None = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_positive_or_none(input_clamp=self.input_clamp)

    def __call__(self, log_ratios: Tensor, policy_log_ratios: Tensor) -> Tensor:
        """The estimate of each token, (B, T), without the coefficient; ``policy_log_ratios`` are not read."""
        held = log_ratios if self.input_clamp is None else log_ratios.clamp(-self.input_clamp, self.input_clamp)
        estimate = {"k1": lambda: held, "k2": lambda: held.square() / 2, "k3": lambda: k3(-held)}[self.estimator]()
        value = unit_ratio(held) * estimate
        return value if self.max_value is None else value.clamp(-self.max_value, self.max_value)


def from_nemo_rl(**loss_fn: object) -> Preset:
    """A preset from NeMo-RL's ``loss_fn`` options; an option that is left out has NeMo-RL's default.

    - use_importance_sampling_correction: multiplies the loss by pi_old / mu. Raw without the next three.
    - truncated_importance_sampling_type: "tis" holds the weight in [ratio_min or 0, ratio]; "icepop" has weight 0
      outside [ratio_min, ratio]; "seq-mask-tis" keeps responses with a geometric mean inside, with raw token weights.
    - sequence_level_importance_ratios: the loss's ratio is the geometric mean (GSPO), the weight the product of ratios.
    - token_level_loss: mean over tokens, else over responses. ratio_clip_min, _max, ratio_clip_c (dual clip),
      use_cispo, disable_ppo_ratio (-A log pi).
    - force_on_policy_ratio: -A times a ratio of 1 with the gradient of pi. It is made for one update on a batch; pi
      then takes the place of pi_old in the weights too.
    - reference_policy_kl_penalty, _kl_type, kl_input_clamp_value, kl_output_clamp_value: the KL term, with the
      score-function gradient of each token (:class:`ScoreFunctionKL`).

    Dropped tokens stay in the denominator and keep their KL term. NeMo-RL does not clamp log-ratios; a weight that
    overflows or is NaN is 0 there ("tis": its floor), and here capped or 1. A log-ratio of -inf has weight 0 there, and
    1 here. Without token_level_loss a response without a trainable token counts here; NeMo-RL leaves those with
    ``sample_mask`` 0 out of its mean.

    Raises:
        UnknownOptionError: an option that NeMo-RL does not have.
        ValueError: a value that NeMo-RL refuses.
        NotImplementedError: the KL in the reward or weighted by pi / mu (with a penalty of 0 a warning, because NeMo-RL
            does not read them then), or the loss on positive examples.

    Example:
        >>> from_nemo_rl(
        ...     use_importance_sampling_correction=True,
        ...     truncated_importance_sampling_type="icepop",
        ...     truncated_importance_sampling_ratio_min=0.5,
        ...     truncated_importance_sampling_ratio=5.0,
        ... ).formula
        'w = rho_t if 0.5 <= rho_t <= 5 else 0; nothing dropped'

    Reference: NeMo-RL 7ea279abf, ``nemo_rl/algorithms/loss/loss_functions.py``, ``ClippedPGLossFn``.
    """
    options = read_options(NeMoRLOptions, loss_fn, framework="NeMo-RL's loss_fn", numbers_as_text=True)
    _check(options)
    return make_preset(
        "nemo-rl",
        _correction(options),
        citation="NeMo-RL, ClippedPGLossFn",
        notes="What NeMo-RL computes with these options.",
        source_clamp=None,
        policy_loss=_policy_loss(options),
        kl=_kl(options),
        aggregation="token_mean" if options.token_level_loss else "seq_mean_token_mean",
    )


def _check(options: NeMoRLOptions) -> None:
    of_kl, unread = ("use_kl_in_reward", "use_on_policy_kl_approximation"), options.reference_policy_kl_penalty == 0
    if unread:
        warn_no_effect(options, of_kl, "with reference_policy_kl_penalty=0", framework="NeMo-RL")
    for name in of_kl:
        if getattr(options, name) and not unread:
            raise NotImplementedError(f"{name} must be False: the KL is in the loss here, without a weight of pi / mu.")
    if options.positive_example_nll_weight:
        raise NotImplementedError("positive_example_nll_weight must be 0: that loss has no counterpart here.")
    if options.sequence_level_importance_ratios and options.token_level_loss:
        raise ValueError("token_level_loss must be False with sequence_level_importance_ratios, but got True.")
    if options.use_cispo:
        _check_cispo(options)
    _check_truncation(options)


def _check_cispo(options: NeMoRLOptions) -> None:
    """Raise for what NeMo-RL does not let CISPO meet."""
    for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
        if getattr(options, name):
            raise ValueError(f"{name} must be False with use_cispo (NeMo-RL refuses it), but got True.")
    if options.ratio_clip_c is not None:
        raise ValueError(
            f"ratio_clip_c must be None with use_cispo (NeMo-RL refuses it), but got {options.ratio_clip_c}."
        )
    if not options.token_level_loss:
        raise ValueError("token_level_loss must be True with use_cispo (NeMo-RL refuses it), but got False.")


def _check_truncation(options: NeMoRLOptions) -> None:
    """Raise for bounds of the weights that NeMo-RL refuses, and warn about those that it does not read."""
    kind, high, low = (getattr(options, name) for name in _TRUNCATED)
    if kind is None:
        if high is not None:
            raise ValueError(
                f"{_TRUNCATED[0]} must be one of {list(TYPES)} with {_TRUNCATED[1]} (NeMo-RL refuses it), but got None."
            )
        warn_no_effect(options, _TRUNCATED[2:], f"without {_TRUNCATED[0]}", framework="NeMo-RL")
        return
    check_choice(_TRUNCATED[0], kind, TYPES)
    if not options.use_importance_sampling_correction:
        raise ValueError(
            f"use_importance_sampling_correction must be True with {_TRUNCATED[0]} (NeMo-RL refuses it), but got False."
        )
    if high is None or high <= 0:
        raise ValueError(f"{_TRUNCATED[1]} must be positive with {_TRUNCATED[0]}, but got {high!r}.")
    if kind != "tis" and low is None:
        raise ValueError(f"{_TRUNCATED[2]} must be given with {_TRUNCATED[0]} {kind!r}, but got None.")
    if low is not None and low > high:
        raise ValueError(f"{_TRUNCATED[2]} must be at most {_TRUNCATED[1]}={high}, but got {low!r}.")
    if kind == "seq-mask-tis" and options.sequence_level_importance_ratios:
        raise ValueError(
            f"sequence_level_importance_ratios must be False with {_TRUNCATED[0]} {kind!r} (NeMo-RL refuses it), but "
            "got True."
        )


def _correction(options: NeMoRLOptions) -> Correction:
    if not options.use_importance_sampling_correction:
        return Correction()
    kind = options.truncated_importance_sampling_type
    if kind is None:
        return Correction(weight=RawWeight(level=options.level, ratio=options.ratio))
    floor = bounds.lower(_TRUNCATED[2], options.truncated_importance_sampling_ratio_min)
    cap = bounds.upper(_TRUNCATED[1], options.truncated_importance_sampling_ratio)
    if kind == "tis":
        return Correction(weight=bounds.truncate(options.level, floor, cap, options.ratio))
    if kind == "icepop":
        return Correction(weight=bounds.band(options.level, floor, cap, options.ratio))
    keep = bounds.ratio_band("sequence_mean", floor, cap, options.ratio)
    return Correction(weight=RawWeight(ratio=options.ratio), keep=keep)


def _policy_loss(options: NeMoRLOptions) -> PolicyLoss:
    for name in ("ratio_clip_min", "ratio_clip_max"):
        check_number(name, getattr(options, name))
    low, high = options.ratio_clip_min, options.ratio_clip_max
    if options.disable_ppo_ratio or options.force_on_policy_ratio:
        return GPG(unit_ratio=options.force_on_policy_ratio)
    if options.use_cispo:
        return CISPO(low=1 - low if low < 1 else None, high=1 + high)
    level: Any = "sequence_mean" if options.sequence_level_importance_ratios else "token"
    return PPOClip(low=low, high=high, dual_clip=options.ratio_clip_c, level=level)


def _kl(options: NeMoRLOptions) -> KLPenalty | None:
    check_choice("reference_policy_kl_type", options.reference_policy_kl_type, ESTIMATORS)
    if options.reference_policy_kl_penalty == 0:
        return None
    estimator: Any = options.reference_policy_kl_type
    return ScoreFunctionKL(
        coef=options.reference_policy_kl_penalty,
        estimator=estimator,
        max_value=options.kl_output_clamp_value,
        input_clamp=options.kl_input_clamp_value,
    )
