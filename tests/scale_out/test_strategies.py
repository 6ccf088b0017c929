"""``accelerate launch recipes/grpo.py`` on two real CPU processes under each strategy, full weights and LoRA.

One process with the same global batch is the reference. An exit status of 0 proves nothing here: FSDP2 on a CPU becomes
DDP without a word where it is not allowed, so what each rank holds is looked at.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from scale_out.launching import LORA, STEPS, Run, assert_same, launch, metrics, prepare

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1500)]

STRATEGIES = {  # distributed type, wrapper, type of a trained parameter, share of them on a rank
    "cpu_ddp": ("MULTI_CPU", "DistributedDataParallel", "whole", 1.0),
    "cpu_zero2": ("DEEPSPEED", "DeepSpeedEngine", "whole", 1.0),
    "cpu_zero3": ("DEEPSPEED", "DeepSpeedEngine", "ds_tensor", 0.5),
    "cpu_fsdp2": ("FSDP", "FSDP", "DTensor", 0.5),
}
MODES: dict[str, dict[str, Any]] = {"full": {}, "lora": {**LORA, "learning_rate": 0.01}}
Launch = Callable[[str | None, str], Run]
CASES = [pytest.param(strategy, mode, id=f"{strategy}-{mode}") for strategy in STRATEGIES for mode in MODES]
each_case = pytest.mark.parametrize(("strategy", "mode"), CASES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """``trained(strategy, mode)``: that run, made once; no strategy is one process."""
    made, known = prepare(tmp_path_factory.mktemp("scale_out")), {}

    def run(strategy: str | None, mode: str) -> Run:
        if strategy is not None and "zero" in strategy:
            pytest.importorskip("deepspeed")
        if (strategy, mode) not in known:
            known[strategy, mode] = launch(made, made / f"{strategy}-{mode}", strategy, **MODES[mode])
        return known[strategy, mode]

    return run


@each_case
def test_each_rank_holds_its_part(trained: Launch, strategy: str, mode: str) -> None:
    kind, wrapper, parameter, share = STRATEGIES[strategy]
    for rank in trained(strategy, mode).ranks:
        assert (rank["world"], rank["type"], rank["step"]) == (2, kind, STEPS)
        assert wrapper in rank["wrapper"] and rank["kinds"] == {parameter}
        assert rank["share"] == pytest.approx(share, abs=0.05)


@each_case
def test_weights_are_those_of_one_process(trained: Launch, strategy: str, mode: str) -> None:
    run, one = trained(strategy, mode), trained(None, mode)
    start = load_file(run.folder.parent / "model" / "model.safetensors")
    moved = {name: float((value - start[name]).abs().max()) for name, value in one.ranks[0]["weights"].items()}
    assert max(moved.values()) > 5e-3
    for rank in run.ranks:
        assert_same(rank["weights"], one.ranks[0]["weights"], atol=2e-5)
    assert_same(run.ranks[0]["weights"], run.ranks[1]["weights"], atol=0)


@each_case
def test_metrics_are_those_of_one_process(trained: Launch, strategy: str, mode: str) -> None:
    mine, theirs = metrics(trained(strategy, mode)), metrics(trained(None, mode))
    assert len(mine) == len(theirs) == STEPS
    assert 0 < theirs[0]["offpolicy/keep/dropped_sequence_fraction"] < 1
    assert 0 < theirs[0]["offpolicy/weight/truncated_fraction"] < 1 < 60 < len(theirs[0])
    for step, (row, expected) in enumerate(zip(mine, theirs, strict=True), 1):
        assert row.keys() == expected.keys(), step
        wrong = {k: (row[k], v) for k, v in expected.items() if row[k] != pytest.approx(v, rel=2e-3, abs=2e-5)}
        assert not wrong, (step, wrong)


@each_case
def test_the_noise_floor_is_measured(trained: Launch, strategy: str, mode: str) -> None:
    rows = trained(strategy, mode).rows()
    floor = [row.get("offpolicy/noise_floor/logp_diff_max") for row in rows]
    assert floor[1::2] == [None, None] and all(0 <= value < 1e-4 for value in floor[::2])


@each_case
def test_the_engine_holds_the_gathered_weights(trained: Launch, strategy: str, mode: str) -> None:
    run = trained(strategy, mode)
    for rank in run.ranks:
        assert_same(rank["engine"], rank["weights"], atol=1e-6)
    assert all(row["offpolicy/rollout/sync_agreement"] > 1 - 2e-4 for row in run.rows())


@each_case
def test_what_is_saved_are_the_weights(trained: Launch, strategy: str, mode: str) -> None:
    run = trained(strategy, mode)
    for folder in (run.folder, run.folder / f"checkpoint-{STEPS}"):
        if mode == "full":
            assert_same(load_file(folder / "model.safetensors"), run.ranks[0]["weights"], atol=0)
        else:
            assert_same(load_file(folder / "adapter_model.safetensors"), run.ranks[0]["adapter"], atol=0)


@each_case
def test_a_resumed_run_ends_where_the_whole_one_did(trained: Launch, strategy: str, mode: str, tmp_path: Path) -> None:
    run = trained(strategy, mode)
    left = ["checkpoint-2", "metrics.jsonl", "rollouts.parquet", "run.json"]
    for name in left:
        copy = shutil.copytree if (run.folder / name).is_dir() else shutil.copy
        copy(run.folder / name, tmp_path / name)
    again = launch(run.folder.parent, tmp_path, strategy, resume=True, **MODES[mode])
    assert [row["step"] for row in again.rows()] == [1, 2, 3, 4]
    for rank, whole in zip(again.ranks, run.ranks, strict=True):
        assert_same(rank["weights"], whole["weights"], atol=2e-6)
    resumed, whole_run, sent = metrics(again), metrics(run), "offpolicy/rollout/sync_bytes"
    assert resumed[2].pop(sent) >= whole_run[2].pop(sent)  # the first sync of a process sends all weights
    for row, expected in zip(resumed, whole_run, strict=True):
        assert {k: v for k, v in row.items() if v != pytest.approx(expected[k], rel=1e-3, abs=1e-5)} == {}
