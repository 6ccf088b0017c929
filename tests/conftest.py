"""Fixtures shared by all tests. Those that need transformers or trl import them when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tensors here are tiny: threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The word tokenizer of the tiny models."""
    from tiny_models import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_folder(kind)``: a saved tiny model with its tokenizer, made once a session."""
    from tiny_models import save_tiny_model

    known: dict[str, Path] = {}

    def folder(kind: str = "llama") -> Path:
        if kind not in known:
            known[kind] = save_tiny_model(tmp_path_factory.mktemp(kind), kind)  # type: ignore[arg-type]
        return known[kind]

    return folder


@pytest.fixture(scope="session")
def fresh_model(model_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """``fresh_model(kind)``: a new copy with the same weights at every call (a trainer patches its model)."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    known: dict[str, Any] = {}

    def model(kind: str = "llama") -> Any:
        if kind not in known:
            known[kind] = AutoModelForCausalLM.from_pretrained(model_folder(kind))
        return deepcopy(known[kind])

    return model
