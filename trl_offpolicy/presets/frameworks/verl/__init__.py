"""verl: rollout correction, losses, advantage estimators and whole actor configurations."""

from trl_offpolicy.presets.frameworks.verl.translate import from_verl

__all__ = ["from_verl"]
