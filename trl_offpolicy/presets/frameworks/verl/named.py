"""verl's 19 named configurations, under the names and options of its ``RolloutCorrectionConfig`` class methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trl_offpolicy.presets.frameworks.verl.translate import from_verl
from trl_offpolicy.presets.preset import Preset

Threshold = float | str
_GEO = "0.999_1.001"


def decoupled_token_is(threshold: Threshold = 2.0) -> Preset:
    """Token TIS."""
    notes = "Mild lag or mismatch: low variance, biased where it truncates."
    return _named("decoupled_token_is", notes, rollout_is="token", rollout_is_threshold=threshold)


def decoupled_seq_is(threshold: Threshold = 2.0) -> Preset:
    """Sequence TIS."""
    notes = "Short responses: the product is almost always truncated on long ones."
    return _named("decoupled_seq_is", notes, rollout_is="sequence", rollout_is_threshold=threshold)


def decoupled_token_icepop(threshold: float = 5.0, threshold_lower: float = 0.5) -> Preset:
    """IcePop."""
    notes = "MoE models, a few tokens that dominate. Above 10 % outside, fix the engines instead."
    band = f"{threshold_lower}_{threshold}"
    return _named("decoupled_token_icepop", notes, rollout_is="token", rollout_is_threshold=band)


def decoupled_seq_is_rs(is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.5_2.0") -> Preset:
    """Sequence TIS and rejection on the product."""
    notes = "A hard region on the product beside the weight; keeps rho_seq in [1/2, 1/0.5] by verl's sign of k1."
    return _both("decoupled_seq_is_rs", notes, "sequence", is_threshold, "seq_sum_k1", rs_threshold)


def decoupled_geo_rs(rs_threshold: Threshold = _GEO) -> Preset:
    """Geometric rejection."""
    notes = "Outliers in long responses; the default band is tight, 0.99_1.01 is milder."
    return _named("decoupled_geo_rs", notes, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)


def decoupled_geo_rs_seq_tis(is_threshold: Threshold = 2.0, rs_threshold: Threshold = _GEO) -> Preset:
    """Geometric rejection and sequence TIS."""
    notes = "Queue lag, long responses."
    return _both("decoupled_geo_rs_seq_tis", notes, "sequence", is_threshold, "seq_mean_k1", rs_threshold)


def decoupled_geo_rs_token_tis(is_threshold: Threshold = 2.0, rs_threshold: Threshold = _GEO) -> Preset:
    """Geometric rejection and token TIS."""
    notes = "Heavy tails: rejection first, then a mild weight."
    return _both("decoupled_geo_rs_token_tis", notes, "token", is_threshold, "seq_mean_k1", rs_threshold)


def decoupled_k3_rs(rs_threshold: float = 0.01) -> Preset:
    """k3 rejection."""
    notes = "Rejects responses whose tokens differ in both directions, which cancel in a geometric mean."
    return _named("decoupled_k3_rs", notes, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)


def decoupled_k3_rs_seq_tis(is_threshold: Threshold = 2.0, rs_threshold: float = 0.01) -> Preset:
    """k3 rejection and sequence TIS."""
    notes = "Steadier than the geometric mean at a small KL."
    return _both("decoupled_k3_rs_seq_tis", notes, "sequence", is_threshold, "seq_mean_k3", rs_threshold)


def decoupled_k3_rs_token_tis(is_threshold: Threshold = 2.0, rs_threshold: float = 0.01) -> Preset:
    """k3 rejection and token TIS."""
    notes = "Steadier than the geometric mean at a small KL, low variance."
    return _both("decoupled_k3_rs_token_tis", notes, "token", is_threshold, "seq_mean_k3", rs_threshold)


def bypass_ppo_clip() -> Preset:
    """PPO on pi / mu."""
    notes = (
        "Saves verl the forward of pi_old, which aligned steps never pay here; with a large mismatch the clip acts "
        "before the first step."
    )
    return _named("bypass_ppo_clip", notes, bypass_mode=True, loss_type="ppo_clip")


def bypass_ppo_clip_geo_rs(rs_threshold: Threshold = _GEO) -> Preset:
    """PPO on pi / mu with geometric rejection."""
    notes = "One-step asynchronous training."
    return _bypass("bypass_ppo_clip_geo_rs", notes, "ppo_clip", "seq_mean_k1", rs_threshold)


def bypass_ppo_clip_k3_rs(rs_threshold: float = 0.01) -> Preset:
    """PPO on pi / mu with k3 rejection."""
    notes = "One-step asynchronous training, k3 in place of the geometric mean."
    return _bypass("bypass_ppo_clip_k3_rs", notes, "ppo_clip", "seq_mean_k3", rs_threshold)


def bypass_pg_is(threshold: Threshold = 2.0) -> Preset:
    """REINFORCE with sequence TIS."""
    notes = "No clip, an explicit sequence weight."
    options = {"rollout_is": "sequence", "rollout_is_threshold": threshold}
    return _named("bypass_pg_is", notes, bypass_mode=True, loss_type="reinforce", **options)


def bypass_pg_token_icepop(threshold: float = 5.0, threshold_lower: float = 0.5) -> Preset:
    """REINFORCE with IcePop."""
    notes = "No clip; tokens outside the band have weight 0."
    options = {"rollout_is": "token", "rollout_is_threshold": f"{threshold_lower}_{threshold}"}
    return _named("bypass_pg_token_icepop", notes, bypass_mode=True, loss_type="reinforce", **options)


def bypass_pg_geo_rs(rs_threshold: Threshold = _GEO) -> Preset:
    """REINFORCE with geometric rejection."""
    notes = "Rejection only; after a length surge, with half the learning rate."
    return _bypass("bypass_pg_geo_rs", notes, "reinforce", "seq_mean_k1", rs_threshold)


def bypass_pg_geo_rs_seq_tis(is_threshold: Threshold = 2.0, rs_threshold: Threshold = _GEO) -> Preset:
    """REINFORCE with geometric rejection and sequence TIS."""
    notes = "Rejection and an explicit sequence weight."
    options = {"rollout_is": "sequence", "rollout_is_threshold": is_threshold}
    return _bypass("bypass_pg_geo_rs_seq_tis", notes, "reinforce", "seq_mean_k1", rs_threshold, **options)


def bypass_pg_geo_rs_token_tis(is_threshold: Threshold = 2.0, rs_threshold: Threshold = _GEO) -> Preset:
    """REINFORCE with geometric rejection and token TIS."""
    notes = "A saturated PPO clip: tight rejection, plain policy gradient, token weights."
    options = {"rollout_is": "token", "rollout_is_threshold": is_threshold}
    return _bypass("bypass_pg_geo_rs_token_tis", notes, "reinforce", "seq_mean_k1", rs_threshold, **options)


def disabled() -> Preset:
    """Metrics only."""
    return _named("disabled", "The first hundred steps: measure before correcting.")


def _named(name: str, notes: str, **options: object) -> Preset:
    citation = f"verl 0.9.1, RolloutCorrectionConfig.{name}"
    return replace(from_verl(**options), name=f"verl/{name}", citation=citation, notes=notes)


def _both(name: str, notes: str, level: str, cap: Threshold, mode: str, bound: Threshold) -> Preset:
    weights = {"rollout_is": level, "rollout_is_threshold": cap}
    return _named(name, notes, rollout_rs=mode, rollout_rs_threshold=bound, **weights)


def _bypass(name: str, notes: str, loss: str, mode: str, bound: Threshold, **options: object) -> Preset:
    rejection = {"rollout_rs": mode, "rollout_rs_threshold": bound}
    return _named(name, notes, bypass_mode=True, loss_type=loss, **rejection, **options)


_ALL: tuple[Callable[..., Preset], ...] = (
    decoupled_token_is,
    decoupled_seq_is,
    decoupled_token_icepop,
    decoupled_seq_is_rs,
    decoupled_geo_rs,
    decoupled_geo_rs_seq_tis,
    decoupled_geo_rs_token_tis,
    decoupled_k3_rs,
    decoupled_k3_rs_seq_tis,
    decoupled_k3_rs_token_tis,
    bypass_ppo_clip,
    bypass_ppo_clip_geo_rs,
    bypass_ppo_clip_k3_rs,
    bypass_pg_is,
    bypass_pg_token_icepop,
    bypass_pg_geo_rs,
    bypass_pg_geo_rs_seq_tis,
    bypass_pg_geo_rs_token_tis,
    disabled,
)
BUILDERS: dict[str, Callable[..., Preset]] = {f"verl/{function.__name__}": function for function in _ALL}
