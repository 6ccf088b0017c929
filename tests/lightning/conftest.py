"""Fixtures of the tests that run both trainers on the same batches."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def build_trl(make_args: Any, fresh_model: Any, tokenizer: Any) -> Any:
    """TRL's side on the tiny Llama; files with another model or other rows have a fixture of their own."""
    from both_trainers import trl_side

    return trl_side(make_args, fresh_model, tokenizer)
