"""``engine: {exact: true}`` in Lightning: what contradicts it. The check with a real engine is in test_vllm.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning_runs import module

from lightning_module.engines import wants_exact


def test_it_is_asked_for_by_one_line() -> None:
    assert wants_exact({"type": "vllm", "exact": True}) and wants_exact({"type": "server", "exact": True})
    assert not wants_exact({"type": "vllm", "exact": False}) and not wants_exact("vllm")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"type": "vllm", "exact": "yes"}, r"engine.exact must be true or false, but got 'yes'"),
        ({"type": "vllm", "exact": True, "weight_rounding": "int8"}, r"engine.weight_rounding must be left out with"),
        ({"type": "transformers", "exact": True}, r"engine.exact must be left out with engine.type 'transformers'"),
    ],
)
def test_a_contradiction_names_both_before_anything_is_loaded(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(engine, correction="measure")


def test_mixed_precision_is_refused() -> None:
    ours = module({"type": "vllm", "exact": True})
    ours._trainer = SimpleNamespace(precision="bf16-mixed")
    with pytest.raises(ValueError, match=r"precision must not be mixed with engine.exact: true, but got 'bf16-mixed'"):
        ours.exact.check_precision()
    ours._trainer = SimpleNamespace(precision="32-true")
    ours.exact.check_precision()
