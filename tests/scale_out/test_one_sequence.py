"""Prompts computed once where weights are sharded and layers are computed again: the run of one process without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scale_out.launching import LORA, Run, assert_same, launch, metrics, prepare

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1500)]

OPTIONS: dict[str, Any] = {"save_strategy": "no", "offpolicy": "paper/tis"}
SHARED = {"share_prefix": True, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("sequence"))


@pytest.fixture(scope="module")
def plain(made: Path) -> dict[str, Run]:
    """One process that computes every prompt for each of its rows; full weights and an adapter."""
    off = {"share_prefix": False, "trim_padding": "columns"}
    kinds: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA}
    return {kind: launch(made, made / f"plain_{kind}", None, **OPTIONS, **off, **kinds[kind]) for kind in kinds}


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("strategy", [None, "cpu_fsdp2", "cpu_zero3"])
def test_weights_and_metrics_are_those_of_the_plain_path(
    made: Path, plain: dict[str, Run], strategy: str | None, kind: str
) -> None:
    if strategy == "cpu_zero3":
        pytest.importorskip("deepspeed")
    options = {**OPTIONS, **SHARED, **(LORA if kind == "lora" else {})}
    run = launch(made, made / f"{strategy}_{kind}", strategy, **options)
    assert plain[kind].ranks[0]["sequences"] == 0
    for rank in run.ranks:
        assert rank["sequences"] >= 8  # each of two micro-batches of four steps
        assert_same(rank["weights"], plain[kind].ranks[0]["weights"], atol=2e-5)
    for row, expected in zip(metrics(run), metrics(plain[kind]), strict=True):
        wrong = {k: (row[k], v) for k, v in expected.items() if row[k] != pytest.approx(v, rel=2e-3, abs=2e-5)}
        assert not wrong
