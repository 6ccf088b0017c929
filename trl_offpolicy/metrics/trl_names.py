"""The names under which stock TRL logs what this kit logs as ``offpolicy/loss/*``."""

from __future__ import annotations

from trl_offpolicy.objective.losses import CISPO, VESPO, PPOClip
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.stats import PREFIX


def trl_names(objective: Objective, values: dict[str, float]) -> dict[str, float]:
    """The same quantities under stock TRL's keys, from the ``offpolicy/loss/*`` of a logging window."""
    loss = {key.removeprefix(f"{PREFIX}loss/"): value for key, value in values.items() if "/loss/" in key}
    named = {"entropy": loss["entropy"]}
    if objective.kl is not None:
        named["kl"] = loss["kl"]
    if isinstance(objective.policy_loss, PPOClip):
        named |= {
            "clip_ratio/low_mean": loss["clip_low_fraction"],
            "clip_ratio/high_mean": loss["clip_high_fraction"],
            "clip_ratio/region_mean": loss["clip_region_fraction"],
            "clip_ratio/low_min": loss["response_clip_low_min"],
            "clip_ratio/high_max": loss["response_clip_high_max"],
        }
    elif isinstance(objective.policy_loss, CISPO):
        named["cispo_clip_ratio"] = loss["clip_high_fraction"]
    elif isinstance(objective.policy_loss, VESPO):
        named["vespo/phi_seq_mean"] = loss["gate_mean"]
    return named
