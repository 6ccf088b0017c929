"""OpenRLHF's vLLM importance-sampling correction as a preset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import RawWeight
from trl_offpolicy.objective.losses import PPOClip
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, tell, warn_no_effect
from trl_offpolicy.presets.preset import Preset, make_preset

TYPES = ("tis", "icepop", "seq-mask-tis")


@dataclass(frozen=True, kw_only=True)
class OpenRLHFOptions:
    """The arguments of OpenRLHF's ``PolicyLoss`` that concern the correction, with the defaults of its command line."""

    enable_vllm_is_correction: bool = False
    vllm_is_correction_type: str = "tis"
    vllm_is_truncated_threshold: Sequence[float] = (0.5, 5.0)
    policy_loss_type: str = "ppo"


def from_openrlhf(**options: object) -> Preset:
    """A preset from OpenRLHF's options; an option that is left out has OpenRLHF's default.

    - enable_vllm_is_correction (default False), vllm_is_truncated_threshold = [low, high].
    - vllm_is_correction_type: "tis" holds the token weight in [low, high]; "icepop" has weight 0 outside;
      "seq-mask-tis" keeps responses with a geometric mean in [low, high] and leaves their token weights raw (its name
      promises a cap that its code does not have).
    - policy_loss_type: "ppo" or "gspo". GSPO takes the geometric mean of pi / mu as its own ratio where the
      correction is enabled, and applies no weight.

    On the command line: ``--algo.advantage.is_correction_enable``, ``_type``, ``_threshold``. Bounds are inclusive.
    Dropped tokens stay in the denominator and keep their KL term. OpenRLHF clamps the log-ratio of its PPO loss to +-20
    nats, as this kit does, but none of the others.

    Non-finite log-ratios are neutral here; in OpenRLHF they are a bound ("tis"), drop the response ("seq-mask-tis") or
    make the loss NaN ("icepop"; so does a ratio that overflows).

    Not reproduced: GSPO's mean counts responses without a trainable token (OpenRLHF: only the others); a batch without
    any has loss 0 (OpenRLHF: 0/0).

    Warned about here, not in OpenRLHF: a bound that no ratio reaches (1e9), which is left open; type and threshold
    without enable_vllm_is_correction or with "gspo".

    Raises:
        UnknownOptionError: an option that OpenRLHF does not have.
        ValueError: an unknown type, or a threshold that is not two numbers.

    Example:
        >>> from_openrlhf(enable_vllm_is_correction=True, vllm_is_correction_type="icepop").formula
        'w = rho_t if 0.5 <= rho_t <= 5 else 0; nothing dropped'

    Reference: OpenRLHF 3c3be623, ``openrlhf/models/loss.py``, ``PolicyLoss``.
    """
    read = read_options(OpenRLHFOptions, options, framework="OpenRLHF's PolicyLoss")
    low, high = _check(read)
    correction = Correction()
    loss: dict[str, Any] = {"policy_loss": PPOClip(level="token"), "aggregation": "token_mean"}
    if read.policy_loss_type == "gspo":
        # The correction only changes the ratio of the loss: pi / mu instead of pi / pi_old.
        loss = {"policy_loss": PPOClip(level="sequence_mean"), "aggregation": "seq_mean_token_mean"}
        loss["mode"] = "bypass" if read.enable_vllm_is_correction else "decoupled"
    elif read.enable_vllm_is_correction:
        correction = _correction(read.vllm_is_correction_type, low, high)
    return make_preset(
        "openrlhf",
        correction,
        citation="OpenRLHF, openrlhf/models/loss.py",
        notes="What OpenRLHF computes with these options.",
        source_clamp=None,
        **loss,
    )


def _check(options: OpenRLHFOptions) -> tuple[float, float]:
    check_choice("vllm_is_correction_type", options.vllm_is_correction_type, TYPES)
    check_choice("policy_loss_type", options.policy_loss_type, ("ppo", "gspo"))
    both = options.vllm_is_truncated_threshold
    if isinstance(both, str) or not isinstance(both, Sequence) or len(both) != 2:
        raise ValueError(f"vllm_is_truncated_threshold must be [low, high], but got {both!r}.")
    for value in both:
        bounds.check_bound("vllm_is_truncated_threshold", value)
    read = ["vllm_is_correction_type"]
    if tuple(both) != (0.5, 5.0):  # a list is not equal to the default, which is a tuple
        read.append("vllm_is_truncated_threshold")
    if not options.enable_vllm_is_correction:
        warn_no_effect(options, read, "without enable_vllm_is_correction", framework="OpenRLHF")
    elif options.policy_loss_type == "gspo":
        warn_no_effect(options, read, "with policy_loss_type='gspo'", framework="OpenRLHF")
        tell("enable_vllm_is_correction applies no weight with policy_loss_type='gspo': the ratio becomes pi / mu.")
    return both[0], both[1]


def _correction(kind: str, low: float, high: float) -> Correction:
    floor = bounds.lower("vllm_is_truncated_threshold[0]", low)
    cap = bounds.upper("vllm_is_truncated_threshold[1]", high)
    if kind == "tis":
        return Correction(weight=bounds.truncate("token", floor, cap))
    if kind == "icepop":
        return Correction(weight=bounds.band("token", floor, cap))
    return Correction(weight=RawWeight(), keep=bounds.ratio_band("sequence_mean", floor, cap))
