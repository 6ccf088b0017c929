"""A transformers model as the engine: HF generate, and what the model says about given tokens.

HF generate samples from the trainer's own weights. There is no mismatch and no second copy of the weights, but it is
slow. The functions below sample and score over the whole vocabulary, without gradient, for the engine and for the
diagnosis. The scores that a trainer learns from are made in :mod:`trl_offpolicy.rollouts.scoring`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trl_offpolicy.engines.engine import Rollouts, Sampling, SyncReport
from trl_offpolicy.engines.images import PromptImages, image_token, model_inputs
from trl_offpolicy.engines.kept import KeptRecorder, recorded_kept
from trl_offpolicy.engines.logit_fusion import OPTION, SampledLogps, TeacherMix
from trl_offpolicy.engines.weights.source import WeightSource
from trl_offpolicy.functional.truncated_sampling import Truncation, truncated_support

Floats = NDArray[np.float64]
Ids = Sequence[Sequence[int]]
PAD = 0
"""Fills masked positions, where any id is right."""


@contextmanager
def broken_weights_told() -> Iterator[None]:
    """Say what torch's error means when a policy's probabilities are NaN or infinite while it samples.

    Raises:
        FloatingPointError: in place of that error. On a GPU the error is a failed assertion of the device, as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise FloatingPointError(
            "The policy cannot be sampled from: its probabilities are NaN or infinite, because its weights are, or are "
            "too large for its dtype. An earlier update broke them: look for the first step with a large grad_norm, go "
            "back to a checkpoint before it, and lower learning_rate or max_grad_norm."
        ) from error


class Sampler(Protocol):
    """Changes what ``generate`` of a model samples from (:mod:`trl_offpolicy.rollouts.compressed_forward`)."""

    def sampling(self, model: Any, rows: int, /) -> AbstractContextManager[SampledLogps]:
        """A context around ``generate`` for ``rows`` prompts, which notes the log-probs."""


class TransformersEngine:
    """Samples from the trainer's own model: sampling = old, so ``sampling_per_token_logps`` is None.

    With a teacher it samples from the mixture of both, with a simulated engine as that does, and reports the log-probs.

    Args:
        model: function that returns the model to sample from; it is called each time.
        pad_token_id: token of the left padding of prompts.
        eos_token_ids: tokens that end a completion.
        unsharded: context in which the model can generate (e.g. gathered ZeRO-3 parameters).
        mix: a teacher that takes part; None = the model alone.
        simulated: another engine that is imitated; None = the model as it is.

    Raises:
        ValueError: a teacher beside a simulated engine.
    """

    version: int | None = None

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        unsharded: Callable[[], AbstractContextManager[Any]] = nullcontext,
        mix: TeacherMix | None = None,
        simulated: Sampler | None = None,
    ) -> None:
        if mix is not None and simulated is not None:
            raise ValueError(f"{OPTION} must be left out with a simulated engine: no test has run both.")
        self._model = model
        self._pad = pad_token_id
        self._eos = tuple(eos_token_ids)
        self._unsharded = unsharded
        self.mix, self.simulated = mix, simulated

    def bind(self, source: WeightSource) -> None:
        """Does nothing: the engine is the trainer's model."""

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        n: int = 1,
        images: Sequence[PromptImages] | None = None,
    ) -> Rollouts:
        """``n`` completions of each prompt, prompt-major; ``images`` are those of each prompt."""
        rows = [list(ids) for ids in prompt_ids for _ in range(n)]
        model = self._model()
        device = next(model.parameters()).device
        ids, mask = _left_padded(rows, self._pad)
        seen = {} if images is None else _seen(model, [one for one in images for _ in range(n)], ids.shape[1], device)
        was_training = model.training
        model.eval()
        noted: AbstractContextManager[KeptRecorder | None] = nullcontext()
        if sampling.truncated:
            noted = recorded_kept(model)
        mixing: AbstractContextManager[SampledLogps | None] = nullcontext()
        if self.mix is not None:
            if images is not None:
                raise NotImplementedError(f"{OPTION} must be left out with images: the teacher is shown text alone.")
            mixing = self.mix.sampling(model, rows)
        if self.simulated is not None:
            mixing = self.simulated.sampling(model, len(rows))
        with broken_weights_told(), self._unsharded(), noted as recorder, mixing as logps:
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=True,
                max_new_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p or None,
                pad_token_id=self._pad,
                eos_token_id=list(self._eos),
                **seen,
                # or the model's generation_config decides, unseen
                **{"repetition_penalty": 1.0, **sampling.extra},
            )
        model.train(was_training)
        completions = [self._cut(row) for row in out[:, ids.shape[1] :].tolist()]
        version = -1 if self.version is None else self.version
        kept = None if recorder is None else [recorder.row(i, len(row)) for i, row in enumerate(completions)]
        return Rollouts(
            prompt_ids=rows,
            completion_ids=completions,
            sampling_per_token_logps=None if logps is None else logps.rows(completions),
            policy_versions=[[version] * len(row) for row in completions],
            finish_reasons=["stop" if row and row[-1] in self._eos else "length" for row in completions],
            sampling_mask=kept,
        )

    def _cut(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self._eos), None)
        return row if end is None else row[: end + 1]

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence: the trainer's own, in eval mode."""
        model = self._model()
        was_training = model.training
        model.eval()
        (scores,) = score_completions(model, [row[:1] for row in ids], [row[1:] for row in ids])
        model.train(was_training)
        return [found[: len(row) - 1].tolist() for found, row in zip(scores.logps, ids, strict=True)]

    def sync_weights(self, version: int) -> SyncReport:
        """Send nothing; only the version changes."""
        start = time.monotonic()
        self.version = version
        return SyncReport(version=version, kind="memory", bytes=0, seconds=time.monotonic() - start)

    def close(self) -> None:
        """Does nothing: the model belongs to the trainer."""


def _seen(model: Any, images: Sequence[PromptImages], width: int, device: torch.device) -> dict[str, Any]:
    """Arguments of ``generate`` for images. As in TRL, no token is sampled that stands for a part of an image."""
    token = image_token(model.config)
    inputs: dict[str, Any] = model_inputs([one.inputs for one in images], width=width, device=device)
    return inputs if token is None else {**inputs, "suppress_tokens": [token]}


@dataclass(frozen=True)
class Head:
    """How logits become a distribution.

    Args:
        temperature: divides the logits.
        truncation: the options that cut the distribution after that.
    """

    temperature: float = 1.0
    truncation: Truncation = Truncation()  # noqa: RUF009  frozen

    def logps(self, logits: Tensor) -> Tensor:
        """Log-probs (N, V) float32 of (N, V) logits; tokens that are cut get ``-inf``."""
        scaled = logits.float() / self.temperature
        if self.truncation:
            scaled = scaled + truncated_support(scaled, self.truncation).weights(scaled).log()
        return scaled.log_softmax(-1)


@dataclass(frozen=True)
class TokenScores:
    """How a model scores given tokens; (B, T), NaN beyond the end of a completion.

    Args:
        logps: log-probs of the tokens, nats.
        entropies: entropy of the distribution at each position, nats.
        top_logps: log-prob of the most likely token, nats.
        ranks: how many tokens are more likely than the given one.
    """

    logps: Floats
    entropies: Floats
    top_logps: Floats
    ranks: Floats


@torch.no_grad()
def score_completions(
    model: Any, prompt_ids: Ids, completion_ids: Ids, *, heads: Sequence[Head] = (Head(),), rows: int = 16
) -> list[TokenScores]:
    """Score completions under one or more heads, with one forward.

    Equal prompts that follow each other are computed once.

    Args:
        model: a causal LM; its mode (train or eval) does not change.
        prompt_ids: B prompts.
        completion_ids: B completions.
        heads: distributions to take from the logits.
        rows: most completions per forward.

    Returns:
        One entry per head.
    """
    width = max(len(ids) for ids in completion_ids)
    out = np.full((len(heads), 4, len(completion_ids), width), np.nan)
    for first, logits, ids, mask in completion_logits(model, prompt_ids, completion_ids, rows):
        for place, head in enumerate(heads):
            found = _token_scores(head.logps(logits[mask]), ids[mask])
            block = np.full((4, *mask.shape), np.nan)
            block[:, mask.numpy()] = found
            out[place, :, first : first + len(mask), : mask.shape[1]] = block
    return [TokenScores(*scores) for scores in out]


def _token_scores(logps: Tensor, ids: Tensor) -> Floats:
    """(4, N): log-prob, entropy, log-prob of the most likely token, rank."""
    chosen = logps.gather(1, ids.unsqueeze(1)).squeeze(1)
    entropy = torch.special.entr(logps.exp()).sum(1)
    ranks = (logps > chosen.unsqueeze(1)).sum(1)
    scores: Floats = torch.stack([x.double() for x in (chosen, entropy, logps.amax(1), ranks)]).cpu().numpy()
    return scores


def completion_logits(
    model: Any, prompt_ids: Ids, completion_ids: Ids, rows: int = 16
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(first row, logits (b, t, V), ids (b, t), mask (b, t)) of each forward, on the CPU."""
    for start in range(0, len(completion_ids), rows):
        completions = completion_ids[start : start + rows]
        # The prompt's last position gives the first token; the cache of the prompts gives the context of the others.
        cache, attention, last = _prefill(model, prompt_ids[start : start + rows])
        ids, mask = _right_padded(completions)
        device = last.device
        logits = last.unsqueeze(1)
        if ids.shape[1] > 1:  # the last token is not fed, because nothing that it predicts is needed
            attention = torch.cat([attention, mask[:, :-1].long()], 1)
            positions = attention.cumsum(1)[:, -(ids.shape[1] - 1) :] - 1
            out = model(
                input_ids=ids[:, :-1].to(device),
                attention_mask=attention.to(device),
                position_ids=positions.clamp(min=0).to(device),
                past_key_values=cache,
            )
            logits = torch.cat([logits, out.logits.float()], 1)
        yield start, logits.cpu(), ids, mask


def _prefill(model: Any, prompt_ids: Ids) -> tuple[Any, Tensor, Tensor]:
    """Cache, attention mask (b, P) on the CPU, and logits (b, V) of the first token, with one row per prompt."""
    groups = [(list(key), len(list(same))) for key, same in groupby(map(tuple, prompt_ids))]
    ids, mask = _left_padded([key for key, _ in groups], PAD)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    device = next(model.parameters()).device
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    out = model(**{k: v.to(device) for k, v in inputs.items()}, use_cache=True, logits_to_keep=1)
    # Neighbours with the same prompt were computed once: go from one row per group to one row per completion.
    index = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([count for _, count in groups]))
    out.past_key_values.batch_select_indices(index.to(device))
    return out.past_key_values, mask[index], out.logits[:, -1].float()[index.to(device)]


def _left_padded(rows: Ids, pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _right_padded(rows: Ids) -> tuple[Tensor, Tensor]:
    width = max(1, max(len(row) for row in rows))
    ids = torch.tensor([list(row) + [PAD] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return ids, mask


@torch.no_grad()
def sample_completions(
    model: Any,
    prompt_ids: Ids,
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    head: Head | None = None,
    generator: torch.Generator | None = None,
    rows: int = 64,
) -> tuple[list[list[int]], list[list[float]]]:
    """One completion of each prompt, with the log-prob of each token under the distribution it was drawn from.

    Args:
        model: a causal LM; its mode (train or eval) does not change.
        prompt_ids: B prompts; repeat one for several completions.
        max_tokens: length of the longest completion.
        stop_ids: tokens that end a completion (they are part of it).
        head: temperature and truncation.
        generator: generator of the random numbers, on the CPU.
        rows: most completions at a time.

    Returns:
        Completion ids and log-probs (nats), one list per prompt.
    """
    ids: list[list[int]] = []
    logps: list[list[float]] = []
    for start in range(0, len(prompt_ids), rows):
        for tokens, values in _sample_block(
            model, prompt_ids[start : start + rows], max_tokens, set(stop_ids), head or Head(), generator
        ):
            ids.append(tokens)
            logps.append(values)
    return ids, logps


def _sample_block(
    model: Any, prompts: Ids, max_tokens: int, stop: set[int], head: Head, generator: torch.Generator | None
) -> Iterator[tuple[list[int], list[float]]]:
    cache, attention, logits = _prefill(model, prompts)
    device = logits.device
    tokens: list[list[int]] = [[] for _ in prompts]
    values: list[list[float]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    for place in range(max_tokens):
        logps = head.logps(logits.cpu())
        drawn = torch.multinomial(logps.exp(), 1, generator=generator)
        chosen = logps.gather(1, drawn).squeeze(1).tolist()
        for row, token in enumerate(drawn.squeeze(1).tolist()):
            if alive[row]:
                tokens[row].append(token)
                values[row].append(chosen[row])
                alive[row] = token not in stop
        if not any(alive) or place + 1 == max_tokens:
            break
        attention = torch.cat([attention, torch.ones(len(prompts), 1, dtype=attention.dtype)], 1)
        positions = attention.sum(1, keepdim=True) - 1
        logits = model(
            input_ids=drawn.to(device),
            attention_mask=attention.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
        ).logits[:, -1]
    yield from zip(tokens, values, strict=True)
