"""Public path of the trainer; its code is in :mod:`trl_offpolicy.trl.trainer`."""

from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

__all__ = ["OffPolicyGRPOTrainer"]
