"""True courses of made-up runs, healthy and broken, and the noise with which a batch measures them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.floating[Any]]
Draw = np.random.Generator
QUIET_KL = 6e-4
"""KL k3 of a healthy engine in bfloat16, nats per token."""


@dataclass(frozen=True)
class Course:
    """The true values of a run at each of its steps; a number stands for all steps.

    Args:
        reward: mean reward, in [low, high].
        length: mean tokens of a response.
        entropy: nats per token.
        gradient: gradient norm.
        cut: share of responses at the length limit.
        kl: KL k3 of engine and trainer, nats per token.
        batch: responses of a step, of which eight have the same prompt.
        low: smallest reward of a response.
        high: largest one.
        scatter: standard deviation of a response's length over its mean.
        limit: length limit, tokens.
    """

    reward: Curve | float
    length: Curve | float = 600.0
    entropy: Curve | float = 0.35
    gradient: Curve | float = 0.2
    cut: Curve | float = 0.0
    kl: Curve | float = QUIET_KL
    batch: int = 128
    low: float = 0.0
    high: float = 1.0
    scatter: float = 0.5
    limit: float = 8192.0


@dataclass(frozen=True)
class Scenario:
    """A course for a number of steps, and what is right to say of it."""

    course: Callable[[Curve, Draw], Course]
    healthy: bool
    held_back: bool = False
    name: str = field(default="")


SCENARIOS: dict[str, Scenario] = {}


def scenario(*, healthy: bool, held_back: bool = False) -> Callable[[Callable[[Curve, Draw], Course]], Any]:
    """Register a function of time (0 to 1 over the run, times its number of steps) and of a generator."""

    def add(course: Callable[[Curve, Draw], Course]) -> Any:
        SCENARIOS[course.__name__] = Scenario(course, healthy, held_back, course.__name__)
        return course

    return add


def measured(course: Course, steps: int, draw: Draw) -> dict[str, Curve]:
    """What batches of the run log: rewards of a group are alike, lengths scatter, norms are heavy-tailed."""
    reward, length, entropy, gradient, cut, kl = (
        np.broadcast_to(np.asarray(curve, float), steps)
        for curve in (course.reward, course.length, course.entropy, course.gradient, course.cut, course.kl)
    )
    prompts, span = course.batch / 8, course.high - course.low
    share = (np.clip(reward, course.low, course.high) - course.low) / span
    noise = np.sqrt(share * (1 - share) * (0.5 / prompts + 0.5 / course.batch))
    of_length = course.scatter * 0.75 / np.sqrt(prompts)
    return {
        "reward": course.low + span * np.clip(share + noise * draw.normal(size=steps), 0, 1),
        "length": np.clip(length * (1 + of_length * draw.normal(size=steps)), 1, course.limit),
        "entropy": entropy * np.exp(0.06 * draw.normal(size=steps)),
        "gradient": gradient * np.exp(0.35 * draw.normal(size=steps)),
        "cut": np.clip(cut + 0.01 * np.abs(draw.normal(size=steps)), 0, 1),
        "kl": kl * np.exp(0.15 * draw.normal(size=steps)),
    }


def drift(steps: int, size: float, draw: Draw) -> Curve:
    """A slow random walk around 0: the data of neighbouring steps are alike."""
    walk = np.zeros(steps)
    for step in range(1, steps):
        walk[step] = 0.95 * walk[step - 1] + np.sqrt(1 - 0.95**2) * draw.normal()
    return size * walk


def toward(t: Curve, start: float, end: float, within: float) -> Curve:
    """From ``start`` to ``end``, most of the way within that many steps."""
    return start + (end - start) * (1 - np.exp(-t / within))


def ramp(t: Curve, start: float, end: float) -> Curve:
    """0 before the share ``start`` of the run, 1 after the share ``end``."""
    return np.clip((t / len(t) - start) / (end - start), 0, 1)


# ----------------------------------------------------------------------------------------------------------- healthy
@scenario(healthy=True)
def reasoning_grows(t: Curve, draw: Draw) -> Course:
    """R1: from 800 tokens to 3,000 while the reward rises."""
    length = 800 * np.exp(1.3 * t / max(len(t), 600)) * (1 + drift(len(t), 0.03, draw))
    return Course(toward(t, 0.2, 0.6, 150), length, toward(t, 0.5, 0.3, 150), batch=512)


@scenario(healthy=True)
def reasoning_grows_in_small_batches(t: Curve, draw: Draw) -> Course:
    length = 800 * np.exp(1.3 * t / max(len(t), 600))
    return Course(toward(t, 0.2, 0.6, 150), length, toward(t, 0.5, 0.3, 150), batch=64, scatter=0.7)


@scenario(healthy=True)
def plateau(t: Curve, draw: Draw) -> Course:
    return Course(0.7, 600, 0.3, batch=64, scatter=0.6)


@scenario(healthy=True)
def eight_responses_a_step(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.4, 0.7, 80), 300, 0.25, batch=8, scatter=0.6)


@scenario(healthy=True)
def longer_and_then_flat(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.2, 0.65, 50), toward(t, 500, 900, 60), toward(t, 0.6, 0.35, 60), batch=256)


@scenario(healthy=True)
def harder_data(t: Curve, draw: Draw) -> Course:
    """After 60 % of the run the reward halves at once and rises again."""
    hard = t >= 0.6 * len(t)
    again = 0.35 + 0.1 * ramp(t, 0.6, 1.0)
    return Course(np.where(hard, again, toward(t, 0.3, 0.8, 60)), np.where(hard, 1100, 800), batch=256)


@scenario(healthy=True)
def easy_and_hard_take_turns(t: Curve, draw: Draw) -> Course:
    return Course(0.55 + 0.1 * np.sin(t / 25), 700 * (1 - 0.12 * np.sin(t / 25)))


@scenario(healthy=True)
def sparse_reward(t: Curve, draw: Draw) -> Course:
    return Course(0.015 + 0.02 * t / len(t), 1000, 0.6, scatter=0.6)


@scenario(healthy=True)
def reward_up_to_three(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.8, 2.4, 80), 350, toward(t, 0.5, 0.25, 80), batch=64, high=3.0)


@scenario(healthy=True)
def penalties(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, -0.7, 0.1, 150), 900, 0.5, low=-1.0)


@scenario(healthy=True)
def rewards_around_zero(t: Curve, draw: Draw) -> Course:
    return Course(0.05 + drift(len(t), 0.02, draw), 900, 0.4, low=-1.0)


@scenario(healthy=True)
def agents_of_many_turns(t: Curve, draw: Draw) -> Course:
    """Lengths differ by a factor of two between batches."""
    length = 3000 * np.exp(draw.uniform(-0.35, 0.35, len(t)))
    return Course(toward(t, 0.2, 0.45, 150), length, 0.5, batch=64, limit=32000)


@scenario(healthy=True)
def entropy_bonus(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.3, 0.6, 100), 700, 0.15 * np.exp(1.4 * t / len(t)), batch=256)


@scenario(healthy=True)
def solved_with_low_entropy(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.5, 0.95, 40), 250, toward(t, 0.35, 0.05, 60), batch=256)


@scenario(healthy=True)
def low_entropy_from_the_start(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.85, 0.93, 80), 300, toward(t, 0.14, 0.06, 60))


@scenario(healthy=True)
def cut_from_the_start(t: Curve, draw: Draw) -> Course:
    cut = 0.7 + drift(len(t), 0.04, draw)
    return Course(toward(t, 0.1, 0.3, 150), 3700, 0.6, cut=cut, scatter=0.1, limit=4096, batch=256)


@scenario(healthy=True)
def gets_concise(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.4, 0.75, 100), toward(t, 900, 350, 100), toward(t, 0.4, 0.2, 100))


@scenario(healthy=True)
def solved_to_the_end(t: Curve, draw: Draw) -> Course:
    """Every response is right, so there is no gradient any more."""
    solved = t >= 0.6 * len(t)
    return Course(np.where(solved, 1.0, toward(t, 0.5, 0.98, 20)), 300, 0.3, np.where(solved, 0.0, 0.2))


# ------------------------------------------------------------------------------------------------------------ broken
@scenario(healthy=False)
def reward_never_read(t: Curve, draw: Draw) -> Course:
    """The parser of the reward reads no answer."""
    return Course(0.0, 600, 0.35, 0.0)


@scenario(healthy=False)
def reward_gone_at_once(t: Curve, draw: Draw) -> Course:
    gone = t >= 0.75 * len(t)
    return Course(np.where(gone, 0.02, toward(t, 0.3, 0.6, 100)), 700, gradient=np.where(gone, 2.0, 0.2), batch=256)


@scenario(healthy=False)
def reward_lost_slowly(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.3, 0.65, 60) * (1 - 0.9 * ramp(t, 0.4, 1.0)), 700, batch=256)


@scenario(healthy=False)
def reward_halves_slowly(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.3, 0.65, 60) * (1 - 0.45 * ramp(t, 0.4, 1.0)), 700)


@scenario(healthy=False)
def responses_vanish(t: Curve, draw: Draw) -> Course:
    left = 1 - ramp(t, 0.6, 0.75)
    return Course(toward(t, 0.3, 0.6, 60) * left, 500 * left + 2)


@scenario(healthy=False)
def responses_reach_the_limit(t: Curve, draw: Draw) -> Course:
    far = ramp(t, 0.6, 0.8)
    return Course(toward(t, 0.3, 0.6, 60) * (1 - 0.9 * far), 700 + 3396 * far, cut=far, limit=4096)


@scenario(healthy=False)
def longer_for_nothing(t: Curve, draw: Draw) -> Course:
    far = ramp(t, 0.6, 1.0)
    return Course(0.5, 1000 + 2500 * far, cut=0.5 * far, limit=4096)


@scenario(healthy=False)
def entropy_explodes(t: Curve, draw: Draw) -> Course:
    far = ramp(t, 0.6, 0.8)
    return Course(toward(t, 0.3, 0.6, 60) * (1 - far), 700 * (1 + far), 0.35 * np.exp(3 * far))


@scenario(healthy=False)
def entropy_vanishes(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.3, 0.45, 30), 600, 0.5 * np.exp(-4 * t / len(t)), batch=256)


@scenario(healthy=False)
def short_answers_are_rewarded(t: Curve, draw: Draw) -> Course:
    far = ramp(t, 0.5, 0.7)
    return Course(0.4 + 0.55 * far, 500 * (1 - far) + 6, 0.35 * (1 - 0.8 * far))


@scenario(healthy=False)
def gradient_without_a_number(t: Curve, draw: Draw) -> Course:
    gone = t >= 0.9 * len(t) - 1
    return Course(np.where(gone, 0.0, toward(t, 0.3, 0.6, 100)), gradient=np.where(gone, np.nan, 0.2))


@scenario(healthy=False)
def mismatch_grows(t: Curve, draw: Draw) -> Course:
    return Course(toward(t, 0.3, 0.55, 80), 800, kl=0.002 * np.exp(3.4 * t / len(t)), batch=256)


@scenario(healthy=False)
def engine_stands_still(t: Curve, draw: Draw) -> Course:
    late = np.clip(t - 0.6 * len(t), 0, None)
    return Course(np.where(late > 0, 0.5, toward(t, 0.3, 0.5, 60)), 600, kl=QUIET_KL + 2e-5 * late**2, batch=256)


@scenario(healthy=False)
def lost_to_the_lowest_penalty(t: Curve, draw: Draw) -> Course:
    gone = t >= 0.7 * len(t)
    return Course(np.where(gone, -1.0, toward(t, -0.7, -0.1, 60)), 900, low=-1.0)


@scenario(healthy=False)
def lost_long_ago(t: Curve, draw: Draw) -> Course:
    gone = t >= 0.5 * len(t)
    return Course(np.where(gone, 0.05, toward(t, 0.3, 0.6, 60)))


# -------------------------------------------------------------------------- held back: no rule was chosen by looking at
@scenario(healthy=True, held_back=True)
def slow_start(t: Curve, draw: Draw) -> Course:
    """Nothing is learned for half of the run."""
    rise = 1 / (1 + np.exp(-(t - 0.6 * len(t)) / (0.06 * len(t))))
    return Course(0.05 + 0.5 * rise, 500 * (1 + 0.2 * rise), 0.7 - 0.3 * rise)


@scenario(healthy=True, held_back=True)
def two_stages_of_length(t: Curve, draw: Draw) -> Course:
    """The limit doubles at 40 %: responses grow by a half, the reward by a tenth."""
    later = ramp(t, 0.4, 0.5)
    cut = 0.35 * (1 - 0.8 * later)
    return Course(0.45 + 0.1 * later + 0.05 * t / len(t), 2500 * (1 + 0.5 * later), 0.4, cut=cut, batch=256)


@scenario(healthy=True, held_back=True)
def noisy_judge(t: Curve, draw: Draw) -> Course:
    """A judge's marks from 0 to 10 with a drift of its own."""
    return Course(toward(t, 5.5, 7.0, 200) + drift(len(t), 0.3, draw), 450, 0.9, batch=32, high=10.0)


@scenario(healthy=True, held_back=True)
def warm_restarts(t: Curve, draw: Draw) -> Course:
    """A learning rate with restarts: reward and gradient swing by a tenth."""
    wave = np.cos(2 * np.pi * 4 * t / len(t))
    return Course(0.5 + 0.15 * t / len(t) + 0.04 * wave, 650, 0.35 + 0.03 * wave, 0.25 + 0.1 * wave)


@scenario(healthy=False, held_back=True)
def language_mixes(t: Curve, draw: Draw) -> Course:
    """Entropy and length rise slowly together, the reward sinks by a third."""
    far = ramp(t, 0.3, 1.0)
    return Course(toward(t, 0.3, 0.6, 60) * (1 - 0.35 * far), 700 * (1 + 0.6 * far), 0.4 * np.exp(1.5 * far))


@scenario(healthy=False, held_back=True)
def half_of_the_prompts_lost(t: Curve, draw: Draw) -> Course:
    """One of two tasks collapses: the reward falls to less than half at once and stays there."""
    gone = t >= 0.5 * len(t)
    return Course(np.where(gone, 0.25, toward(t, 0.4, 0.7, 60)), np.where(gone, 400, 600), batch=256)


@scenario(healthy=False, held_back=True)
def repeats_itself(t: Curve, draw: Draw) -> Course:
    """Loops: the entropy falls to nothing while responses run to the limit."""
    far = ramp(t, 0.5, 0.8)
    return Course(
        toward(t, 0.3, 0.6, 60) * (1 - 0.8 * far), 700 + 3000 * far, 0.4 * np.exp(-4 * far), cut=0.8 * far, limit=4096
    )


@scenario(healthy=False, held_back=True)
def adapter_never_arrives(t: Curve, draw: Draw) -> Course:
    """The engine keeps the base model: KL grows with every step from the first."""
    return Course(toward(t, 0.3, 0.4, 60), 600, kl=QUIET_KL + 0.0006 * t, batch=64)
