"""Splits a generation batch into micro-batches of like length, each cut to its own width.

TRL pads a generation batch to its longest prompt and longest completion, shuffles it and splits it as it is. Every
micro-batch then computes on the padding of the longest row of all. Here rows are sorted within each optimizer step, so
that rows of like length meet, and a micro-batch loses the columns that are padding in all its rows. Which rows an
optimizer step uses does not change, unless whole groups are wanted (``share_prefix: true``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.rollouts.batches import MODEL_INPUTS

TrimPadding = Literal[True, False, "columns", "ranks"]
"""True: sort and cut; "ranks": and rows change places between ranks; "columns": only cut; False: as TRL does."""

_PROMPT = {"prompt_ids", "prompt_mask"}
_WHOLE = {"routed_experts"}
_ROW = {"group_rewards", "rewards", "group_ids", "has_twin"}
"""Fields of this kit without columns of tokens; that of ``group_rewards`` (B, G) are responses."""
_COMPLETION = {
    "completion_ids", "completion_mask", "tool_mask", "advantages", "sampling_per_token_logps", "old_per_token_logps",
    "ref_per_token_logps", "proximal_per_token_logps", "policy_versions", "decided_weights", "decided_keep",
    "importance_sampling_ratio",
}  # fmt: skip


class Lengths(NamedTuple):
    """Tokens of each row, (B,) on the host, and which prompt it has (equal numbers = equal prompts)."""

    prompt: Tensor
    completion: Tensor
    identity: Tensor

    def rows(self, index: Tensor) -> Lengths:
        """Those of some rows."""
        return Lengths(*(column[index] for column in self))


@dataclass(frozen=True)
class Splitting:
    """How a generation batch becomes micro-batches.

    Args:
        window: consecutive micro-batches whose rows may change places, because one optimizer step uses them all.
        trim: cut the columns that are padding in all rows of a micro-batch.
        sort: put rows of like length together. Only where the loss does not depend on the split
            (:func:`~trl_offpolicy.objective.splitting.split_dependence`).
        whole_groups: rows of one prompt meet in a micro-batch. True: all of them, for which rows may leave their
            window; "auto": those of a window, where computing prompts once then costs less than sorted rows do. It also
            needs ``sort``.
        multiple: widths are multiples of it (``pad_to_multiple_of``); None = any.
        balance: rows may change places between ranks as well (:mod:`trl_offpolicy.rollouts.rank_balance`). It also
            needs ``sort``.
    """

    window: int
    trim: bool = True
    sort: bool = True
    whole_groups: bool | Literal["auto"] = False
    multiple: int | None = None
    balance: bool = False


def sorts(trim: TrimPadding) -> bool:
    """True if the option asks for micro-batches of like length."""
    return trim is True or trim == "ranks"


def lengths_of(rows: Mapping[str, Tensor]) -> Lengths:
    """The lengths of a generation batch's rows. A row of which nothing is learned (mask 0) has length 0."""
    mask = rows["prompt_mask"].bool()
    ids = torch.where(mask, rows["prompt_ids"], -1)
    return Lengths(_used(mask.flip(-1)).cpu(), _used(rows["completion_mask"]).cpu(), torch.tensor(same_rows(ids)))


def same_rows(ids: Tensor) -> list[int]:
    """For each row of (B, L) its number among the different rows, in the order of their first appearance."""
    return numbered(ids.cpu().numpy())


def numbered(rows: Any) -> list[int]:
    """The same of rows in a numpy array."""
    known: dict[bytes, int] = {}
    return [known.setdefault(row.tobytes(), len(known)) for row in rows]


def _used(mask: Tensor) -> Tensor:
    """(B,) columns up to the last one that is not 0."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask.bool(), columns, 0).amax(-1)


def split_rows(rows: Mapping[str, Any], parts: int, how: Splitting) -> list[dict[str, Any]]:
    """Split a generation batch, already in random order, into ``parts`` micro-batches of equal size.

    Everything that belongs to a row goes with it; 0-d tensors and None go to every part.

    Args:
        rows: tensors, or lists, with one entry for each row.
        parts: number of micro-batches; ``how.window`` divides it.
        how: what may be done.

    Raises:
        ValueError: ``window`` does not divide ``parts``.
    """
    if how.window < 1 or parts % how.window:
        raise ValueError(f"window must divide the number of micro-batches, {parts}, but got {how.window}.")
    count = len(rows["completion_ids"])
    size = count // parts
    order = torch.arange(count)
    if how.sort and count == size * parts and not has_image_inputs(rows):
        order = ordered(lengths_of(rows), size, how)
    micro_batches = [taken(rows, order[start : start + size]) for start in range(0, size * parts, size)]
    return [trimmed(part, multiple=how.multiple) for part in micro_batches] if how.trim else micro_batches


def has_image_inputs(rows: Mapping[str, Any]) -> bool:
    """True if rows have what a vision-language model needs besides text; they are then left as they are."""
    return any(rows.get(name) is not None for name in (*MODEL_INPUTS, "images"))


def taken(rows: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    """The rows at these places; what is None or a 0-d tensor belongs to all rows."""

    def take(value: Any) -> Any:
        if value is None or (isinstance(value, Tensor) and value.dim() == 0):
            return value
        return value[index.to(value.device)] if isinstance(value, Tensor) else [value[i] for i in index.tolist()]

    return {name: take(value) for name, value in rows.items()}


# ----------------------------------------------------------------------------------------------------------- ordering


def ordered(lengths: Lengths, size: int, how: Splitting) -> Tensor:
    """(B,) the order of the rows: the cheapest of some, within windows.

    Args:
        lengths: of the rows.
        size: rows of a micro-batch.
        how: what may be done.
    """
    count, window = len(lengths.prompt), size * how.window
    if size >= count and not how.whole_groups:
        return torch.arange(count)  # one micro-batch

    def within(order: Tensor, by: Callable[[Lengths], Tensor]) -> Tensor:
        return torch.cat([part[by(lengths.rows(part))] for part in torch.split(order, window)])

    plain = {key: within(torch.arange(count), key) for key in (_by_completion, _by_total, _by_prompt)}
    best = min(plain.values(), key=lambda order: padded_tokens(lengths.rows(order), size))
    if not how.whole_groups:
        return best
    across = _groups_together(lengths.identity) if how.whole_groups is True else torch.arange(count)
    grouped = within(across, _by_group)
    saves = padded_tokens(lengths.rows(grouped), size, once=True) < padded_tokens(lengths.rows(best), size)
    return grouped if saves or how.whole_groups is True else best


def padded_tokens(lengths: Lengths, size: int, *, once: bool = False) -> int:
    """Tokens that the model computes for micro-batches of ``size`` rows, padding included.

    Args:
        lengths: of the rows, in order.
        size: rows of a micro-batch.
        once: a prompt is computed once in a micro-batch where that pays, not once for each of its rows.
    """
    total = 0
    for prompt, completion, identity in zip(*(torch.split(column, size) for column in lengths), strict=True):
        rows, different = len(identity), len(identity.unique())
        wide, long = int(prompt.max()), int(completion.max())
        shared = once and saving_pays((rows - different) * wide, rows * (wide + long))
        total += (different if shared else rows) * wide + rows * long
    return total


def saving_pays(saved: int, computed: int) -> bool:
    """True if leaving out ``saved`` of the ``computed`` tokens of a forward outweighs what taking them apart costs."""
    return saved >= LEAST_SAVED and saved * LEAST_SHARE >= computed


LEAST_SAVED, LEAST_SHARE = 256, 10
"""A forward must save at least so many tokens, and one in so many: taking rows apart costs a few small operations."""


# The longest come first: if memory does not suffice, the run says so at its first micro-batch.


def _by_completion(lengths: Lengths) -> Tensor:
    return _descending(lengths.completion, lengths.prompt)


def _by_total(lengths: Lengths) -> Tensor:
    return _descending(lengths.completion + lengths.prompt, lengths.completion)


def _by_prompt(lengths: Lengths) -> Tensor:
    return _descending(lengths.prompt, lengths.completion)


def _descending(first: Tensor, second: Tensor) -> Tensor:
    inner = torch.argsort(second, descending=True, stable=True)
    return inner[torch.argsort(first[inner], descending=True, stable=True)]


def _groups_together(identity: Tensor) -> Tensor:
    """Rows of one prompt beside each other; groups in the order of their first appearance."""
    return torch.argsort(identity, stable=True)


def _by_group(lengths: Lengths) -> Tensor:
    """Groups by their longest completion, and within a group the longest first."""
    longest = torch.zeros(int(lengths.identity.max()) + 1, dtype=lengths.completion.dtype)
    longest = longest.scatter_reduce(0, lengths.identity, lengths.completion, "amax")
    inner = _descending(lengths.completion, lengths.prompt)
    inner = inner[torch.argsort(lengths.identity[inner], stable=True)]
    return inner[torch.argsort(longest[lengths.identity[inner]], descending=True, stable=True)]


# ----------------------------------------------------------------------------------------------------------- trimming


def trimmed(rows: Mapping[str, Any], *, multiple: int | None = None) -> dict[str, Any]:
    """A micro-batch without the columns that are padding in all its rows: left of prompts, right of completions.

    Rows with images stay as they are, and so does a batch with a field whose width is that of prompts, completions or
    both, but of which it is not known what its columns are.

    Args:
        rows: the micro-batch.
        multiple: widths are multiples of it, as far as the rows are wide enough; None = any.

    Example:
        >>> prompt, completion = torch.tensor([[0, 5], [0, 6]]), torch.tensor([[7, 0], [8, 0]])
        >>> rows = {"prompt_ids": prompt, "prompt_mask": prompt > 0}
        >>> rows |= {"completion_ids": completion, "completion_mask": completion > 0}
        >>> [trimmed(rows)[name].tolist() for name in ("prompt_ids", "completion_ids")]
        [[[5], [6]], [[7], [8]]]
    """
    prompt, completion = rows["prompt_mask"], rows["completion_mask"]
    old = prompt.shape[1], completion.shape[1]
    if has_image_inputs(rows) or has_unknown_columns(rows):
        return dict(rows)
    used = int(_used(prompt.flip(-1)).max()), int(_used(completion).max())
    new = tuple(_rounded(width, multiple, limit) for width, limit in zip(used, old, strict=True))
    if new == old:
        return dict(rows)
    columns = {
        "prompt": slice(old[0] - new[0], old[0]),
        "completion": slice(0, new[1]),
        "whole": slice(old[0] - new[0], old[0] + new[1]),
    }

    def cut(name: str, value: Any) -> Any:
        kept = columns.get(columns_of(name) or "")
        if kept is None or not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] < kept.stop:
            return value  # one value for each row, also as (B, 1)
        return value[:, kept].contiguous()

    return {name: cut(name, value) for name, value in rows.items()}


def _rounded(width: int, multiple: int | None, limit: int) -> int:
    """The next multiple of at least one column, at most ``limit``."""
    width = max(width, 1)
    return min(limit, width if multiple is None else -(-width // multiple) * multiple)


def columns_of(name: str) -> Literal["prompt", "completion", "whole"] | None:
    """What the columns of a field are: the prompt's tokens, the completion's, or both; None = it has none."""
    if name in _PROMPT:
        return "prompt"
    if name in _COMPLETION:
        return "completion"
    return "whole" if name in _WHOLE else None


def has_unknown_columns(rows: Mapping[str, Any]) -> bool:
    """True if a field is as wide as prompts, completions or both, but it is not known what its columns are."""
    prompt, completion = rows["prompt_mask"].shape[1], rows["completion_mask"].shape[1]

    def is_unknown(name: str, value: Any) -> bool:
        known = columns_of(name) is not None or name in _ROW
        wide = isinstance(value, Tensor) and value.dim() > 1
        return wide and not known and value.shape[1] in (prompt, completion, prompt + completion)

    return any(is_unknown(name, value) for name, value in rows.items())


# ----------------------------------------------------------------------------------------------------------- scoring


def scoring_chunks(lengths: Lengths, size: int, *, whole_groups: bool | Literal["auto"] = False) -> list[Tensor]:
    """Rows of each forward when a generation batch is scored without gradient: those of like length together.

    Args:
        lengths: of all rows.
        size: rows of a forward.
        whole_groups: as in :class:`Splitting`.
    """
    parts = -(-len(lengths.prompt) // size)
    return list(torch.split(ordered(lengths, size, Splitting(parts, whole_groups=whole_groups)), size))


def used_columns(mask: Tensor, prompt_width: int, *, multiple: int | None = None) -> slice:
    """The columns of prompt and completion that are not padding in all rows; at least one of each.

    Args:
        mask: (B, P + T) attention mask.
        prompt_width: P.
        multiple: as in :func:`trimmed`.
    """
    parts = mask[:, :prompt_width].flip(-1), mask[:, prompt_width:]
    prompt, completion = (_rounded(int(_used(part).max()), multiple, part.shape[1]) for part in parts)
    return slice(prompt_width - prompt, prompt_width + completion)


def in_first_order(parts: Sequence[Tensor], chunks: Sequence[Tensor], width: int) -> Tensor:
    """(B, width) the chunks' results in the order of the rows, 0 right of a chunk's own width."""
    wide = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    order = torch.argsort(torch.cat(list(chunks)))
    joined = torch.cat(wide)
    return joined[order.to(joined.device)]
