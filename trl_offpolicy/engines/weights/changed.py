"""Of the weights that a sync would send, those that the engine does not have yet.

After a whole sync whose proof passed, the engine has every weight that the trainer has not changed since: the base
below merged adapters, frozen layers, embeddings. A checksum tells. The weights still pass on all ranks, so gathering
stays collective; what is left out is the way to the engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from trl_offpolicy.engines.weights.summary import checksum

_IN_LAYER = re.compile(r"(?:^|\.)\d+\.")


class ChangedWeights:
    """What one engine has of the trainer's weights, and so what the next sync must bring.

    Weights travel in units (:func:`unit_of`), because engines fuse matrices and take a fused one only whole. A unit
    that has changed once is sent in every later sync, without a checksum: the weights of the last whole sync and those
    of the last one together are all of them.

    Until a proof has passed (:meth:`confirm`), and after one that failed, everything is sent. While a sync runs, copies
    of at most one unchanged unit are held, on the device of the weights.

    Args:
        whole_only: send everything in any case.

    Example:
        >>> sent, frozen = ChangedWeights(), ("embed.weight", torch.ones(2))
        >>> for step in range(3):
        ...     now = iter([frozen, ("head.weight", torch.full((2,), float(step)))])
        ...     print([name for name, _ in sent.select(now)])
        ...     _ = sent.confirm(True)
        ['embed.weight', 'head.weight']
        ['head.weight']
        ['head.weight']
    """

    def __init__(self, *, whole_only: bool = False) -> None:
        self._sums: dict[str, str] = {}  # of the last whole sync, by name
        self._members: Counter[str] = Counter()  # number of names of each unit
        self._moved: set[str] = set()  # units that have changed since the last whole sync
        self._recorded_all = False  # the tables above are of all weights
        self._proven = self._judged = False
        self._sends = 0  # since the last proof
        self._whole_only = whole_only
        self.sent_part = False
        """Whether the last sync left anything out."""

    @property
    def partial(self) -> bool:
        """Whether the next sync may leave something out."""
        return self._proven and not self._whole_only and not self._all_moved

    @property
    def _all_moved(self) -> bool:
        """Nothing can be left out any more, and no checksum is needed to know it."""
        return self._recorded_all and len(self._moved) == len(self._members)

    def select(self, named: Iterable[tuple[str, Tensor]], *, whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Of the names and tensors of a sync, in their order, those that the engine needs; all are read.

        Args:
            named: all of them, as they would be sent.
            whole: send all, because the engine may have lost some.
        """
        self.sent_part = self.partial and not whole
        self._proven = False  # until this sync's proof
        self._sends += 1
        if self.sent_part:
            return self._changed(named)
        if self._all_moved:
            return iter(named)
        self._sums, self._members, self._moved, self._recorded_all = {}, Counter(), set(), False
        # Where nobody proves the syncs there is nothing to gain, and checksums would be for nothing.
        unproven = self._sends > 1 and not self._judged
        return iter(named) if self._whole_only or unproven else self._recorded(named)

    def confirm(self, proven: bool) -> bool:
        """Say whether the proof of the last sync passed.

        Returns:
            True if it did not and the sync had left something out: all weights should then be sent and proved. It is
            the last one that leaves anything out.
        """
        self._proven, self._judged, self._sends = proven and self._recorded_all, True, 0
        again = self.sent_part and not proven
        self._whole_only |= again
        return again

    def _recorded(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All, with their checksums kept."""
        for name, tensor in named:
            self._members[unit_of(name)] += 1
            self._sums[name] = digest(tensor)
            yield name, tensor
        self._recorded_all = True  # not reached where the sync breaks off

    def _changed(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole units of which a weight has changed; if there is none, a small one, since no engine expects nothing."""
        waiting: dict[str, list[tuple[str, Tensor]]] = {}  # unchanged so far, of units that are not complete
        spare: tuple[str, Tensor] | None = None
        for name, tensor in named:
            unit = unit_of(name)
            if unit not in self._moved and digest(tensor) == self._sums.get(name):
                mine = waiting.setdefault(unit, [])
                # A copy, because a gathered weight is freed once it has passed. The last of a unit need not wait.
                mine.append((name, tensor.detach().clone() if len(mine) + 1 < self._members[unit] else tensor))
                if len(mine) == self._members[unit]:
                    del waiting[unit]
                if self._members[unit] == 1 and (spare is None or tensor.numel() < spare[1].numel()):
                    spare = name, tensor.detach().clone()
                continue
            self._moved.add(unit)
            yield from waiting.pop(unit, ())
            yield name, tensor
        if not self._moved and spare is not None:
            yield spare


def unit_of(name: str) -> str:
    """The weights that travel together: those below one parent in a layer, elsewhere those of one module.

    Engines fuse within these: queries, keys and values of an attention, gate and up of an MLP, the experts of a layer.

    Args:
        name: of a weight, as in a checkpoint.

    Example:
        >>> unit_of("model.layers.3.self_attn.q_proj.weight"), unit_of("model.layers.3.mlp.experts.7.up_proj.weight")
        ('model.layers.3.self_attn', 'model.layers.3.mlp')
        >>> unit_of("model.layers.3.input_layernorm.weight"), unit_of("model.embed_tokens.weight")
        ('model.layers.3', 'model.embed_tokens')
    """
    module = name.rpartition(".")[0]
    if not _IN_LAYER.search(name):
        return module or name
    before_experts, experts, _ = module.partition(".experts")
    return before_experts if experts else module.rpartition(".")[0] or module


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """A checksum of a tensor's bytes, dtype and shape: 128 bits on a CPU, 64 on another device, where it stays.

    Example:
        >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
        False
    """
    form = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        return f"{form} {checksum(tensor)}"
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{form} {xxhash.xxh3_128_hexdigest(flat.numpy().data)}"
