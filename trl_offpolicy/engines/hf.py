"""HF generate as the engine: no mismatch, no second copy of the weights, slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.engine import Rollouts, Sampling, SyncReport
from trl_offpolicy.engines.weights.source import WeightSource


class TransformersEngine:
    """Samples from the trainer's own model: sampling = old, so ``sampling_per_token_logps`` is None.

    Args:
        model: gives the model to sample from, called each time.
        pad_token_id: for the left padding of prompts.
        eos_token_ids: end a completion.
        unsharded: context in which the model can generate (e.g. gathered ZeRO-3 parameters).
    """

    version: int | None = None

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        unsharded: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = model
        self._pad = pad_token_id
        self._eos = tuple(eos_token_ids)
        self._unsharded = unsharded

    def bind(self, source: WeightSource) -> None:
        """Nothing to bind: it is the trainer's model."""

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, prompt-major."""
        rows = [list(ids) for ids in prompt_ids for _ in range(n)]
        model = self._model()
        ids, mask = _left_padded(rows, self._pad, device=next(model.parameters()).device)
        was_training = model.training
        model.eval()
        with self._unsharded():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                max_new_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p or None,
                pad_token_id=self._pad,
                eos_token_id=list(self._eos),
                **sampling.extra,
            )
        model.train(was_training)
        completions = [self._cut(row) for row in out[:, ids.shape[1] :].tolist()]
        version = -1 if self.version is None else self.version
        return Rollouts(
            prompt_ids=rows,
            completion_ids=completions,
            sampling_per_token_logps=None,
            policy_versions=[[version] * len(row) for row in completions],
            finish_reasons=["stop" if row and row[-1] in self._eos else "length" for row in completions],
        )

    def _cut(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self._eos), None)
        return row if end is None else row[: end + 1]

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """The trainer's own log-probs: it is the same model."""
        return score_with(self._model(), ids, pad_token_id=self._pad)

    def sync_weights(self, version: int) -> SyncReport:
        """Nothing to send; only the version changes."""
        start = time.monotonic()
        self.version = version
        return SyncReport(version=version, kind="memory", bytes=0, seconds=time.monotonic() - start)

    def close(self) -> None:
        """Nothing to free."""


@torch.no_grad()
def score_with(model: Any, ids: Sequence[Sequence[int]], *, pad_token_id: int) -> list[list[float]]:
    """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence under a causal LM, in eval mode.

    Args:
        model: returns ``logits``; a sharded one is called by all ranks.
        ids: sequences of at least two tokens.
        pad_token_id: fills the shorter ones, on the left.
    """
    was_training = model.training
    model.eval()
    padded, mask = _left_padded([list(row) for row in ids], pad_token_id, device=next(model.parameters()).device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    model.train(was_training)
    logps = logits[:, :-1].float().log_softmax(-1).gather(-1, padded[:, 1:].unsqueeze(-1)).squeeze(-1)
    return [row[-(len(one) - 1) :].tolist() for row, one in zip(logps, ids, strict=True)]


def _left_padded(rows: list[list[int]], pad: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
