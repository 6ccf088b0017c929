"""slime's masked importance sampling (``train_infer_mismatch_helper/mis.py``) as a preset."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, RawWeight, Weight
from trl_offpolicy.functional.levels import Level
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, tell, warn_no_effect
from trl_offpolicy.presets.preset import Preset, make_preset

LEVELS: dict[str, Level] = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean"}
MODES = ("truncate", "clip", "mask")
_TIS = ("tis_level", "tis_mode", "tis_upper_bound", "tis_lower_bound", "tis_batch_normalize")
_RS = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")


@dataclass(frozen=True, kw_only=True)
class SlimeOptions:
    """The options that ``mis.py`` reads. slime has no defaults for them; here everything optional is off."""

    use_tis: bool = True
    use_rs: bool = False
    tis_level: str = "token"
    rs_level: str = "token"
    tis_mode: str = "truncate"
    tis_upper_bound: float = 2.0
    tis_lower_bound: float | None = None
    rs_lower_bound: float | None = None
    rs_upper_bound: float | None = None
    rs_veto_threshold: float | None = None
    tis_batch_normalize: bool = False

    @property
    def tis_bounds(self) -> tuple[float, float]:
        """Lower bound (default 1/upper) and upper bound of the weights."""
        low = 1 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return low, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the rejection, each by default that of TIS."""
        low, high = self.tis_bounds
        if self.rs_lower_bound is not None:
            low = self.rs_lower_bound
        if self.rs_upper_bound is not None:
            high = self.rs_upper_bound
        return low, high


def from_slime(**mis_options: object) -> Preset:
    """A preset from the options of slime's ``mis.yaml``.

    - use_tis, tis_level ("token", "sequence" = product, "geometric" = geometric mean), tis_mode, tis_upper_bound,
      tis_lower_bound (default 1/upper): "truncate" caps, "clip" holds in [lower, upper], "mask" leaves the weight raw
      and drops what is outside.
    - use_rs, rs_level, rs_lower_bound, rs_upper_bound (default: those of TIS): drops what is outside;
      rs_veto_threshold drops a response with a token below it. All measure the original mask.
    - tis_batch_normalize: weights divided by their mean over the original tokens (or sequences) of the micro-batch.

    Loss: slime's default, the mean over responses of their token mean, with the original token count as denominator.
    Dropped tokens lose their KL term too.

    This kit, unlike slime, warns about a bound that no ratio reaches (1e9), which is left open. It also warns that
    without use_tis nothing is rejected either, whatever use_rs says.
    Not reproduced: slime counts sequences without a trainable token as weight 0 in a sequence-level
    tis_batch_normalize; here they are left out of that mean.

    Raises:
        UnknownOptionError: an option that slime does not have.
        ValueError: an unknown level or mode, bounds out of order, or normalisation at the geometric level.

    Example:
        >>> from_slime(tis_mode="clip", tis_upper_bound=4.0).formula
        'w = clip(rho_t, 0.25, 4); nothing dropped'

    Reference: slime 624b824a8, ``examples/train_infer_mismatch_helper/mis.py``.
    """
    options = read_options(SlimeOptions, mis_options, framework="slime's mis.yaml")
    _check(options)
    correction = Correction(normalize_over="micro_batch")
    if options.use_tis:  # slime rejects nothing without it either
        correction = replace(correction, weight=_weight(options), keep=_keep(options))
    if options.use_tis and options.tis_batch_normalize:
        correction = replace(correction, normalize="original")
    return make_preset(
        "slime",
        correction,
        citation="slime, examples/train_infer_mismatch_helper",
        notes="What slime computes with these options.",
        aggregation="seq_mean_token_mean",
        kl_on="kept",
    )


def _check(options: SlimeOptions) -> None:
    check_choice("tis_level", options.tis_level, LEVELS)
    check_choice("rs_level", options.rs_level, LEVELS)
    check_choice("tis_mode", options.tis_mode, MODES)
    bounds.check_bound("tis_upper_bound", options.tis_upper_bound)
    if options.tis_upper_bound <= 0:
        raise ValueError(f"tis_upper_bound must be positive, but got {options.tis_upper_bound}.")
    if not options.use_tis:
        warn_no_effect(options, _TIS, "without use_tis", framework="slime")
        if options.use_rs:
            tell("use_rs=True has no effect without use_tis, in slime as here: nothing is rejected.")
        return
    if options.tis_batch_normalize and options.tis_level == "geometric":
        raise ValueError("tis_batch_normalize must be False at tis_level 'geometric' (slime refuses it), but got True.")
    if not options.use_rs:
        warn_no_effect(options, _RS, "without use_rs", framework="slime")


def _weight(options: SlimeOptions) -> Weight:
    level, (low, high) = LEVELS[options.tis_level], options.tis_bounds
    if options.tis_mode == "mask":
        return RawWeight(level=level)
    floor = bounds.lower("tis_lower_bound", low) if options.tis_mode == "clip" else None
    return bounds.truncate(level, floor, bounds.upper("tis_upper_bound", high))


def _keep(options: SlimeOptions) -> tuple[KeepTerm, ...]:
    """The bands of both steps; two bands on one level become their overlap."""
    bands: dict[Level, tuple[float, float]] = {}
    if options.tis_mode == "mask":
        bands[LEVELS[options.tis_level]] = options.tis_bounds
    if options.use_rs:
        level, (low, high) = LEVELS[options.rs_level], options.rs_bounds
        known_low, known_high = bands.get(level, (low, high))
        bands[level] = max(low, known_low), min(high, known_high)
    keep: list[KeepTerm] = []
    for level, (low, high) in bands.items():
        where = f"at {level} level, the lower bound", f"at {level} level, the upper bound"
        keep.extend(bounds.ratio_band(level, bounds.lower(where[0], low), bounds.upper(where[1], high)))
    if options.use_rs and options.rs_veto_threshold is not None:
        keep.extend(bounds.veto(bounds.lower("rs_veto_threshold", options.rs_veto_threshold), None))
    return tuple(keep)
