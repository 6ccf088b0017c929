"""vLLM in the trainer's process, as TRL drives it: memory that sleeps, an adapter, weights that change after a load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from trl_offpolicy.engines.weights.lora import AdapterFolder

LAID_OUT_BY_THE_TRAINER = "bitsandbytes"
"""A quantization whose weights the trainer holds quantised, so that the engine takes them as they are."""


class Wrapped:
    """vLLM's ``LLM``, of which a part is done in another way.

    Args:
        llm: vLLM's ``LLM``, or another wrapper of it.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class WithAdapter(Wrapped):
    """vLLM's ``LLM``, whose requests name the adapter of the last sync.

    Args:
        llm: vLLM's ``LLM``.
        adapters: the folder of the last adapter.
    """

    def __init__(self, llm: Any, adapters: AdapterFolder) -> None:
        super().__init__(llm)
        self._adapters = adapters

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM's ``generate`` with the adapter in ``lora_request``."""
        return self._llm.generate(*args, **{**kwargs, "lora_request": self._adapters.request})


class Sleeper(Wrapped):
    """vLLM's ``LLM`` with sleep mode, which is woken from several places.

    TRL wakes the weights in its sync and the KV cache in its generation; this kit wakes both before, to read what the
    engine runs with and to prove the sync. vLLM warns of each tag that is awake already, and then leaves out the whole
    call. So only those that sleep are passed on.
    """

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring memory back.

        Args:
            tags: "weights" and "kv_cache"; None = all that sleeps. vLLM samples once both are awake: a request before
                waits forever. After TRL's sleep the weights are not those of before, nor of any version.
        """
        asleep: set[str] = self._llm.llm_engine.model_executor.sleeping_tags
        if wanted := sorted(asleep if tags is None else asleep & set(tags)):
            self._llm.wake_up(tags=wanted)


def changes_after_loading(llm: Any) -> bool:
    """True if vLLM may hold weights in another form than it loads them in, so that each load must be processed anew.

    The experts of a mixture are laid out for their kernel, latent attention (MLA) multiplies its projections out, and a
    quantised kernel has rounded weights and scales. Weights that are written into such a model as they are, are wrong.
    """
    config = llm.llm_engine.vllm_config.model_config
    quantised = config.quantization not in (None, LAID_OUT_BY_THE_TRAINER)
    return bool(quantised or config.use_mla or config.get_num_experts() > 0)


def copied(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names and copies of tensors. A reload keeps those of a layer until it has all; FSDP1 frees each at the next."""
    for name, tensor in named:
        yield name, tensor.detach().clone()
