"""How far rollouts are off-policy on purpose: the share of a teacher, the size of an engine's noise."""

from __future__ import annotations

import torch

from trl_offpolicy.engines.logit_fusion import LogitFusion, TeacherMix
from trl_offpolicy.engines.norm_noise import NoisyNorms, NormNoise
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group, Stats

DELIBERATE_METRICS = ("teacher_share", "norm_noise")
_TEACHER, _NOISE = Layout(sums=("rows", "share")), Layout(sums=("engines", "sigma"))


def on_purpose(fusion: LogitFusion | None, noise: NormNoise | None) -> dict[str, str]:
    """What makes the rollouts of a run off-policy on purpose, by its name, for ``run.json``; empty if nothing does."""
    found = {}
    if fusion is not None:
        found["teacher in the rollouts"] = f"{fusion.teacher}, {fusion.alpha:g} of the logits at first"
    if noise is not None:
        found["noise on the norms"] = f"{noise.start:g} at first, {noise.end:g} in the end"
    return found


def deliberate_stats(mix: TeacherMix | None, noise: NoisyNorms | None, device: torch.device) -> Stats:
    """``rollout/teacher_share`` and ``rollout/norm_noise`` of a generation batch; without those that are not in use.

    Args:
        mix: the teacher that took part.
        noise: the noise of this rank's engine.
        device: where the sums are kept.
    """
    groups = {}
    if mix is not None:
        shares = torch.tensor(mix.used, dtype=torch.float64, device=device)
        summed = moments(_TEACHER, [torch.tensor(len(shares), device=device), shares.sum()])
        groups["rollout#teacher"] = Group(summed, {"teacher_share": fraction("share", "rows")})
    if noise is not None:
        own = torch.tensor([1.0, noise.sigma], dtype=torch.float64, device=device)
        summed = moments(_NOISE, [own[0], own[1]])
        groups["rollout#noise"] = Group(summed, {"norm_noise": fraction("sigma", "engines")})
    return Stats(groups)
