"""An engine that remembers what it was asked and what it answered, for the check of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_offpolicy.engines.engine import Call, Engine, Rollouts, Sampling, SyncReport
from trl_offpolicy.engines.weights.source import WeightSource


class WrappedEngine:
    """An engine that passes everything on to another one. What the other one has besides, it has too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def version(self) -> int | None:
        """Version of the weights that the engine answers with; None if it does not say."""
        return getattr(self.engine, "version", None)

    @version.setter
    def version(self, version: int | None) -> None:
        self.engine.version = version

    def bind(self, source: WeightSource) -> None:
        """Set the source of the weights."""
        self.engine.bind(source)

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, one after the other."""
        return self.engine.generate(prompt_ids, sampling, n=n)

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence."""
        return self.engine.score(ids)

    def sync_weights(self, version: int) -> SyncReport:
        """Transfer the weights of the bound source."""
        return self.engine.sync_weights(version)

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # not set yet, while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.engine, name)


class RecordedEngine(WrappedEngine):
    """An engine whose ``calls`` hold each prompt that was given with each completion that came back."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: list[Call] = []

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1, **images: Any
    ) -> Rollouts:
        """``n`` completions of each prompt, one after the other; ``images`` only for an engine that takes them."""
        rollouts = self.engine.generate(prompt_ids, sampling, n=n, **images)
        asked = [ids for ids in prompt_ids for _ in range(n)]
        self.calls += map(Call, asked, rollouts.completion_ids)
        return rollouts
