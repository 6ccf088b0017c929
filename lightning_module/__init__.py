"""GRPO with rollout correction for PyTorch Lightning: the same objective, engines and metrics as the TRL trainer.

Needs ``lightning`` (``pip install -e ".[lightning]"``); TRL's trainer is never imported.
"""

# ruff: noqa: E402  the first error shall be the one that says what to install

from trl_offpolicy.engines.screen import quiet_vllm
from trl_offpolicy.packages import require

require("lightning", by="lightning_module")
quiet_vllm()

from lightning_module.callbacks import OffPolicyProgressBar, RunFolder
from lightning_module.data import PromptDataModule
from lightning_module.export import SaveModel
from lightning_module.module import OffPolicyGRPOModule
from lightning_module.observer import OffPolicyObserver

__all__ = [
    "OffPolicyGRPOModule",
    "OffPolicyObserver",
    "OffPolicyProgressBar",
    "PromptDataModule",
    "RunFolder",
    "SaveModel",
]
