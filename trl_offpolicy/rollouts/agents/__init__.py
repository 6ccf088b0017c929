"""Completions of several turns, over any engine: tools, environments, or a rollout function of the user's.

``Chat`` turns messages into ids and replies into messages. ``answer_calls`` runs the tools. ``Environments`` holds one
object per rollout. ``AgentEngine`` runs the loop. ``RolloutSampler`` puts them together for a trainer.
``Lanes`` keep apart what generation batches in flight at the same time must not share.
"""

from trl_offpolicy.rollouts.agents.chat import Chat, chat_tokenizer
from trl_offpolicy.rollouts.agents.environments import Environments
from trl_offpolicy.rollouts.agents.lanes import AgentBatch, Lane, Lanes
from trl_offpolicy.rollouts.agents.loop import AgentEngine, Episodes
from trl_offpolicy.rollouts.agents.recorded import RecordedEngine, WrappedEngine
from trl_offpolicy.rollouts.agents.sampler import Completions, Request, RolloutSampler
from trl_offpolicy.rollouts.agents.screened import ScreenedEngine
from trl_offpolicy.rollouts.agents.tools import answer_calls

__all__ = [
    "AgentBatch",
    "AgentEngine",
    "Chat",
    "Completions",
    "Environments",
    "Episodes",
    "Lane",
    "Lanes",
    "RecordedEngine",
    "Request",
    "RolloutSampler",
    "ScreenedEngine",
    "WrappedEngine",
    "answer_calls",
    "chat_tokenizer",
]
