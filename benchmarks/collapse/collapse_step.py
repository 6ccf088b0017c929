"""When a run collapsed, looking back: what an early warning is measured against."""

from __future__ import annotations

from statistics import median

from trl_offpolicy.run_folder.run_data import MetricsLog

SMOOTH = 5
"""Logged rows whose median is the reward."""
SPIKE, BASELINE = 10.0, 50


def collapse_step(log: MetricsLog, reward: str = "reward", *, drop: float = 0.3, recovery: int = 100) -> int | None:
    """The optimizer step at which a run collapsed; None if it did not.

    Either the reward is at least ``drop`` below the best so far and stays there for ``recovery`` steps, or to the end
    of the log; or the gradient norm exceeds 10 times the median of the 50 rows before and the reward is then, for
    ``recovery`` steps, below what it was by a tenth or more. The reward is the median of 5 rows around a step's row and
    before it, so that one bad batch is no collapse.

    Args:
        log: the whole run.
        reward: its column; the learner's own where it was measured, because a sampler that differs may look fine.
        drop: share of the best reward.
        recovery: optimizer steps.

    Raises:
        ValueError: the reward was never logged.

    Reference: Liu 2026, "Off-Policy Drift in LLM RL", problem 2; the smoothing and the tenth are this kit's.
    """
    steps, values, _ = log.series(reward)
    if not steps:
        raise ValueError(f"reward must name a column of the log, but got {reward!r}.")
    smooth = [median(values[max(0, place - SMOOTH + 1) : place + 1]) for place in range(len(values))]
    found = [step for step in (_fall(steps, smooth, drop, recovery), _spike(log, steps, smooth, recovery)) if step]
    return min(found, default=None)


def _fall(steps: list[int], smooth: list[float], drop: float, recovery: int) -> int | None:
    best = smooth[0]
    for place, (step, value) in enumerate(zip(steps, smooth, strict=True)):
        best = max(best, value)
        limit = (1 - drop) * best
        if best > 0 and value <= limit and _stays_below(steps, smooth, place, limit, step + recovery):
            return step
    return None


def _spike(log: MetricsLog, steps: list[int], smooth: list[float], recovery: int) -> int | None:
    at, norms, _ = log.series("grad_norm")
    reward_at = dict(zip(steps, range(len(steps)), strict=True))
    for place in range(10, len(norms)):
        base = median(norms[max(0, place - BASELINE) : place])
        here = reward_at.get(at[place])
        if base > 0 and norms[place] > SPIKE * base and here is not None and here + SMOOTH < len(steps):
            limit = 0.9 * smooth[here]
            if smooth[here] > 0 and _stays_below(steps, smooth, here + SMOOTH, limit, at[place] + recovery):
                return at[place]
    return None


def _stays_below(steps: list[int], smooth: list[float], first: int, limit: float, until: int) -> bool:
    """At or below the limit from a row on, for at least one full window."""
    later = [value for step, value in zip(steps[first:], smooth[first:], strict=True) if step <= until]
    return len(later) >= SMOOTH and max(later) <= limit
