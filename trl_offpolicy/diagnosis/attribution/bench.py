"""What an investigator has at hand: the trainer's model, its tokens, and what can be changed about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.contexts.layouts import Layout, score_in_layout, score_packed
from trl_offpolicy.diagnosis.attribution.contexts.precision import Inside
from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.engines.hf import Head, Ids, TokenScores, score_completions


@dataclass(frozen=True)
class Bench:
    """A model and what can be changed about it.

    Args:
        model: the trainer's model, in eval mode and with the trainer's weights.
        prompt_ids: B prompts as the engine got them.
        completion_ids: B completions as the engine returned them.
        weights: contexts in which the model holds other weights, by ``cause:detail``, e.g. "wrong_adapter:no adapter".
        precisions: contexts in which it computes in another precision, by ``precision:detail``; None = the usual ones.
        prompts: other renderings of the prompts, by name; those that follow from the ids are added.
        rows: number of completions that are scored under each hypothesis.
        head: temperature and truncation under which the trainer scores.
        stop_ids: tokens that end a completion.
        pad_ids: ids that may pad; the first comes first.
        spellings: ids -> other sequences of ids with the same text; None = not known (no tokenizer).
    """

    model: Any
    prompt_ids: Ids
    completion_ids: Ids
    weights: Mapping[str, Inside] = field(default_factory=dict)
    precisions: Mapping[str, Inside] | None = None
    prompts: Mapping[str, Ids] = field(default_factory=dict)
    rows: int = 8
    head: Head = Head()  # noqa: RUF009  frozen
    stop_ids: Sequence[int] | None = None
    pad_ids: Sequence[int] | None = None
    spellings: Callable[[Sequence[int]], Sequence[Sequence[int]]] | None = None

    def score(self, rows: Sequence[int], *, prompts: Ids | None = None, inside: Inside = nullcontext,
              heads: Sequence[Head] | None = None, width: int) -> list[TokenScores]:  # fmt: skip
        """Scores (B, ``width``) of some completions; NaN in the other rows."""
        chosen = [(prompts or self.prompt_ids)[row] for row in rows]
        completions = [self.completion_ids[row] for row in rows]
        with inside():
            found = score_completions(self.model, chosen, completions, heads=heads or [self.head])
        return [TokenScores(*(self._placed(x, rows, width) for x in vars(scores).values())) for scores in found]

    def score_layout(self, rows: Sequence[int], layout: Layout, prompt_width: int, *, width: int) -> Floats:
        """Log-probs (B, ``width``) of some completions in another layout; NaN in the other rows."""
        chosen, completions = [self.prompt_ids[row] for row in rows], [self.completion_ids[row] for row in rows]
        found = score_in_layout(self.model, chosen, completions, layout, prompt_width=prompt_width, head=self.head)
        return self._placed(found, rows, width)

    def score_packed(self, rows: Sequence[int], *, width: int) -> Floats:
        """Log-probs (B, ``width``) of some completions that attend the row before theirs; NaN in the other rows."""
        return score_packed(self.model, self.prompt_ids, self.completion_ids, rows, width=width, head=self.head)

    def score_without(self, rows: Sequence[int], count: int, *, width: int) -> Floats:
        """Log-probs (B, ``width``) of some completions that lack their first tokens."""
        cut = [list(self.completion_ids[row])[count:] for row in rows]
        chosen = [(row, ids) for row, ids in zip(rows, cut, strict=True) if ids]
        if not chosen:
            return np.full((len(self.completion_ids), width), np.nan)
        prompts = [self.prompt_ids[row] for row, _ in chosen]
        (scores,) = score_completions(self.model, prompts, [ids for _, ids in chosen], heads=[self.head])
        return self._placed(scores.logps, [row for row, _ in chosen], width)

    def score_prompts(self, row: int, prompts: Ids, *, most: int | None = None) -> Floats:
        """Log-probs (N, T) of one completion, or of its first ``most`` tokens, after each of N prompts."""
        completion = list(self.completion_ids[row])[:most]
        (scores,) = score_completions(self.model, prompts, [completion] * len(prompts), heads=[self.head])
        return scores.logps

    def _placed(self, values: Floats, rows: Sequence[int], width: int) -> Floats:
        out = np.full((len(self.completion_ids), width), np.nan)
        out[np.asarray(rows), : values.shape[1]] = values[:, :width]
        return out

    @property
    def begins(self) -> tuple[int, ...]:
        """Ids that may begin a prompt."""
        return self._known(listed(getattr(self.model.config, "bos_token_id", None)))

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a completion: those given, or those of the model's generation configuration."""
        return self._known(listed(self._configured("eos_token_id")) if self.stop_ids is None else self.stop_ids)

    @property
    def pads(self) -> tuple[int, ...]:
        """Ids that may pad."""
        if self.pad_ids is not None:
            return self._known(self.pad_ids)
        return self._known([*listed(self._configured("pad_token_id")), *self.ends, 0])

    def _known(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Those of some ids that the model has, each once: a cut-down model may keep the settings of the whole one."""
        rows = int(self.model.get_input_embeddings().weight.shape[0])
        return tuple(dict.fromkeys(token for token in ids if 0 <= token < rows))

    def _configured(self, name: str) -> Any:
        configs = (getattr(self.model, "generation_config", None), self.model.config)
        return next((value for c in configs if (value := getattr(c, name, None)) is not None), None)


def listed(value: Any) -> tuple[int, ...]:
    """Ids of a setting that is one id, several, or None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def stop_ids_of(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end a completion: the model's own, else the tokenizer's."""
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or tokenizer.eos_token_id
    if stop is None:
        return []
    return list(stop) if isinstance(stop, list | tuple) else [stop]


def pad_ids_of(tokenizer: Any, stop_ids: Sequence[int]) -> list[int]:
    """Ids that a trainer may pad with, the tokenizer's own first."""
    own = tokenizer.pad_token_id
    return list(dict.fromkeys([*([] if own is None else [own]), *stop_ids, 0]))
