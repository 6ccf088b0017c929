"""What the parts of a module may ask of it, so that they do not import it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_module.measuring import Measuring
from lightning_module.rewards import Rewards
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.scoring import Scores


class Host(Protocol):
    """The part of :class:`~lightning_module.OffPolicyGRPOModule` that generation and validation use."""

    policy: Any
    settings: dict[str, Any]
    sampling: Sampling
    rewards: Rewards
    measuring: Measuring
    objective: Objective
    """Assigning another one changes the loss from the next micro-batch on."""
    stages: Stages
    """The objective in its two parts."""

    @property
    def trainer(self) -> Trainer:
        """Of Lightning."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""

    def score(self, inputs: dict[str, Any], *, batch_size: int | None = None) -> Scores:
        """Log-probs of the completions under the policy now."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Of ``nn.Module``."""
