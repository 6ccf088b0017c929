"""OffPolicyGRPOTrainer on rows with images, with HF generate: it learns from them, with TRL's own loss and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tiny_images import encoded, image_rows, kept_by_generate, last_word, seen_logits, tiny_processor, tiny_vlm
from trainer_runs import generation_batches, records

from trl_offpolicy.functional.truncated_sampling import Truncation
from trl_offpolicy.rollouts.images import images_of, placed
from trl_offpolicy.rollouts.kept import KEY
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


CUT: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.03}


def sampled_logps(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Log-probs under which ``generate`` sampled each token of a batch of eight rows, four a prompt; row by row."""
    rows = image_rows()
    messages = [placed(rows[i]["prompt"], images_of(rows[i])) for i in range(len(rows))]
    encodings = {tuple(ids): seen.inputs for ids, seen in zip(*encoded(tiny_processor(), messages), strict=True)}
    found = []
    for row in range(len(batch["prompt_ids"])):
        prompt, completion = (
            batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()].tolist() for part in ("prompt", "completion")
        )
        logits = seen_logits(trainer.model, prompt, completion, encodings[tuple(prompt)])
        never = trainer.model.config.image_token_id
        found += [
            kept_by_generate(at.tolist(), **CUT, never=never)[i] for at, i in zip(logits, completion, strict=True)
        ]
    return torch.tensor(found)


def test_images_under_a_truncated_distribution(options: dict[str, Any]) -> None:
    """Ratios to the distribution that sampled are 1; to the whole one they are the kept mass."""
    learner = ours(options, **CUT, steps_per_generation=4, max_steps=2)
    seen = generation_batches(learner)
    learner.train()
    batch = seen[0]
    mask = batch["completion_mask"].bool()
    fresh = ours({**options, "output_dir": options["output_dir"] + "2"}, **CUT)
    with torch.no_grad():
        expected = sampled_logps(fresh, batch)
        scored = fresh._score(fresh.model, batch, batch_size=3)[0][mask]
    assert float((scored - expected).exp().sub(1).abs().max()) < 2e-4
    torch.testing.assert_close(batch["old_per_token_logps"][mask], expected, rtol=1e-4, atol=2e-5)
    fresh._filtered.truncation = Truncation()
    with torch.no_grad():
        whole = fresh._score(fresh.model, {**batch, KEY: None})[0][mask]
    assert 0.5 < float((whole - expected).exp().mean()) < 0.95
    for row in records(learner):
        assert row["offpolicy/rollout/outside_fraction"] == row["offpolicy/rollout/recomputed_cut_fraction"] == 0.0
