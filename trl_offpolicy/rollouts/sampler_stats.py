"""What a sampler says of itself: a teacher's share, an engine's noise, the tokens taken of a speculative draft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.drafts import Drafts
from trl_offpolicy.engines.logit_fusion import LogitFusion, TeacherMix
from trl_offpolicy.engines.norm_noise import NoisyNorms, NormNoise
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group, Stats

SAMPLER_METRICS = ("teacher_share", "norm_noise", "draft_taken_fraction")
_TEACHER, _NOISE = Layout(sums=("rows", "share")), Layout(sums=("engines", "sigma"))
_DRAFTS = Layout(sums=("proposed", "taken"))


def on_purpose(fusion: LogitFusion | None, noise: NormNoise | None) -> dict[str, str]:
    """What makes the rollouts of a run off-policy on purpose, by its name, for ``run.json``; empty if nothing does."""
    found = {}
    if fusion is not None:
        found["teacher in the rollouts"] = f"{fusion.teacher}, {fusion.alpha:g} of the logits at first"
    if noise is not None:
        found["noise on the norms"] = f"{noise.start:g} at first, {noise.end:g} in the end"
    return found


def sampler_stats(engine: Any, device: torch.device, *, mix: TeacherMix | None = None) -> Stats:
    """The ``rollout/*`` of :data:`SAMPLER_METRICS` for a generation batch; without those that are not in use.

    Args:
        engine: this rank's engine, whose ``noise`` and ``drafts`` are read if it has them; None = the trainer's model.
        device: where the sums are kept.
        mix: the teacher that took part.
    """

    def sums(*values: float) -> list[Tensor]:
        return list(torch.tensor(values, dtype=torch.float64, device=device))

    noise: NoisyNorms | None = getattr(engine, "noise", None)
    drafts: Drafts | None = getattr(engine, "drafts", None)
    groups = {}
    if mix is not None:
        summed = moments(_TEACHER, sums(len(mix.used), sum(mix.used)))
        groups["rollout#teacher"] = Group(summed, {"teacher_share": fraction("share", "rows")})
    if noise is not None:
        summed = moments(_NOISE, sums(1, noise.sigma))
        groups["rollout#noise"] = Group(summed, {"norm_noise": fraction("sigma", "engines")})
    if drafts is not None:
        finalizers = {"draft_taken_fraction": fraction("taken", "proposed")}
        groups["rollout#drafts"] = Group(moments(_DRAFTS, sums(*drafts.since_last())), finalizers, sparse=True)
    return Stats(groups)
