"""TRL's experimental ``AsyncGRPOTrainer`` with this kit's objective. We have not run it on FlashAttention-3."""

from trl_offpolicy.trl.async_grpo.trainer import OffPolicyAsyncGRPOTrainer

__all__ = ["OffPolicyAsyncGRPOTrainer"]
