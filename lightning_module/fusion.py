"""Logit fusion in a module: :mod:`trl_offpolicy.engines.logit_fusion` with Lightning's steps and strategies."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_module.host import Host
from trl_offpolicy.engines.logit_fusion import OPTION, TeacherMix
from trl_offpolicy.rollouts.agents import Request
from trl_offpolicy.stats import Stats


def teacher_of(engine: Any) -> TeacherMix | None:
    """The teacher that takes part in an engine's rollouts; None = there is none."""
    mix: TeacherMix | None = getattr(engine, "mix", None)
    return mix


def check_teacher(module: Host, engine: Any) -> None:
    """Raise if the teacher of the module's engine cannot take part.

    Raises:
        NotImplementedError: the model is sharded; no test has run that.
        ValueError: shares by prompt do not go with turns, which have prompts of their own.
    """
    mix, agents = teacher_of(engine), module.agents
    if mix is None:
        return
    if not isinstance(module.trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise NotImplementedError(f"{OPTION} must be left out with a sharded model: no test has run that.")
    loops = agents.has_tools or agents.environments is not None or agents.rollout is not None
    if mix.fusion.difficulty is not None and loops:
        raise ValueError(f"{OPTION}.difficulty must be left out with tools, environments and a rollout function.")


def plan_teacher(module: Host, engine: Any, request: Request, *, learning: bool) -> None:
    """Set the teacher's shares for what is sampled next.

    Args:
        module: the module.
        engine: its engine.
        request: what is sampled.
        learning: False in a validation, where the policy samples alone.
    """
    mix = teacher_of(engine)
    if mix is None:
        return
    steps = module.trainer.estimated_stepping_batches if learning else 0  # may be infinite
    run_steps = int(steps) if math.isfinite(steps) else 0
    share = mix.fusion.share(module.trainer.global_step, run_steps) if learning else 0.0
    mix.plan(request.rows[:: request.n], share=share)


def teacher_stats(engine: Any, device: torch.device) -> Stats:
    """How much the teacher took part in the generation batch; empty without one."""
    mix = teacher_of(engine)
    return Stats({}) if mix is None else mix.stats(device)
