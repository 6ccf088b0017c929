"""Passes prompts and completions through a decoder as one sequence: each prompt once, and no padding.

A decoder works token by token in everything but its attention. So the tokens of many rows can pass through it one after
another, and a prompt that several rows have in common needs to be there once. Attention alone must know the rows. In
each layer transformers' own attention function (SDPA, eager, FlashAttention) is called twice: for the prompts, and for
the completions, with their prompt's keys and values before their own. These are expanded over the rows of the prompt,
so that their gradient is the sum of what the copies would have got.

Each layer is called once, and what it needs travels in its arguments. So gradient checkpointing can call it again, and
strategies that gather a layer's weights (FSDP, ZeRO-3) see nothing unusual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.rollouts.prompts import Prompts

ARGUMENT = "rows_of_sequence"
"""Under this name a :class:`Rows` passes through the layers to the attention function."""


@dataclass(frozen=True, eq=False)
class Block:
    """R rows of W places, of which ``place`` (n,) holds the numbers of those that have a token; None = all have one."""

    rows: int
    width: int
    place: Tensor | None

    @property
    def tokens(self) -> int:
        """How many tokens there are, n."""
        return self.rows * self.width if self.place is None else len(self.place)

    def take(self, padded: Tensor) -> Tensor:
        """(R, W, ...) to (n, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)

    def pad(self, tokens: Tensor) -> Tensor:
        """(n, ...) to (R, W, ...), 0 where there is no token."""
        if self.place is not None:
            empty = tokens.new_zeros(self.rows * self.width, *tokens.shape[1:])
            tokens = empty.index_copy(0, self.place, tokens)
        return tokens.view(self.rows, self.width, *tokens.shape[1:])


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the tokens of a sequence belong: first those of U prompts, then those of B completions behind them.

    Args:
        prompts: the prompts and what rows they belong to.
        prompt: their block.
        completion: the block of the completions.
        masks: what the attention function takes for the prompts and for the completions; None = causal, without
            padding.
    """

    prompts: Prompts
    prompt: Block
    completion: Block
    masks: tuple[Tensor | None, Tensor | None]

    @classmethod
    def of(cls, prompts: Prompts, whole: Tensor, kind: str) -> Rows:
        """The layout of (B, T) completions behind their prompts.

        Args:
            prompts: the prompts.
            whole: (B, P + T) mask of each row's prompt and completion.
            kind: the attention implementation, as in the model's configuration.
        """
        masks_of = prompts.mask, whole[:, prompts.mask.shape[1] :]
        pairs = zip(masks_of, prompts.places, strict=True)
        prompt, completion = (Block(mask.shape[0], mask.shape[1], place) for mask, place in pairs)
        full = prompt.place is None
        if "flash" in kind:  # it aligns the last query with the last key, and takes the mask of padding as it is
            masks = None if full else prompts.mask, None if full and completion.place is None else whole
            return cls(prompts, prompt, completion, masks)
        for_prompts = None if full and kind != "eager" else _visible(prompts.mask, prompt.width, kind)
        return cls(prompts, prompt, completion, (for_prompts, _visible(whole, completion.width, kind)))

    def sequence(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """(U, P, ...) and (B, T, ...) to the (1, N, ...) sequence."""
        return torch.cat([self.prompt.take(prompts), self.completion.take(completions)])[None]

    def apart(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """(1, N, ...) to (U, P, ...) and (B, T, ...)."""
        tokens, first = sequence[0], self.prompt.tokens
        return self.prompt.pad(tokens[:first]), self.completion.pad(tokens[first:])


def _visible(mask: Tensor, queries: int, kind: str) -> Tensor:
    """(R, 1, Q, K): the keys that each of the last Q tokens sees, as bool, or for eager attention as what is added."""
    keys = mask.shape[1]
    key = torch.arange(keys, device=mask.device)
    query = key[keys - queries :, None]
    # a place without a token sees itself, because a softmax over nothing is NaN
    seen = mask.bool()[:, None, None, :] & (key <= query) | (key == query)
    if kind != "eager":
        return seen
    return torch.zeros(seen.shape, device=mask.device).masked_fill(~seen, torch.finfo(torch.float32).min)


def forward(
    decoder: Callable[..., Any],
    config: Any,
    prompts: Prompts,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    counted: bool,
    **kwargs: Any,
) -> Tensor:
    """(B, 1 + T, H): hidden states of each prompt's last token and of the completions; 0 where there is no token.

    Args:
        decoder: the backbone's forward.
        config: its configuration.
        prompts: the prompts, padded on the left.
        completion_ids: (B, T).
        completion_mask: (B, T).
        counted: positions count from each row's first token, else from its first column.
        **kwargs: further arguments of ``decoder``.
    """
    kind = config._attn_implementation
    learn_rows(kind)
    whole = torch.cat([prompts.expand(prompts.mask), completion_mask], dim=1)
    rows = Rows.of(prompts, whole, kind)
    at_completion = _positions(whole, counted)[:, rows.prompt.width :]
    output = decoder(
        input_ids=rows.sequence(prompts.ids, completion_ids),
        position_ids=rows.sequence(_positions(prompts.mask, counted), at_completion),
        # Masks of four dimensions reach the attention function as they are. This one fits no sequence: whatever took
        # it for a mask would fail.
        attention_mask=completion_ids.new_zeros(1, 1, 0, 0, dtype=torch.bool),
        use_cache=False,
        **{**kwargs, ARGUMENT: rows},
    )
    of_prompts, of_completions = rows.apart(output.last_hidden_state)
    return torch.cat([prompts.expand(of_prompts[:, -1:]), of_completions], dim=1)


def _positions(mask: Tensor, counted: bool) -> Tensor:
    if counted:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.arange(mask.shape[1], device=mask.device).expand(len(mask), -1)


Attention = Callable[..., tuple[Tensor, Tensor | None]]


def learn_rows(kind: str) -> None:
    """Let transformers' attention function of this name understand :class:`Rows`; without them it is what it was."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ALL_ATTENTION_FUNCTIONS.get(kind)
    if not isinstance(known, _WithRows):
        ALL_ATTENTION_FUNCTIONS[kind] = _WithRows(known)


def _eager_of(module: nn.Module) -> Attention:
    """A layer's own eager attention, which is not in the table: that of its class's module, or of one that it extends.

    Raises:
        ValueError: none of them has one.
    """
    for cls in type(module).__mro__:
        if (found := getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)) is not None:
            own: Attention = found
            return own
    raise ValueError(
        f"attn_implementation must be sdpa for share_prefix, but got eager, of which {type(module).__name__} has no "
        "function eager_attention_forward."
    )


class _WithRows:
    """An attention function that sees a sequence as rows if it gets them.

    It stays in transformers' table: a layer may be computed again in the backward (gradient checkpointing).
    """

    def __init__(self, original: Attention | None) -> None:
        self._original = original

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``query``, ``key``, ``value`` (1, heads, N, D) to (1, N, heads, D), if there are rows."""
        attend = self._original or _eager_of(module)
        rows: Rows | None = kwargs.pop(ARGUMENT, None)
        if rows is None:
            return attend(module, query, key, value, attention_mask, *args, **kwargs)
        kwargs["position_ids"] = None  # those of the sequence: FlashAttention would read other rows out of them

        def heads(states: Tensor) -> tuple[Tensor, Tensor]:
            prompts, completions = rows.apart(states.transpose(1, 2))
            return prompts.transpose(1, 2), completions.transpose(1, 2)

        (prompt_query, own_query), (prompt_key, own_key), (prompt_value, own_value) = map(heads, (query, key, value))
        for_prompts, for_completions = rows.masks
        of_prompts, _ = attend(module, prompt_query, prompt_key, prompt_value, for_prompts, *args, **kwargs)
        keys = torch.cat([rows.prompts.expand(prompt_key), own_key], dim=2)
        values = torch.cat([rows.prompts.expand(prompt_value), own_value], dim=2)
        of_completions, _ = attend(module, own_query, keys, values, for_completions, *args, **kwargs)
        return rows.sequence(of_prompts, of_completions), None
