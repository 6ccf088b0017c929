"""Sampling ahead in the TRL trainer: starts with a run, and names the log-probs of its rows by what they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.objective.proximal import RecomputedProximal
from trl_offpolicy.rollouts.ahead.checks import check_snapshots
from trl_offpolicy.rollouts.ahead.old_policy import Snapshots, WeightAverage
from trl_offpolicy.rollouts.ahead.parts import padded_versions
from trl_offpolicy.rollouts.ahead.queue import RolloutsAhead
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.rollouts.batches import trainable

OLD, PROXIMAL = "old_per_token_logps", "proximal_per_token_logps"


class TrainerAhead(RolloutsAhead):
    """The queue of an :class:`~trl_offpolicy.trainer.OffPolicyGRPOTrainer`, with what replaces the old policy."""

    def __init__(self, trainer: Any, settings: AsyncSettings) -> None:
        self._snapshots = Snapshots() if settings.old_logps == "snapshot" else None
        self._average = WeightAverage(settings.ewma_decay) if settings.old_logps == "ewma" else None
        super().__init__(trainer, settings)

    def synced(self) -> None:
        """Keep a copy or average of the weights that were just sent, if ``old_logps`` needs one."""
        model, version = self._trainer.model, self._engine.version
        if self._snapshots is not None:
            self._snapshots.keep(model, version, oldest=self.oldest_version)
        if self._average is not None:
            self._average.add(model, version)

    @property
    def name_of_scores(self) -> str | None:
        """The key for log-probs at the current weights of rows that older weights sampled; None = nothing reads them.

        For such rows they are the proximal policy and not the old one. For rows of the current weights they are both.
        If copies of the weights are kept, the old policy is known and the clip is around it.
        """
        if not self._trainer.model.training:
            return OLD
        if self._snapshots is not None:
            return None
        return PROXIMAL if isinstance(self._trainer.objective.proximal, RecomputedProximal) else None

    def complete(self, output: dict[str, Any]) -> None:
        """Add the version of each token to TRL's generation batch, and give its log-probs their right names."""
        ids = output["completion_ids"]
        rows = padded_versions(self.versions, length=ids.shape[1], of_empty=self._engine.version)
        output["policy_versions"] = torch.tensor(rows, device=ids.device)
        today, name = output.pop(OLD, None), self.name_of_scores
        score = partial(self._score, output)
        if self._snapshots is not None:
            output[OLD] = self._snapshots.score(
                self._trainer.model, score, output["policy_versions"], trainable(output)
            )
        elif self._average is not None:
            output[PROXIMAL] = self._average.score(self._trainer.model, score)
        elif today is not None and name is not None:
            output[name] = today

    def _score(self, output: dict[str, Any]) -> Tensor:
        logps: Tensor = self._trainer._score_old(output, "train", with_sums=False)[0]
        return logps


class _Run(TrainerCallback):  # type: ignore[misc]
    """Empties the queue when a run begins and when it ends."""

    def __init__(self, ahead: RolloutsAhead) -> None:
        self._ahead = ahead

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ahead.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._ahead.close()


def sample_ahead(trainer: Any) -> TrainerAhead | None:
    """Have the trainer's engine sample ahead, if its configuration asks for that.

    Raises:
        ValueError: the weights cannot be copied.
        EngineError: a sync is to cut requests in flight, but the server cannot do that.
    """
    settings = AsyncSettings.parse(trainer.args.async_rollouts)
    if settings is None:
        return None
    check_snapshots(trainer, settings)
    server = trainer.vllm_generation.server
    if settings.cuts and server is not None and not server.can_cut:
        raise EngineError(
            "async_rollouts.partial must be 'finish' with this vLLM server, which has no /abort_requests: start it "
            "with `trl-offpolicy serve`, or with VLLM_SERVER_DEV_MODE=1 (vLLM 0.27+)."
        )
    ahead = TrainerAhead(trainer, settings)
    trainer.vllm_generation.ahead, trainer.vllm_generation.quiet = ahead, ahead.quiet
    own_centre = not isinstance(trainer.objective.proximal, RecomputedProximal)
    trainer._leave_out_old |= own_centre or settings.old_logps != "recompute_proximal"
    trainer.add_callback(_Run(ahead))
    return ahead
