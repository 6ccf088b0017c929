"""Public path of the configuration; its code is in :mod:`trl_offpolicy.trl.config`."""

from trl_offpolicy.trl.config import OffPolicyGRPOConfig

__all__ = ["OffPolicyGRPOConfig"]
