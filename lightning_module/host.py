"""The interface of a module that its parts use, so that they need not import it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_module.auto import AutoCorrection
from lightning_module.experts import Experts
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
    auto: AutoCorrection
    agents: Any
    """What samples (:class:`~lightning_module.agents.Agents`)."""
    compact: Any
    """How rows are split and scored (:class:`~lightning_module.compact.CompactRows`)."""
    control: Any
    """What watches and changes the run (:class:`~lightning_module.control.Control`)."""
    exact: Any
    """The check of an exact engine (:class:`~lightning_module.exact.ExactCheck`)."""
    ahead: Any
    """What samples ahead (:class:`~lightning_module.ahead.ModuleAhead`); None = sample and learn in turn."""
    replay: Any
    """What adds replayed rows (:class:`~lightning_module.replay.ModuleReplay`); None = every row is fresh."""
    experts: Experts
    """Routing replay and what else a mixture of experts asks for."""
    objective: Objective
    """The loss. Assigning another objective changes the loss from the next micro-batch on."""
    stages: Stages
    """The objective in its two parts."""

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks under ``ModelParallelStrategy``; None under another strategy."""

    @property
    def trainer(self) -> Trainer:
        """Lightning's trainer, which runs this module."""

    @property
    def device(self) -> torch.device:
        """The device of this rank's policy."""

    def score(self, inputs: dict[str, Any], *, batch_size: int | None = None, model: Any = None) -> Scores:
        """Log-probs of the completions under the current policy."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register a submodule, as ``nn.Module`` does."""
