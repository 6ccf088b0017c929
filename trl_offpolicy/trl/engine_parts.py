"""What TRL's generation backend is made of beside itself: the trainer's weights as a source, vLLM with an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trl_offpolicy.engines.weights.lora import AdapterFolder
from trl_offpolicy.engines.weights.source import Adapter, ModelWeights


class TrainerWeights:
    """The weights as :class:`~trl_offpolicy.engines.weights.WeightSource`.

    Args:
        engine: the :class:`~trl_offpolicy.trl.engine.TRLEngine` that gathers them.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_main = bool(engine.accelerator.is_main_process)
        self._open: Iterator[tuple[str, Tensor]] = iter(())

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, an adapter merged in; every rank iterates to the end."""
        self._open = self._engine._iter_named_params()
        return self._open

    def finish(self) -> None:
        """Gather what is left of :meth:`merged`, for which the other ranks wait."""
        for _ in self._open:
            pass

    def adapter(self) -> Adapter | None:
        """The LoRA adapter alone, if it stands alone."""
        return ModelWeights(self._engine.model).adapter()


class WithAdapter:
    """vLLM's ``LLM``, whose requests name the adapter of the last sync.

    Args:
        llm: vLLM's.
        adapters: where the last adapter lies.
    """

    def __init__(self, llm: Any, adapters: AdapterFolder) -> None:
        self._llm = llm
        self._adapters = adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in vLLM."""
        return self._llm.generate(*args, **{**kwargs, "lora_request": self._adapters.request})


def scattered(parts: Sequence[Any]) -> Any:
    """Of the main rank's objects, one for each rank, that of this rank. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return parts[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(parts) or None, src=0)
    return received[0]
