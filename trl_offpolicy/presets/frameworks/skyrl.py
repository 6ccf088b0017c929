"""SkyRL's ``trainer.algorithm.off_policy_correction`` as a preset."""

from __future__ import annotations

from dataclasses import dataclass

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, tell, warn_no_effect
from trl_offpolicy.presets.preset import Preset, make_preset

LEVELS: dict[str, Level] = {"token": "token", "sequence": "sequence"}
METRICS: dict[str, Level] = {"geometric": "sequence_mean", "product": "sequence"}
_CAPS = {"token": "token_tis_ratio_clip_high", "sequence": "sequence_tis_ratio_clip_high"}
_BANDS = {"geometric": ("geo_mask_low", "geo_mask_high"), "product": ("product_mask_low", "product_mask_high")}


@dataclass(frozen=True, kw_only=True)
class SkyRLOptions:
    """``off_policy_correction`` with SkyRL's names and defaults."""

    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0
    sequence_mask_metric: str | None = None
    geo_mask_high: float = 1.01
    geo_mask_low: float = 0.99
    product_mask_high: float = 2.0
    product_mask_low: float = 0.5
    outlier_token_is_threshold_low: float | None = None
    outlier_token_is_threshold_high: float | None = None
    token_mask_is_threshold_low: float | None = None
    token_mask_is_threshold_high: float | None = None


def from_skyrl(**off_policy_correction: object) -> Preset:
    """A preset from SkyRL's ``off_policy_correction`` options; an option that is left out has SkyRL's default.

    - tis_ratio_type: "token" or "sequence" (product of ratios), capped by ``token_tis_ratio_clip_high`` or
      ``sequence_tis_ratio_clip_high``; no floor.
    - sequence_mask_metric: "geometric" keeps [geo_mask_low, geo_mask_high], "product" [product_mask_low, ..._high].
    - outlier_token_is_threshold_low / _high: a response with a token outside is dropped; either may be None.
    - token_mask_is_threshold_low / _high: tokens outside are dropped.

    SkyRL's order is outlier, token mask, TIS, sequence mask, and each aggregates over what the earlier ones kept. Here
    weights come last, which gives the same loss: a sequence mask keeps a response with all its remaining tokens, whose
    weight it cannot change, or drops it. Bounds are inclusive. Dropped tokens stay in the denominator (SkyRL scales the
    advantages by the original mask) and keep their KL term.

    This kit, unlike SkyRL, warns about a bound that no ratio reaches (1e9), which is left open, and about one side of
    the token mask alone, which switches it off. Missing log-probs of the sampler are an error here; in SkyRL they
    switch everything off. Not reproduced: SkyRL keeps NaN log-probs under three of its four masks and clamps the ratio
    of infinite ones to e^+-20; both are neutral here.

    Raises:
        UnknownOptionError: an option that SkyRL does not have.

    Example:
        >>> from_skyrl(tis_ratio_type="token", sequence_mask_metric="geometric").formula
        'w = min(rho_t, 2); keep if 0.99 <= rho_geo <= 1.01'

    Reference: SkyRL a9564572e, ``skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py``.
    """
    options = read_options(SkyRLOptions, off_policy_correction, framework="SkyRL's off_policy_correction")
    _check(options)
    return make_preset(
        "skyrl",
        Correction(weight=_weight(options), keep=_keep(options), measure_on="remaining"),
        citation="SkyRL documentation, 'Off policy correction'",
        notes="What SkyRL computes with these options.",
    )


def _check(options: SkyRLOptions) -> None:
    if options.tis_ratio_type is not None:
        check_choice("tis_ratio_type", options.tis_ratio_type, LEVELS)
    if options.sequence_mask_metric is not None:
        check_choice("sequence_mask_metric", options.sequence_mask_metric, METRICS)
    for level, cap in _CAPS.items():
        if options.tis_ratio_type != level:
            warn_no_effect(options, (cap,), f"with tis_ratio_type={options.tis_ratio_type!r}", framework="SkyRL")
    for metric, names in _BANDS.items():
        if options.sequence_mask_metric != metric:
            why = f"with sequence_mask_metric={options.sequence_mask_metric!r}"
            warn_no_effect(options, names, why, framework="SkyRL")
    low, high = options.token_mask_is_threshold_low, options.token_mask_is_threshold_high
    if (low is None) != (high is None):
        side = "token_mask_is_threshold_low" if high is None else "token_mask_is_threshold_high"
        tell(f"{side} has no effect alone, in SkyRL as here: the token mask needs both bounds.")


def _weight(options: SkyRLOptions) -> Weight | None:
    if options.tis_ratio_type is None:
        return None
    name = _CAPS[options.tis_ratio_type]
    return bounds.truncate(LEVELS[options.tis_ratio_type], None, bounds.upper(name, getattr(options, name)))


def _keep(options: SkyRLOptions) -> tuple[KeepTerm, ...]:
    keep: list[KeepTerm] = []
    low, high = _bounds(options, "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
    if low is not None or high is not None:
        keep.extend(bounds.veto(low, high))
    low, high = options.token_mask_is_threshold_low, options.token_mask_is_threshold_high
    if low is not None and high is not None:
        low, high = _bounds(options, "token_mask_is_threshold_low", "token_mask_is_threshold_high")
        keep.extend(bounds.ratio_band("token", low, high))
    if options.sequence_mask_metric is not None:
        low, high = _bounds(options, *_BANDS[options.sequence_mask_metric])
        keep.extend(bounds.ratio_band(METRICS[options.sequence_mask_metric], low, high))
    return tuple(keep)


def _bounds(options: SkyRLOptions, low: str, high: str) -> tuple[bounds.Bound, bounds.Bound]:
    return bounds.lower(low, getattr(options, low)), bounds.upper(high, getattr(options, high))
