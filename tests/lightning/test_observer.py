"""OffPolicyObserver on a LightningModule that knows nothing of this kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_runs import data, module, trainer
from lightning_strangers import BATCHES, ROWS, SHIFT, Stranger
from tiny_models import tiny_tokenizer

import trl_offpolicy as op
from lightning_module import OffPolicyObserver
from trl_offpolicy.diagnosis.doctor import examine

pytestmark = pytest.mark.integration


def fit(folder: Path, stranger: Stranger, *observers: OffPolicyObserver, **flags: Any) -> pl.Trainer:
    owner = trainer(folder, max_epochs=1, callbacks=list(observers), **flags)
    owner.fit(stranger)
    return owner


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_measures_records_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observer = OffPolicyObserver(method="paper/tis", tokenizer=tiny_tokenizer())
    owner = fit(tmp_path, Stranger(), observer, accumulate_grad_batches=2)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["reward"] == pytest.approx(0.0, abs=1e-6)
    for row in rows:
        assert row["offpolicy/mismatch/kl_k1"] == pytest.approx(SHIFT, abs=1e-5)
        assert row["offpolicy/weight_applied/mean"] == pytest.approx(torch.tensor(-SHIFT).exp().item(), abs=1e-5)
    assert float(owner.callback_metrics["offpolicy/mismatch/kl_k1"]) == pytest.approx(SHIFT, abs=1e-5)
    assert "[control] step 1" in capsys.readouterr().out and (tmp_path / "report.html").exists()
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["model"] == "Stranger" and "not applied" in info["preset"]
    import pandas as pd

    frame = pd.read_parquet(tmp_path / "rollouts.parquet")
    assert len(frame) == ROWS * BATCHES and frame["completion"].str.startswith("w").all()
    found = examine(tmp_path)
    assert found.attribution is not None
    assert any(finding.cause == "engine_mismatch" for finding in found.diagnosis.findings)


def test_copies_of_a_micro_batch_are_found(tmp_path: Path) -> None:
    """Two groups of two, of which the first holds one completion twice."""

    def copying(loss: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        ids = tensors["completion_ids"].clone()
        ids[1] = ids[0]
        return {"loss": loss, **tensors, "completion_ids": ids, "group_ids": torch.tensor([4, 4, 9, 9])}

    fit(tmp_path, Stranger(copying), OffPolicyObserver(report=False))
    for row in rows_of(tmp_path):
        assert row["offpolicy/rollout/distinct_fraction"] == 0.75 and row["offpolicy/rollout/copied_fraction"] == 0.5
    assert "repeated_draws" in {finding.cause for finding in examine(tmp_path).diagnosis.findings}


def test_the_training_is_untouched(tmp_path: Path) -> None:
    alone, watched = Stranger(), Stranger()
    fit(tmp_path / "alone", alone)
    fit(tmp_path / "watched", watched, OffPolicyObserver(report=False))
    for (name, wanted), got in zip(alone.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(wanted, got), name


def test_a_function_finds_tensors_under_other_names(tmp_path: Path) -> None:
    def renamed(loss: Any, tensors: Any) -> dict[str, Any]:
        return {"loss": loss, "new": tensors["per_token_logps"], "mu": tensors["sampling_per_token_logps"]}

    def fields(outputs: Any, batch: torch.Tensor) -> dict[str, Any]:
        mask = torch.ones_like(batch[:, 1:], dtype=torch.bool)
        return {"per_token_logps": outputs["new"], "sampling_per_token_logps": outputs["mu"], "completion_mask": mask}

    fit(tmp_path, Stranger(renamed), OffPolicyObserver(fields=fields, control=None))
    assert all(row["offpolicy/mismatch/kl_k1"] == pytest.approx(SHIFT, abs=1e-5) for row in rows_of(tmp_path))
    assert not (tmp_path / "rollouts.parquet").exists()  # no ids were given


def test_stop_ends_the_run_when_a_finding_is_critical(tmp_path: Path) -> None:
    owner = fit(tmp_path, Stranger(shift=3.0), OffPolicyObserver(control="stop", report=False))
    assert 1 < owner.global_step < BATCHES


@pytest.mark.parametrize(
    ("returns", "error", "message"),
    [
        (lambda loss, tensors: loss, ValueError, "per_token_logps, .* are missing; it returned loss"),
        (
            lambda loss, tensors: {"loss": loss, "per_token_logps": tensors["per_token_logps"]},
            ValueError,
            "sampling_per_token_logps, completion_mask are missing; it returned loss, per_token_logps",
        ),
    ],
)
def test_a_missing_tensor_is_named(returns: Any, error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        fit(tmp_path, Stranger(returns), OffPolicyObserver())


def test_an_unknown_name_of_the_function_is_refused(tmp_path: Path) -> None:
    observer = OffPolicyObserver(fields=lambda outputs, batch: {**outputs, "logprobs": outputs["per_token_logps"]})
    with pytest.raises(ValueError, match=r"fields must return some of .* but got logprobs, loss"):
        fit(tmp_path, Stranger(), observer)


def test_acting_and_the_kits_own_module_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an observer changes nothing"):
        OffPolicyObserver(control="act")
    with pytest.raises(TypeError, match="for a module of your own, but got an OffPolicyGRPOModule"):
        trainer(tmp_path, max_steps=1, callbacks=[OffPolicyObserver()]).fit(module(), data())


def test_a_method_that_reads_advantages_is_not_measured_without(tmp_path: Path) -> None:
    def without(loss: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"loss": loss, **{name: value for name, value in tensors.items() if name != "advantages"}}

    method = op.Correction(keep=(op.OffPolicySequenceMask(max_divergence=0.1),))
    with pytest.raises(ValueError, match="must also return advantages, which OffPolicySequenceMask of method reads"):
        fit(tmp_path, Stranger(without), OffPolicyObserver(method))
    fit(tmp_path / "with", Stranger(), OffPolicyObserver(method, report=False))
    assert all(row["offpolicy/keep/dropped_sequence_fraction"] == 0.5 for row in rows_of(tmp_path / "with"))


def test_turns_are_those_of_the_tool_mask(tmp_path: Path) -> None:
    def with_tool(loss: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tools = torch.ones_like(tensors["completion_ids"])
        tools[:, 2:4] = 0
        return {"loss": loss, **tensors, "tool_mask": tools}

    fit(tmp_path, Stranger(with_tool), OffPolicyObserver(report=False))
    assert any(key.startswith("offpolicy/post_tool/") for key in rows_of(tmp_path)[0])


def test_a_skipped_step_and_a_trial_run_are_left_alone(tmp_path: Path) -> None:
    class Skips(Stranger):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    fit(tmp_path / "skips", Skips(), OffPolicyObserver(report=False))
    assert len(rows_of(tmp_path / "skips")) == BATCHES // 2
    fit(tmp_path / "trial", Stranger(), OffPolicyObserver(), fast_dev_run=True)
    assert not list((tmp_path / "trial").glob("*.json*"))
