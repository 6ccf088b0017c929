"""Short GRPO runs with a real fault in the engine: the doctor tests causes on what they recorded, with their model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import EOS, score_last_word, tiny_prompts

from trl_offpolicy.cli.commands import main
from trl_offpolicy.diagnosis.attribution.contexts.precision import rounded_weights
from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.diagnosis.rescoring.weights import holding, weights_at_hand
from trl_offpolicy.engines.hf import Head, sample_completions
from trl_offpolicy.run_folder.run_data import read_run_info
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration


class Sampler:
    """A ``rollout_func`` that samples from the trainer's model as a faulty engine would.

    Args:
        inside: context in which the engine's model computes.
        head: temperature and truncation of the engine.
        never_synced: whether the engine keeps the weights of the start.
    """

    def __init__(
        self, inside: Callable[[Any], AbstractContextManager[Any]] | None = None, head: Head | None = None,
        *, never_synced: bool = False,
    ) -> None:  # fmt: skip
        self.inside, self.head, self.never_synced = inside or (lambda _model: nullcontext()), head, never_synced
        self.random = torch.Generator().manual_seed(0)
        self.held: dict[str, torch.Tensor] | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.never_synced and self.held is None:
            self.held = {name: value.detach().clone() for name, value in model.named_parameters()}
        ids = trainer.processing_class(prompts)["input_ids"]
        with self.inside(model), holding(model, self.held or {}):
            completions, logps = sample_completions(
                model, ids, max_tokens=12, stop_ids=[EOS], head=self.head, generator=self.random
            )
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logps}


@pytest.fixture
def train(build: Callable[..., OffPolicyGRPOTrainer]) -> Callable[..., Path]:
    """``train(sampler, **options)``: the folder of a run of three steps with a checkpoint at each."""

    def run(sampler: Sampler, **options: Any) -> Path:
        few = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 12}
        trainer = build(sampler, gradient_accumulation_steps=4, **{**few, "learning_rate": 3e-3, **options})
        trainer.train()
        return Path(trainer.args.output_dir)

    return run


def test_rounded_weights_are_named_at_a_checkpoint(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(Sampler(lambda model: rounded_weights(model, "int4")))
    alone = examine(folder)
    assert alone.attribution is not None and alone.attribution.cause in ("precision", "unknown")
    assert "--model auto" in alone.hint
    found = examine(folder, model="auto")
    assert found.attribution is not None and found.hint == ""
    assert (found.attribution.cause, found.attribution.detail) == ("precision", "int4 weights")
    assert found.attribution.basis == "tested" and found.attribution.explained > 0.95
    assert any("of step 3 are the recorded trainer's" in reason for reason in found.attribution.reasons)
    assert main(["doctor", str(folder), "--model", "auto"]) == 0
    assert "int4 weights" in " ".join(capsys.readouterr().out.split())


def test_an_engine_that_is_never_synced_holds_the_weights_of_the_start(train: Any) -> None:
    found = examine(train(Sampler(never_synced=True), learning_rate=1e-2), model="auto").attribution
    assert found is not None and found.cause == "stale_weights" and found.detail == "those of step 0"
    assert found.basis == "tested" and found.explained > 0.95


def test_without_checkpoints_the_rows_of_the_first_step_are_tested(
    train: Any, model_folder: Callable[[str], Path]
) -> None:
    folder = train(Sampler(head=Head(0.8)), save_strategy="no")
    found = examine(folder, model=str(model_folder("llama"))).attribution
    assert found is not None and found.cause == "temperature" and found.basis == "tested"
    assert float(found.detail) == pytest.approx(0.8, abs=0.01)
    assert any("of step 1 are the recorded trainer's" in reason for reason in found.reasons)


def test_a_fault_that_begins_after_the_weights_at_hand_is_not_denied(train: Any) -> None:
    """The engine stays at the first weights: at step 0 both agree, and only the course of the run tells."""
    folder = train(Sampler(never_synced=True), learning_rate=1e-2, save_strategy="no", max_steps=8)
    alone, found = examine(folder).attribution, examine(folder, model="auto").attribution
    assert alone is not None and found is not None and found.cause == alone.cause
    assert any("what differs began later" in reason for reason in found.reasons)


def test_a_model_that_did_not_score_is_recognised(train: Any, tmp_path: Path) -> None:
    from tiny_models import tiny_model

    folder = train(Sampler(lambda model: rounded_weights(model, "int8")), save_strategy="no")
    tiny_model(seed=7).save_pretrained(tmp_path / "other")
    alone, found = examine(folder).attribution, examine(folder, model=str(tmp_path / "other")).attribution
    assert alone is not None and found is not None and found.cause == alone.cause
    assert any("fit neither side" in reason for reason in found.reasons)


def test_an_adapter_is_scored_with_its_base(
    make_args: Any, fresh_model: Any, tokenizer: Any, model_folder: Callable[[str], Path]
) -> None:
    """The engine's adapter has half its scale; the run's checkpoints hold adapters alone."""
    from trl_offpolicy.diagnosis.attribution.contexts.changes import adapter_scale

    sampler = Sampler(lambda model: adapter_scale(model, 0.5))
    trainer = OffPolicyGRPOTrainer(
        fresh_model(), score_last_word,
        make_args(max_steps=3, save_strategy="steps", save_steps=1, max_completion_length=12, learning_rate=3e-2,
                  gradient_accumulation_steps=4),
        train_dataset=tiny_prompts(), processing_class=tokenizer, rollout_func=sampler,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0),
    )  # fmt: skip
    trainer.train()
    folder = Path(trainer.args.output_dir)
    hand = weights_at_hand(folder, read_run_info(folder))
    assert hand is not None and [(one.step, one.adapter) for one in hand.snapshots] == [
        (0, False), (1, True), (2, True), (3, True),
    ]  # fmt: skip
    found = examine(folder, model="auto").attribution
    assert found is not None and found.cause == "wrong_adapter" and "half" in found.detail
    assert found.explained > 0.95


def test_what_is_not_there_is_said(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(Sampler(head=Head(0.8)), save_strategy="no")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"model": "somebody/else"}))
    assert "is not on this machine" in examine(folder, model="auto").hint
    assert main(["doctor", str(folder), "--model", str(tmp_path / "nowhere")]) == 2
    assert "must be a model on this machine" in capsys.readouterr().err
