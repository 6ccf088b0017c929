"""Public path; the code is in :mod:`trl_offpolicy.trl.async_grpo`."""

from trl_offpolicy.trl.async_grpo import OffPolicyAsyncGRPOTrainer

__all__ = ["OffPolicyAsyncGRPOTrainer"]
