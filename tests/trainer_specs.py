"""Every policy loss as a configuration of the TRL trainer names it."""

from __future__ import annotations

from typing import Any

from tiny_models import VOCABULARY

from trl_offpolicy.presets.parsing import LOSS_TYPES

NEEDED: dict[str, dict[str, Any]] = {
    "dispo": {
        "correct_threshold": 0.5,
        "low_correct": 0.5,
        "high_correct": 3.0,
        "low_incorrect": 0.2,
        "high_incorrect": 0.2,
    },
    "dro": {"beta": 0.1},
    "espo": {"vocab_size": len(VOCABULARY)},
    "oapl": {"beta": 0.1, "scope": "micro_batch"},
    "quatro": {"scope": "micro_batch"},
}
"""Options without a default, and those without which the trainer's batch does not do."""

HOLDS_SAMPLING = ("ppo_is", "topr", "oapl")


def spec_of(name: str) -> dict[str, Any]:
    """The loss ``name`` with its own aggregation, in YAML form."""
    return {
        "preset": "measure" if name in HOLDS_SAMPLING else "paper/tis",
        "objective": {
            "policy_loss": {"type": name, **NEEDED.get(name, {})},
            "aggregation": LOSS_TYPES[name].aggregation,  # type: ignore[attr-defined]
        },
    }
