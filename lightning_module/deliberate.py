"""Rollouts that are off-policy on purpose, in a module: a teacher that takes part, or noise on the engine's norms.

:mod:`trl_offpolicy.engines.logit_fusion` and :mod:`trl_offpolicy.engines.norm_noise` with Lightning's steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_module import models
from lightning_module.engines import fusion_of, noise_of, simulated_of, teacher_of
from lightning_module.host import Host
from trl_offpolicy.engines.logit_fusion import OPTION
from trl_offpolicy.rollouts.agents import Request
from trl_offpolicy.rollouts.sampler_stats import sampler_stats
from trl_offpolicy.stats import Stats


def check_teacher(module: Host) -> None:
    """Raise if the teacher or the simulated engine of the settings cannot sample. Called before either is made.

    Raises:
        NotImplementedError: the model is sharded; no test has run that.
        ValueError: shares by prompt do not go with turns, which have prompts of their own.
    """
    fusion, agents, strategy = fusion_of(module.settings["engine"]), module.agents, module.trainer.strategy
    simulated = simulated_of(module.settings["engine"])
    if fusion is None and simulated is None:
        return
    if not models.keeps_whole(strategy):
        option = OPTION if simulated is None else simulated.options
        raise NotImplementedError(f"{option} must be left out with a sharded model: no test has run that.")
    if fusion is None:
        return
    loops = agents.has_tools or agents.environments is not None or agents.rollout is not None
    if fusion.difficulty is not None and loops:
        raise ValueError(f"{OPTION}.difficulty must be left out with tools, environments and a rollout function.")


def prepare_rollouts(module: Host, engine: Any, request: Request | None, *, learning: bool) -> None:
    """Set the teacher's shares, and the engine's noise, for what is sampled next.

    Args:
        module: the module.
        engine: its engine.
        request: what is sampled; None = it is sampled ahead already, by a server, which has neither.
        learning: False in a validation, where the policy samples alone and without noise.
    """
    mix, noise, step = teacher_of(engine), noise_of(engine), module.trainer.global_step
    if (drafts := getattr(engine, "drafts", None)) is not None:
        drafts.since_last()  # those of validations do not count for the generation that comes
    if mix is not None and request is not None:
        share = mix.fusion.share(step, _run_steps(module)) if learning else 0.0
        mix.plan(request.rows[:: request.n], share=share)
    if noise is not None:
        noise.on(step, noise.noise.sigma(step, _run_steps(module)) if learning else 0.0)


def _run_steps(module: Host) -> int:
    """Optimizer steps of the run; 0 = it has no end."""
    steps = module.trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) else 0


def measured(engine: Any, device: torch.device) -> Stats:
    """What the engine says of itself for the generation batch: teacher, noise, speculative draft."""
    return sampler_stats(engine, device, mix=teacher_of(engine))
