"""The different prompts among the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trl_offpolicy.rollouts.micro_batches import numbered


@dataclass(frozen=True, eq=False)
class Prompts:
    """The different prompts of some rows: (U, P) ids and mask, and for each row the number of its prompt.

    ``places``: of the (U, P) prompts and of the (B, T) completions behind the rows' own, the numbers of those places
    that have a token, (n,) on the device; None = all have one.
    """

    ids: Tensor
    mask: Tensor
    of_row: tuple[int, ...]
    places: tuple[Tensor | None, Tensor | None]

    @property
    def are_shared(self) -> bool:
        """True if some prompt is that of several rows."""
        return len(self.ids) < len(self.of_row)

    @cached_property
    def repeats(self) -> int | None:
        """G if the rows are G copies of the first prompt, then G of the second, ...; else None."""
        copies, rest = divmod(len(self.of_row), len(self.ids))
        regular = not rest and all(number == row // copies for row, number in enumerate(self.of_row))
        return copies if regular else None

    @cached_property
    def _index(self) -> Tensor:
        return _there(torch.tensor(self.of_row), self.ids.device)

    def expand(self, values: Tensor) -> Tensor:
        """(U, ...) to one entry for each row, with gradient."""
        if (copies := self.repeats) is not None:  # its backward is a sum, that of an index an atomic add
            return values.unsqueeze(1).expand(-1, copies, *values.shape[1:]).flatten(0, 1)
        return values.index_select(0, self._index)


def on_host(ids: Tensor, mask: Tensor) -> Any:
    """(B, L) numpy array: the ids on the host, -1 where there is no token. Waits for the device, once for both."""
    return torch.where(mask.bool(), ids, -1).cpu().numpy()


def prompts_of_rows(ids: Tensor, mask: Tensor, width: int, *, shared: bool, seen: Any = None) -> tuple[Prompts, int]:
    """The prompts of rows and where their tokens are, and how many tokens the rows have.

    Args:
        ids: (B, P + T), none below 0.
        mask: (B, P + T).
        width: P.
        shared: rows of one prompt have it in common; False: each row's prompt is its own.
        seen: :func:`on_host` of the rows, if somebody has looked already: then nothing waits for the device.
    """
    seen = on_host(ids, mask) if seen is None else seen
    of_row = numbered(seen[:, :width]) if shared else list(range(len(ids)))
    first = [of_row.index(number) for number in range(max(of_row) + 1)]
    has_token = seen >= 0
    places = (_places(has_token[first, :width], ids.device), _places(has_token[:, width:], ids.device))
    rows = _there(torch.tensor(first), ids.device)
    own_ids, own_mask = (value[:, :width].index_select(0, rows) for value in (ids, mask))
    return Prompts(own_ids, own_mask, tuple(of_row), places), int(has_token.sum())


def _places(has_token: Any, device: torch.device) -> Tensor | None:
    found = np.flatnonzero(has_token)
    return None if len(found) == has_token.size else _there(torch.from_numpy(found), device)


def _there(index: Tensor, device: torch.device) -> Tensor:
    """The index on the device, which nobody waits for: the driver has taken the host's copy when the call returns."""
    return index.to(device, non_blocking=True)


class SeenRows:
    """What is on the host of the micro-batches of a generation, so that their forwards need not wait for it.

    A micro-batch is known by its tensors: the same ones, unchanged. It is forgotten when they are.
    """

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()  # by completion mask

    def look_at(self, rows: Mapping[str, Any]) -> None:
        """Copy a micro-batch to the host; waits for the device."""
        own = _marked(rows)
        ids, mask = (torch.cat([rows[f"prompt_{kind}"], rows[f"completion_{kind}"]], 1) for kind in ("ids", "mask"))
        # the key itself is not kept, or nothing would ever be forgotten
        self._known[rows["completion_mask"]] = own[:-1], own[-1][1], on_host(ids, mask)

    def of(self, rows: Mapping[str, Any]) -> Any:
        """:func:`on_host` of a micro-batch; None if it was not looked at, or is another one now."""
        found = self._known.get(rows["completion_mask"])
        if found is None:
            return None
        own, (others, version, seen) = _marked(rows), found
        same = all(one[0] is two[0] and one[1] == two[1] for one, two in zip(own[:-1], others, strict=True))
        return seen if same and own[-1][1] == version else None


def _marked(rows: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
    """The tensors of a micro-batch, each with a number that changes when it is written to."""
    values = (rows[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
    return [(value, 0 if value.is_inference() else value._version) for value in values]
