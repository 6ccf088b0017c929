import math
import random
from collections.abc import Sequence

from trl_offpolicy.engines.engine import Engine, Rollouts, Sampling, SyncReport
from trl_offpolicy.engines.weights import WeightSource


class DiceEngine(Engine):
    """Every token is drawn from ``ids`` with the same probability: useless for learning, complete as an engine."""

    def __init__(self, ids: Sequence[int], seed: int = 0) -> None:
        self.ids, self.random = list(ids), random.Random(seed)
        self.logp = -math.log(len(self.ids))

    def bind(self, source: WeightSource) -> None:
        self.source = source  # ``source.merged()`` gives (name, tensor); dice need no weights

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        completions = [self.random.choices(self.ids, k=sampling.max_tokens) for _ in prompts]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=completions,
            sampling_per_token_logps=[[self.logp] * len(ids) for ids in completions],
            policy_versions=[[self.version or 0] * len(ids) for ids in completions],
            finish_reasons=["length"] * len(completions),
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.logp] * (len(row) - 1) for row in ids]

    def sync_weights(self, version: int) -> SyncReport:
        self.version = version
        return SyncReport(version=version, kind="memory", bytes=0, seconds=0.0)
