"""A replay buffer on disk: prompt groups with the sampler's log-probs and versions, drawn by priority and age.

``ReplayBuffer`` keeps groups as parquet within a bound and survives a kill; ``AgeDecay`` says how fast they lose
priority, fitted to the fall of the ESS with the lag; ``replayed_batch`` scores a draw with the current weights.
"""

from trl_offpolicy.rollouts.replay.batch import PaddedGroups, pad_groups, replayed_batch
from trl_offpolicy.rollouts.replay.buffer import ReplayBuffer, ReplaySample
from trl_offpolicy.rollouts.replay.priority import AgeDecay, Draw, draw_without_repetition, ess_by_lag, fitted_decay
from trl_offpolicy.rollouts.replay.records import ReplayGroup, Response
from trl_offpolicy.rollouts.replay.settings import ReplaySettings

__all__ = [
    "AgeDecay",
    "Draw",
    "PaddedGroups",
    "ReplayBuffer",
    "ReplayGroup",
    "ReplaySample",
    "ReplaySettings",
    "Response",
    "draw_without_repetition",
    "ess_by_lag",
    "fitted_decay",
    "pad_groups",
    "replayed_batch",
]
