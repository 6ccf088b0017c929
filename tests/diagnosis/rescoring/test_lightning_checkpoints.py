"""Checkpoints of Lightning are weights that recorded tokens can be scored again with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import OwnMismatch, data, module, trainer
from tiny_models import save_tiny_model

from lightning_module import RunFolder
from trl_offpolicy.cli.commands import main
from trl_offpolicy.diagnosis.rescoring import lightning
from trl_offpolicy.diagnosis.rescoring.weights import load, other_weights, weights_at_hand
from trl_offpolicy.run_folder.run_data import read_run_info

pytestmark = pytest.mark.integration

IDS = torch.tensor([[5, 9, 14, 3]])
ADAPTER = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}


def train(folder: Path, **options: Any) -> Any:
    """Three steps, each with a checkpoint; returns the policy."""
    name = str(save_tiny_model(folder / "model"))
    saver = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    ours = module(OwnMismatch(noise=0.3), model=name, correction="paper/tis", learning_rate=0.02, **options)
    callbacks = [saver, RunFolder(str(folder), report=False)]
    owner = trainer(folder, max_steps=3, callbacks=callbacks, enable_checkpointing=True)
    owner.fit(ours, data())
    return ours.policy


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("options", [{}, {"adapter": ADAPTER}], ids=["full", "adapter"])
def test_they_hold_the_policy_of_their_step(options: dict[str, Any], tmp_path: Path) -> None:
    policy = train(tmp_path, **options)
    (tmp_path / "checkpoints" / "cut.ckpt").write_bytes(b"PK\x03\x04 cut short by a kill")
    found = weights_at_hand(tmp_path, read_run_info(tmp_path))
    assert found is not None and [one.step for one in found.snapshots] == [0, 1, 2, 3]
    last = load(found.snapshots[-1], found.base)
    assert torch.equal(logits(last), logits(policy.eval()))
    others = other_weights(last, found.snapshots[-1], found.snapshots)
    with others["stale_weights:those of step 1"]():
        assert torch.equal(logits(last), logits(load(found.snapshots[1], found.base)))
    assert not torch.equal(logits(load(found.snapshots[1], found.base)), logits(last))


def test_the_doctor_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    main(["doctor", str(tmp_path), "--model", "auto"])
    assert "step" in capsys.readouterr().out


def test_another_modules_file_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {"net.weight": torch.zeros(1)}, "global_step": 3}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt must hold the policy of an OffPolicyGRPOModule"):
        lightning.read(tmp_path / "other.ckpt")
    assert not list(lightning.checkpoints(tmp_path))
