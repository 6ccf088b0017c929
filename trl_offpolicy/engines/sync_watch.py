"""Watches what passes to the engine in a sync: how much of an update the engine's precision can hold, and a checksum.

A float32 trainer whose learning rate is small moves most weights by less than bfloat16 can tell. The engine then holds
almost the weights that it had, although every sync succeeds. The watch compares a fixed sample of the weights before
and after rounding, so it needs neither a second copy of the model nor an answer of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.engines.rounding import WeightRounding, round_weights
from trl_offpolicy.engines.weights.source import Adapter, WeightSource

SAMPLE = 1024
"""Elements that are watched of each weight, or all of a smaller one."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd; spreads places over 64 bits (2^60 / golden ratio)


class Precision(NamedTuple):
    """How an engine holds its weights.

    ``dtype`` None = not known, as with a quantised kernel. ``rounding`` is applied before they are sent; None = none.
    """

    dtype: torch.dtype | None = None
    rounding: WeightRounding | None = None


UNKNOWN = Precision()


@dataclass(frozen=True)
class Passed:
    """What one sync passed on; None = not known.

    Args:
        changed: share of the weight elements that the trainer changed since the sync before; None at the first sync.
        visible: share of those that differ in the engine's precision as well (under ``rounding``: that move at least
            half as far); None if nothing changed, or if the engine holds the trainer's precision and so every change.
        checksum: 16 hexadecimal digits of the sample as the engine holds it. Two syncs with the same one brought the
            same weights. None if nothing passed.
        trainer_dtype: precision of the trainer's weights, e.g. "float32"; the widest, if they differ.
        engine_dtype: precision of the engine's.
    """

    changed: float | None = None
    visible: float | None = None
    checksum: str | None = None
    trainer_dtype: str | None = None
    engine_dtype: str | None = None


class SyncWatch:
    """Samples every weight on its way to the engine, between :meth:`begin` and :meth:`end` of a sync.

    Of each weight it keeps every k-th element (at most :data:`SAMPLE`), always the same ones, on the weight's device.
    The shares count each as the elements that it stands for.

    Example:
        >>> watch, weight = SyncWatch(), torch.full((4,), 0.1)
        >>> for step in (0.0, 1e-6):  # far below the spacing of bfloat16 at 0.1
        ...     watch.begin(Precision(torch.bfloat16))
        ...     _ = list(watch.passing(iter([("weight", weight + step)])))
        ...     passed = watch.end()
        >>> passed.changed, passed.visible
        (1.0, 0.0)
    """

    def __init__(self) -> None:
        self._active = False
        self._precision = UNKNOWN
        self._own: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._last: tuple[dict[str, int], Tensor, Tensor] | None = None

    def begin(self, precision: Precision = UNKNOWN) -> None:
        """A sync to an engine of this precision begins."""
        self._active, self._precision = True, precision
        self._own, self._sent, self._sizes = {}, {}, {}

    def passing(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same names and tensors, the trainer's before any rounding; those of a sync are sampled."""
        for name, tensor in named:
            if self._active:
                self._take(name, tensor)
            yield name, tensor

    def adapter(self, adapter: Adapter | None) -> Adapter | None:
        """The same adapter, whose tensors are sampled if they are sent alone."""
        if self._active and adapter is not None:
            for name, tensor in adapter.tensors.items():
                self._take(name, tensor)
        return adapter

    @torch.no_grad()
    def _take(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        step = _stride(flat.numel(), tensor.shape[-1] if tensor.dim() else 1)
        self._own[name] = flat[::step].clone()  # a copy: the weight changes in place, or is freed after it has passed
        self._sizes[name] = flat.numel()
        if self._precision.rounding is not None:
            ((_, rounded),) = round_weights([(name, tensor.detach())], self._precision.rounding)
            self._sent[name] = rounded.reshape(-1)[::step].clone()

    @torch.no_grad()
    def end(self) -> Passed:
        """What passed since :meth:`begin`. The only wait for the device."""
        self._active = False
        if not self._own:
            return Passed()
        device = next(iter(self._own.values())).device
        own = torch.cat([part.to(device) for part in self._own.values()])
        sent = torch.cat([part.to(device) for part in self._sent.values()]) if self._sent else own
        held = sent.to(self._precision.dtype or sent.dtype)
        last, self._last = self._last, (self._sizes, own, held)
        changed = visible = None
        if last is not None and last[0] == self._sizes and last[2].dtype == held.dtype:
            changed, visible = self._shares(own, held, last[1].to(device), last[2].to(device))
        engine = None if self._precision.dtype is None else _name(self._precision.dtype)
        result = Passed(changed, visible, _checksum(held), _name(own.dtype), engine)
        self._own, self._sent = {}, {}
        return result

    def _shares(self, own: Tensor, held: Tensor, own_before: Tensor, held_before: Tensor) -> tuple[float, float | None]:
        """(share of the elements that changed, share of the changed ones that the engine can see)."""
        counts = [(part.numel(), self._sizes[name] / part.numel()) for name, part in self._own.items()]
        stands_for = torch.tensor([share for _, share in counts], dtype=torch.float64, device=own.device)
        elements = stands_for.repeat_interleave(torch.tensor([count for count, _ in counts], device=own.device))
        moved = own != own_before
        seen = held != held_before
        if self._precision.rounding is not None:
            # Scales are floats: they move a little whenever the largest weight of a row does, and with them its row.
            seen = (held - held_before).abs() >= (own - own_before).abs() / 2
        totals = torch.stack([(elements * moved).sum(), (elements * (moved & seen)).sum()]).tolist()
        narrower = torch.promote_types(own.dtype, held.dtype) != held.dtype  # the engine's does not hold all values
        judged = totals[0] > 0 and (narrower or self._precision.rounding is not None)
        return totals[0] / sum(self._sizes.values()), totals[1] / totals[0] if judged else None


class WatchedSource:
    """A source of weights whose tensors pass a watch.

    Args:
        source: where the weights come from.
        watch: what they pass.
    """

    def __init__(self, source: WeightSource, watch: SyncWatch) -> None:
        self._source, self._watch, self.is_main = source, watch, source.is_main

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full tensors of the source."""
        return self._watch.passing(self._source.merged())

    def adapter(self) -> Adapter | None:
        """The adapter of the source."""
        return self._watch.adapter(self._source.adapter())


def _stride(size: int, columns: int) -> int:
    """Distance of the sampled elements: without a common divisor with the columns, so that all columns are met."""
    step = max(1, math.ceil(size / SAMPLE))
    while step > 1 and math.gcd(step, columns) > 1:
        step += 1
    return step


def _checksum(values: Tensor) -> str:
    """Bits of the values times odd numbers by place, added up modulo 2^64."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
    return f"{int((((2 * places + 1) * _MULTIPLIER) * bits).sum()) & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def holds_all(precision: Precision, trainer_dtype: str | None, *, merged: bool) -> bool:
    """Whether an engine surely holds every change of the trainer's weights, however small.

    Args:
        precision: of the engine.
        trainer_dtype: of the weights that were sent, as in :class:`Passed`; None = not known.
        merged: an adapter may be merged into them, in their dtype: in 16 bits the sum hides a small product, which the
            trainer's own forward does not.

    Example:
        >>> holds_all(Precision(torch.bfloat16), "bfloat16", merged=False)
        True
        >>> holds_all(Precision(torch.bfloat16), "bfloat16", merged=True)
        False
    """
    own, held = torch_dtype(trainer_dtype), precision.dtype
    if own is None or held is None or precision.rounding is not None:
        return False
    return torch.promote_types(own, held) == held and (not merged or own in (torch.float32, torch.float64))


def is_coarser(one: torch.dtype | None, other: torch.dtype | None) -> bool:
    """Whether numbers in ``one`` are surely rounded more than in ``other``; None = not known.

    Example:
        >>> is_coarser(torch.bfloat16, torch.float32), is_coarser(torch.bfloat16, torch.bfloat16)
        (True, False)
    """
    if one is None or other is None or not (one.is_floating_point and other.is_floating_point):
        return False
    return torch.finfo(one).eps > torch.finfo(other).eps


def torch_dtype(name: object) -> torch.dtype | None:
    """A dtype from what vLLM calls it (``torch.bfloat16`` or its name); None for anything else.

    Example:
        >>> torch_dtype("torch.bfloat16"), torch_dtype("auto")
        (torch.bfloat16, None)
    """
    if isinstance(name, torch.dtype):
        return name
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
