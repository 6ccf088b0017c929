"""The seed of the run is that of the prompts' order and of the engine's draws, unless they have their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_runs import OwnMismatch, data, module, trainer

from lightning_module import engines

pytestmark = pytest.mark.integration  # trains


@pytest.mark.parametrize(("env", "own", "same_as"), [("0", None, 0), ("7", None, 7), ("7", 5, 5)])
def test_the_order_of_the_prompts(
    env: str, own: int | None, same_as: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(seed: int | None) -> list[Any]:
        engine = OwnMismatch()
        trainer(tmp_path, max_steps=3).fit(module(engine), data(shuffle=True, seed=seed))
        return engine.prompts

    monkeypatch.setenv("PL_GLOBAL_SEED", env)
    found = order(own)
    assert found == order(same_as) != order(same_as + 1)


@pytest.mark.parametrize(("env", "given", "expected"), [(None, {}, 1), ("7", {}, 8), ("7", {"seed": 3}, 4)])
def test_the_draws_of_vllm(
    env: str | None, given: dict[str, int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second rank, which draws by the next seed."""
    seen: dict[str, Any] = {}
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if env is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", env)
    monkeypatch.setattr(engines, "_colocated", lambda options, *args, **kwargs: seen.update(options))
    engines.build_engine(
        {"type": "vllm", **given},
        model_name="m", policy=SimpleNamespace, pad_token_id=0, eos_token_ids=[1], run="r", folder=tmp_path, rank=1,
    )  # fmt: skip
    assert seen["seed"] == expected


@pytest.mark.parametrize(
    ("precision", "device", "given", "expected"),
    [("bf16-mixed", "cuda", {}, "bfloat16"), ("16-mixed", "cuda", {}, "float16"), ("32-true", "cuda", {}, "float32"),
     ("bf16-mixed", "cuda", {"dtype": "float32"}, "float32"), ("bf16-mixed", "cpu", {}, "float32")],
)  # fmt: skip
def test_the_type_of_vllm_is_what_a_trainer_on_a_gpu_computes_in(
    precision: str, device: str, given: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(engines, "ColocateEngine", lambda **arguments: seen.update(arguments))
    engines.build_engine(
        {"type": "vllm", **given},
        model_name="m", policy=lambda: torch.nn.Linear(1, 1), pad_token_id=0, eos_token_ids=[1], run="r",
        folder=tmp_path, autocast=engines.computing_dtype(precision, torch.device(device)),
    )  # fmt: skip
    assert seen["dtype"] == expected
