"""OffPolicyGRPOTrainer on rows with images, with HF generate: it learns from them, with TRL's own loss and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tiny_images import image_rows, last_word, tiny_processor, tiny_vlm
from trainer_runs import generation_batches, records

from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

LIMIT = 1e-5
"""As in test_trainer_parity.py."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1,
        "gradient_checkpointing": False, "disable_dropout": True, "per_device_train_batch_size": 4,
        "num_generations": 4, "gradient_accumulation_steps": 2, "max_completion_length": 6, "disable_tqdm": True,
        "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3,
    }  # fmt: skip


def ours(options: dict[str, Any], **further: Any) -> OffPolicyGRPOTrainer:
    args = OffPolicyGRPOConfig(**{"write_report": False, "noise_floor_steps": 0, **options, **further})
    return OffPolicyGRPOTrainer(
        tiny_vlm(), last_word, args, train_dataset=image_rows(), processing_class=tiny_processor()
    )


def micro_batches(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """A generation batch split as TRL splits it."""
    parts = trl.trainer.utils.split_tensor_dict(trl.trainer.utils.split_pixel_values_by_grid(batch), count)
    return [trl.trainer.utils.unsplit_pixel_values_by_grid(part) for part in parts]


def backward(trainer: Any, inputs: dict[str, Any]) -> tuple[float, torch.Tensor]:
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def test_it_learns_from_images_with_the_loss_and_gradient_of_trl(options: dict[str, Any]) -> None:
    learner = ours(options, record_rollouts=True, noise_floor_steps=1)
    before = learner.model.model.visual.patch_embed.proj.weight.detach().clone()
    seen = generation_batches(learner)
    learner.train()
    (batch,), (row,) = seen, records(learner)
    assert batch["num_images"] == [1] * 8
    assert batch["pixel_values"].shape[0] == int(batch["image_grid_thw"].prod(-1).sum())
    assert not torch.equal(learner.model.model.visual.patch_embed.proj.weight, before)
    assert row["offpolicy/noise_floor/kl_k1"] == pytest.approx(0.0, abs=1e-4)  # scored again in halves

    stock = trl.GRPOTrainer(
        tiny_vlm(), last_word, trl.GRPOConfig(**options), train_dataset=image_rows(), processing_class=tiny_processor()
    )
    fresh = ours(options, record_rollouts=False)
    for part in micro_batches(batch, 2):
        (loss, gradient), (expected, theirs) = backward(fresh, part), backward(stock, part)
        assert loss == pytest.approx(expected, rel=LIMIT, abs=LIMIT)
        assert float(theirs.norm()) > 1e-2
        torch.testing.assert_close(gradient, theirs, rtol=0.0, atol=LIMIT * (1 + float(theirs.abs().max())))


def test_the_pixels_of_other_rows_give_another_loss(options: dict[str, Any]) -> None:
    """The comparison above is of something that the images decide."""
    learner = ours(options, record_rollouts=False)
    seen = generation_batches(learner)
    learner.train()
    first = micro_batches(seen[0], 2)[0]
    other = {**first, "pixel_values": first["pixel_values"].flip(0)}
    fresh = ours(options, record_rollouts=False)
    assert float((backward(fresh, other)[1] - backward(fresh, first)[1]).abs().max()) > 1e-3
