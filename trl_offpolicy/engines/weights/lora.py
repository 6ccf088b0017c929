"""Adapters that vLLM loads on top of the base model, so that a sync sends only a few MB."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from trl_offpolicy.engines.weights.files import write_adapter
from trl_offpolicy.engines.weights.source import Adapter

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that adapters may touch, without lm_head and embeddings: LoRA there breaks vLLM's prompt log-probs."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def served_rank(rank: int) -> int:
    """The smallest of vLLM's allowed maximal ranks that is at least ``rank``."""
    return next((known for known in _RANKS if known >= rank), rank)


def lora_arguments(rank: int) -> dict[str, Any]:
    """Arguments of ``LLM`` that let adapters up to ``rank`` be loaded."""
    return {
        "enable_lora": True,
        "max_lora_rank": served_rank(rank),
        "max_loras": 1,
        "lora_target_modules": list(LORA_MODULES),
    }


class AdapterFolder:
    """The adapter of the requests, in a private folder.

    Each version has another name, so that nothing of an older one (prefix cache included) is ever used.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="trl-offpolicy-adapter-"))
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
