"""The different prompts among the rows of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trl_offpolicy.rollouts.micro_batches import same_rows


@dataclass(frozen=True, eq=False)
class Prompts:
    """The different prompts of some rows: (U, P) ids and mask, and for each row the number of its prompt."""

    ids: Tensor
    mask: Tensor
    of_row: tuple[int, ...]

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
        return torch.tensor(self.of_row, device=self.ids.device)

    def expand(self, values: Tensor) -> Tensor:
        """(U, ...) to one entry for each row, with gradient."""
        if (copies := self.repeats) is not None:  # its backward is a sum, that of an index an atomic add
            return values.unsqueeze(1).expand(-1, copies, *values.shape[1:]).flatten(0, 1)
        return values.index_select(0, self._index)


def own_prompts(ids: Tensor, mask: Tensor) -> Prompts:
    """(B, P) prompts, each that of one row, equal or not."""
    return Prompts(ids, mask, tuple(range(len(ids))))


def different_prompts(ids: Tensor, mask: Tensor) -> Prompts:
    """The different prompts among (B, P) left-padded ones."""
    of_row = same_rows(torch.where(mask.bool(), ids, -1))
    first = [of_row.index(number) for number in range(max(of_row) + 1)]
    return Prompts(ids[first], mask[first], tuple(of_row))
