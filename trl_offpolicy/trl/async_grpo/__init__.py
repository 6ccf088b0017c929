"""TRL's experimental ``AsyncGRPOTrainer`` with this kit's objective. Not run on FlashAttention-3 by us."""

from trl_offpolicy.trl.async_grpo.trainer import OffPolicyAsyncGRPOTrainer

__all__ = ["OffPolicyAsyncGRPOTrainer"]
