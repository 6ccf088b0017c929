"""Adapters that vLLM loads on top of the base model, so that a sync sends only a few MB."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_offpolicy.engines.weights.adapters import is_lora
from trl_offpolicy.engines.weights.files import write_adapter
from trl_offpolicy.engines.weights.source import Adapter

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that adapters may touch, without lm_head and embeddings: LoRA there breaks vLLM's prompt log-probs."""
_IS_EDGE = re.compile(r"lm_head|embed")
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def served_rank(rank: int) -> int:
    """The smallest of vLLM's allowed maximal ranks that is at least ``rank``."""
    return next((known for known in _RANKS if known >= rank), rank)


def adapted_modules(model: Any) -> tuple[str, ...]:
    """:data:`LORA_MODULES` and the last names of what the adapters of PEFT's ``model`` are on besides.

    vLLM passes over an adapter's other modules without a word. Embeddings and heads are left out: an adapter on them is
    never sent alone.
    """
    found = {name.rpartition(".")[2] for name, module in model.named_modules() if is_lora(module)}
    return (*LORA_MODULES, *sorted(name for name in found - set(LORA_MODULES) if not _IS_EDGE.search(name)))


def lora_arguments(rank: int, modules: Sequence[str] = LORA_MODULES) -> dict[str, Any]:
    """Arguments of ``LLM`` that let adapters up to ``rank`` on ``modules`` be loaded."""
    return {
        "enable_lora": True,
        "max_lora_rank": served_rank(rank),
        "max_loras": 1,
        "lora_target_modules": list(modules),
    }


class AdapterFolder:
    """The adapter of the requests, in a private folder.

    Each version has another name, so that nothing of an older one (prefix cache included) is ever used.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="trl-offpolicy-adapter-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)  # at the latest when the process ends
        self.request: Any = None
        self._count = 0

    def load(self, adapter: Adapter, version: int) -> int:
        """Use ``adapter`` for the next requests; returns its bytes."""
        from vllm.lora.request import LoRARequest

        self._count += 1
        folder = self.path / f"{self._count}-{version}"
        size = write_adapter(folder, adapter.config, adapter.tensors)
        if self.request is not None:
            shutil.rmtree(self.request.lora_path, ignore_errors=True)
        self.request = LoRARequest(folder.name, self._count, str(folder))
        return size

    def close(self) -> None:
        """Delete the folder of the adapter."""
        shutil.rmtree(self.path, ignore_errors=True)
