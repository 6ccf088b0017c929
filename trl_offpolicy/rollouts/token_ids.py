"""Checks that the ids that the engine sampled are the ids that are trained on. Text tokenized again often differs.

A run of trainable tokens must be what the engine returned for exactly the ids before it in the batch. Then neither the
sampled tokens nor their context went through text. Only a few rows of a generation batch are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.engines.engine import Call
from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group, Stats

logger = logging.getLogger(__name__)

CheckTokenIds = Literal["warn", "raise", "off"]
ROWS = 8
"""Number of rows of a generation batch that each rank checks, at most."""
TOKENS = 8192
"""Number of tokens, padding included, that it checks, if one row is not longer: reading them again takes some 0.1 s."""
SAMPLED_IDS = "sampled_ids"
"""Key of a ``rollout_func``'s result: per row the ids that the engine returned, turn by turn, without tool output."""

TOKEN_ID_METRICS = ("retokenised_fraction", "noncanonical_fraction")
_ROWS = Layout(sums=("rows", "changed"))

Ids = Sequence[int]


@dataclass(frozen=True)
class Drift:
    """The first token of a row that is not the engine's.

    Args:
        position: its index in the completion; negative = in the prompt, counted from the prompt's end.
        batch_id: the id in the batch; None = the batch ends before it.
        engine_id: the engine's id; None = the engine returned no token there.
    """

    position: int
    batch_id: int | None
    engine_id: int | None


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs of True as (start, end).

    Example:
        >>> runs([True, True, False, True])
        [(0, 2), (3, 4)]
    """
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def first_drift(prompt: Ids, completion: Ids, mask: Sequence[bool], calls: Iterable[Call]) -> Drift | None:
    """The first token of a row that the engine did not return or was not given; None = all are the engine's.

    Args:
        prompt: prompt ids of the row.
        completion: completion ids of the row, including tool tokens.
        mask: True = a token that the batch marks as sampled by the engine.
        calls: the engine's requests and answers, for this row and others.
    """
    row = [*prompt, *completion]
    known: dict[tuple[int, ...], list[Ids]] = {}
    for call in calls:
        known.setdefault(tuple(call.prompt), []).append(call.completion)
    for start, end in runs(mask):
        at = start
        while at < end:
            given = tuple(row[: len(prompt) + at])
            if given not in known:
                return _first_difference(given, known, at - len(given)) if at == start else _surplus(completion, at)
            answer = _best(known[given], completion[at:end])
            same = _common(answer, completion[at:end])
            cut = at + same == end == len(completion)  # the row ends before the answer does
            if not cut and (same < len(answer) or not same):
                return Drift(at + same, _at(completion, at + same), _at(answer, same))
            at += same
    return None


def _best(answers: Sequence[Ids], ids: Ids) -> Ids:
    """The answer whose common beginning with ``ids`` is longest."""
    return max(answers, key=lambda answer: (_common(answer, ids), -len(answer)))


def _common(left: Ids, right: Ids) -> int:
    """Number of equal ids at the beginning of both."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _at(ids: Ids, index: int) -> int | None:
    return int(ids[index]) if index < len(ids) else None


def _surplus(completion: Ids, at: int) -> Drift:
    return Drift(at, _at(completion, at), None)


def _first_difference(given: tuple[int, ...], known: Mapping[tuple[int, ...], Any], offset: int) -> Drift:
    """The first difference from the most similar context that the engine got; ``offset`` is the position of index 0."""
    nearest = max(known, key=lambda ids: (_common(ids, given), -abs(len(ids) - len(given))), default=())
    same = _common(nearest, given)
    return Drift(offset + same, _at(given, same), _at(nearest, same))


def drift_of_ids(completion: Ids, mask: Sequence[bool], sampled: Ids) -> Drift | None:
    """As :func:`first_drift`, if only the sampled ids are known: the trainable ids must equal them, in order."""
    own = [i for i, inside in enumerate(mask) if inside]
    if not own:  # the row has left the loss
        return None
    same = _common([completion[i] for i in own], sampled)
    if same == len(own) and (same == len(sampled) or (own and own[-1] == len(completion) - 1)):
        return None
    position = own[same] if same < len(own) else len(completion)
    return Drift(position, _at(completion, position), _at(sampled, same))


def is_canonical(completion: Ids, mask: Sequence[bool], again: Callable[[list[int]], list[int]]) -> bool:
    """True if ``again`` (decoding, then encoding) leaves every run of trainable tokens unchanged."""
    parts = [list(completion[start:end]) for start, end in runs(mask)]
    return all(again(part) == part for part in parts)


class TokenIds:
    """Checks a few rows of each generation batch.

    Args:
        tokenizer: decodes and encodes.
        mode: a :data:`CheckTokenIds`, what happens on drift: "warn" (once), "raise", or "off" (no check).

    Raises:
        ValueError: ``mode`` is none of these.
    """

    def __init__(self, tokenizer: Any, mode: str) -> None:
        if mode not in get_args(CheckTokenIds):
            raise ValueError(f"check_token_ids must be one of {list(get_args(CheckTokenIds))}, but got {mode!r}.")
        self.tokenizer, self.mode = tokenizer, mode
        self._warned = False
        self._batches = 0

    def __call__(self, output: dict[str, Any], calls: Sequence[Call], sampled: Sequence[Ids] | None = None) -> Stats:
        """``rollout/retokenised_fraction`` if the engine's ids are known, and ``rollout/noncanonical_fraction``.

        Args:
            output: tensors of the generation batch, under the names of TRL's dict.
            calls: the engine's requests and answers for this batch.
            sampled: per row the ids that the engine returned, in place of ``calls``.

        Raises:
            ValueError: with "raise", if a token is not the engine's.
        """
        if self.mode == "off":
            return Stats({})
        # An engine puts image tokens into the prompt, so such rows are not checked. The groups are there all the same:
        # ranks without images have them, and all ranks must hold the same ones when sums are added up.
        rows = [] if "pixel_values" in output else _host_rows(output, self._batches)
        self._batches += 1
        canonical = [is_canonical(completion, mask, self._again) for _, _, completion, mask in rows]
        groups = {"rollout#canonical": _share(canonical, "noncanonical_fraction", output)}
        if calls or sampled is not None:
            drifts = {
                i: first_drift(prompt, completion, mask, _of_prompt(calls, prompt))
                if sampled is None
                else drift_of_ids(completion, mask, sampled[i])
                for i, prompt, completion, mask in rows
            }
            self._tell({i: drift for i, drift in drifts.items() if drift is not None})
            same = [drift is None for drift in drifts.values()]
            groups["rollout#ids"] = _share(same, "retokenised_fraction", output)
        return Stats(groups)

    def _again(self, ids: list[int]) -> list[int]:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _tell(self, drifts: Mapping[int, Drift]) -> None:
        if not drifts or (self._warned and self.mode == "warn"):
            return
        row = min(drifts)
        message = _message(row, drifts[row], self.tokenizer.decode, len(drifts))
        if self.mode == "raise":
            raise ValueError(message)
        self._warned = True
        logger.warning(message)


def run_entry(stats: Stats, mode: str) -> dict[str, Any]:
    """The entry of ``run.json`` for the first generation batch. All ranks call it.

    ``check`` is the option, ``rows`` the rows of all ranks whose ids were compared with the engine's (0: these are not
    known), ``changed`` those that hold other ids.

    Args:
        stats: what the check returned.
        mode: the option.
    """
    ids = stats.all_reduce(gather_rows).groups.get("rollout#ids")
    return {"check": mode, **{name: 0 if ids is None else int(ids.moments[name]) for name in _ROWS.sums}}


class TokenIdCheck:
    """:class:`TokenIds` for a ``trl.GRPOTrainer``.

    Args:
        trainer: a trainer with ``_tokenizer`` and, with vLLM, ``vllm_generation.calls``.
        mode: a :data:`CheckTokenIds`.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        self.trainer, self.mode = trainer, mode
        self._check = TokenIds(trainer._tokenizer, mode)
        self._sampled: list[Ids] | None = None
        if trainer.rollout_func is not None and mode != "off":
            trainer.rollout_func = self._watched(trainer.rollout_func)

    def _watched(self, rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap the function to keep the sampled ids that it reports, which a reward function need not see."""

        def watched(*args: Any, **kwargs: Any) -> dict[str, Any]:
            output = dict(rollout_func(*args, **kwargs))
            self._sampled = output.pop(SAMPLED_IDS, None)
            return output

        return watched

    def __call__(self, output: dict[str, Any]) -> Stats:
        """As :meth:`TokenIds.__call__`, for TRL's dict of a generation batch."""
        calls, sampled = self._take()
        return self._check(output, calls, sampled)

    def _take(self) -> tuple[list[Call], list[Ids] | None]:
        """Take the records since the last generation batch, and clear them."""
        engine_calls = getattr(getattr(self.trainer, "vllm_generation", None), "calls", None)
        calls, sampled = list(engine_calls or ()), self._sampled
        self._sampled = None
        if engine_calls:
            engine_calls.clear()
        return calls, sampled


def _message(row: int, drift: Drift, decode: Callable[[list[int]], str], count: int) -> str:
    def said(token: int | None) -> str:
        return "nothing" if token is None else f"{token} ({decode([token])!r})"

    where = f"token {drift.position} of the completion" if drift.position >= 0 else f"prompt token {drift.position}"
    return (
        f"completion_ids must be the ids that the engine sampled, but got others in {count} of the rows looked at. "
        f"First: row {row}, {where}: the batch holds {said(drift.batch_id)}, the engine had {said(drift.engine_id)}. "
        "Text was tokenised again somewhere; from there on the log-probs belong to other tokens. Build the rows from "
        "the engine's ids (docs/agents.md)."
    )


def _of_prompt(calls: Sequence[Call], prompt: Ids) -> list[Call]:
    """The calls of this prompt's group; all calls if there is none."""
    mine = [call for call in calls if list(call.prompt[: len(prompt)]) == list(prompt)]
    return mine or list(calls)


def _host_rows(output: dict[str, Any], batches: int) -> list[tuple[int, list[int], list[int], list[bool]]]:
    """(row, prompt, completion, trainable) of up to :data:`ROWS` rows, evenly spread, without padding.

    The first one moves by a row with each of the ``batches`` before.
    """
    total, length = output["completion_ids"].shape
    wanted = min(ROWS, max(1, TOKENS // max(1, length)))
    apart = max(1, -(-total // wanted))
    chosen = torch.arange(batches % apart, total, apart, device=output["completion_ids"].device)

    def host(name: str) -> list[list[int]]:
        rows: list[list[int]] = output[name][chosen].tolist()
        return rows

    tools = host("tool_mask") if "tool_mask" in output else host("completion_mask")
    parts = (host(name) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
    found = []
    for i, prompt, seen, ids, inside, tool in zip(chosen.tolist(), *parts, tools, strict=True):
        length = sum(inside)
        prompt = [token for token, use in zip(prompt, seen, strict=True) if use]
        found.append((i, prompt, ids[:length], [bool(x) for x in tool[:length]]))
    return found


def _share(same: Sequence[bool], name: str, output: dict[str, Any]) -> Group:
    """The share of rows that are not the same, as a group of stats named ``name``."""
    device = output["completion_ids"].device

    def count(value: int) -> Tensor:
        return torch.tensor(float(value), device=device)

    counts = moments(_ROWS, [count(len(same)), count(len(same) - sum(same))])
    return Group(counts, {name: fraction("changed", "rows")}, sparse=True)
