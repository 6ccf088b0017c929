"""A teacher in a Lightning module's rollouts, as in the TRL trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning_runs import OwnMismatch, Rows, Watch, data, module, trainer
from tiny_models import save_tiny_model, tiny_model, tiny_prompts

from lightning_module import OffPolicyGRPOModule
from lightning_module.deliberate import check_teacher
from trl_offpolicy.engines.logit_fusion import TeacherMix
from trl_offpolicy.engines.norm_noise import NoisyNorms, NormNoise, norms

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1))


def with_teacher(teacher: str, **options: Any) -> OffPolicyGRPOModule:
    given = {name: options.pop(name) for name in ("alpha", "steps", "difficulty") if name in options}
    return module({"type": "transformers", "logit_fusion": {"teacher": teacher, **given}}, **options)


def mixed(student: Any, batch: dict[str, Any], share: float) -> torch.Tensor:
    """(B, T) log-probs of the mixture by whole forwards of both models."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    positions, length = (mask.cumsum(1) - 1).clamp(min=0), batch["completion_ids"].shape[1]
    with torch.no_grad():
        own, other = (
            model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -length - 1 : -1]
            for model in (student, tiny_model(seed=1))
        )
    logps: torch.Tensor = ((1 - share) * own + share * other).log_softmax(-1)
    return logps.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def test_the_mixture_is_the_sampling_policy(teacher: str, tmp_path: Path) -> None:
    ours, rows, watch = with_teacher(teacher, alpha=0.5), Rows(), Watch()
    owner = trainer(tmp_path, callbacks=[rows, watch], max_steps=4, accumulate_grad_batches=2)
    owner.fit(ours, data())
    batch, mask = rows.batches[0], rows.batches[0]["completion_mask"].bool()
    expected = mixed(tiny_model(), batch, 0.5)
    torch.testing.assert_close(batch["sampling_per_token_logps"][mask], expected[mask], rtol=0, atol=1e-3)
    assert float((expected - mixed(tiny_model(), batch, 0.0))[mask].abs().mean()) > 0.1
    shares = [row["offpolicy/rollout/teacher_share"] for row in watch.logs]
    assert shares == pytest.approx([0.5, 0.375, 0.25, 0.125])
    divergence = [row["offpolicy/mismatch/kl_k3"] for row in watch.logs]
    assert divergence[0] > 3 * divergence[-1] > 0
    assert ours.preset.name == "paper/logit-fusion" and ours.generation.reports_logps


def test_a_validation_samples_from_the_policy_alone(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the difficulty of each prompt: the hard ones get the whole share, the easy ones nothing."""
    prompts = tiny_prompts().add_column("hard", [float(i % 2) for i in range(32)])
    ours, rows, watch = with_teacher(teacher, alpha=0.4, steps=100, difficulty="hard"), Rows(), Watch()
    owner = trainer(tmp_path, callbacks=[rows, watch], max_steps=1, accumulate_grad_batches=2)
    owner.fit(ours, data(prompts))
    batch, mask = rows.batches[0], rows.batches[0]["completion_mask"].bool()
    for half, share in ((slice(0, 4), 0.0), (slice(4, 8), 0.4)):
        found = mixed(tiny_model(), batch, share)[half][mask[half]]
        torch.testing.assert_close(batch["sampling_per_token_logps"][half][mask[half]], found, rtol=0, atol=1e-3)
    assert watch.logs[0]["offpolicy/rollout/teacher_share"] == pytest.approx(0.2)
    planned, plan = [], TeacherMix.plan
    monkeypatch.setattr(
        TeacherMix, "plan", lambda self, rows, *, share: (planned.append(share), plan(self, rows, share=share))[1]
    )
    held_out = tiny_prompts(2)  # without the column
    owner = trainer(tmp_path / "held_out", max_steps=1, accumulate_grad_batches=2, num_sanity_val_steps=1)
    owner.fit(with_teacher(teacher, steps=100, difficulty="hard"), data(prompts, val_dataset=held_out))
    assert planned == [0.0, 0.5]  # the sanity validation, then the generation


class NoisyWords(OwnMismatch):
    """Words of an engine whose own model has norms, which hold the noise; it keeps what they are at each call."""

    def __init__(self) -> None:
        super().__init__(noise=0.1)
        own = tiny_model()
        self.clean = {name: weight.clone() for name, weight in norms(own).items()}
        self.noise = NoisyNorms(NormNoise(start=0.3, end=0.1, stages=2, steps=2), lambda: own, lambda: None)
        self.held = lambda: {name: float((weight - self.clean[name]).std()) for name, weight in norms(own).items()}
        self.seen: list[tuple[bool, dict[str, float]]] = []
        self.training: Any = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((self.training(), self.held()))
        return super().generate(*args, **kwargs)


def test_a_validation_samples_without_the_noise_of_norms(tmp_path: Path) -> None:
    """Of two stages the second has noise: steps 1 and 2 train with it, the validations after steps 0 to 2 have none."""
    engine = NoisyWords()
    owner = trainer(tmp_path, max_steps=3, val_check_interval=1, num_sanity_val_steps=1, limit_val_batches=1)
    engine.training = lambda: owner.training
    owner.fit(module(engine, correction="paper/tis"), data(val_dataset=tiny_prompts(2), val_batch_size=2))
    assert [training for training, _ in engine.seen] == [False, True, False, True, False, True, False]
    for number, (training, deviations) in enumerate(engine.seen):
        if training and number > 1:  # the steps after the first
            assert all(0.2 < one < 0.4 for one in deviations.values())
        else:
            assert all(one == 0.0 for one in deviations.values())


def test_what_does_not_go_with_a_teacher(teacher: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.type must be 'transformers' with engine\.logit_fusion"):
        module({"type": "vllm", "logit_fusion": teacher})
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.3"):
        with_teacher(teacher, sampling={"max_tokens": 4, "extra": {"repetition_penalty": 1.3}})
    with pytest.raises(ValueError, match=r"engine\.norm_noise\.stages must be"):
        module({"type": "vllm", "norm_noise": {"stages": 1}})
    ours = with_teacher(teacher)
    # a subclass of DDP's, made without DeepSpeed
    strategy = type("Partitions", (DeepSpeedStrategy,), {"__init__": lambda self: DDPStrategy.__init__(self)})()
    ours._trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="must be left out with a sharded model"):
        check_teacher(ours)
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\]"):
        with_teacher(teacher, alpha=0.0)
    ours = with_teacher(teacher, difficulty="hard", rollout=lambda prompts, engine, sampling: None)
    with pytest.raises(ValueError, match=r"difficulty must be left out with tools"):
        trainer(tmp_path, max_steps=1).fit(ours, data())
    ours = with_teacher(teacher)
    with pytest.raises(ValueError, match=r"engine\.logit_fusion\.steps must be given"):
        trainer(tmp_path / "endless", max_steps=-1, max_epochs=-1).fit(ours, data())
