"""trl_offpolicy.attach on TRL's RLOOTrainer: its training is untouched, and what it throws away is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tiny_models import score_last_word, tiny_prompts
from trainer_runs import GENERATIONS, LENGTH, MICRO_BATCH, Engine, records, rollouts
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

import trl_offpolicy as op
from trl_offpolicy.trl.attach import _description
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

pytestmark = pytest.mark.integration

Stock = Callable[..., trl.RLOOTrainer]
SHIFT = 0.5


class Sampler:
    """In the place of TRL's vLLM: words, with log-probs of the trainer's own weights plus :data:`SHIFT`."""

    mode = "server"
    logprobs = None

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.words = trainer, Engine(shift=SHIFT)

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        completions = [self.words._words() for _ in prompts]
        model = self.trainer.model
        logps = [self.words._score(model, *pair) for pair in zip(prompts, completions, strict=True)]
        return prompts, completions, [[[value] for value in row] for row in logps], None


@pytest.fixture
def stock(tmp_path: Path, fresh_model: Callable[..., Any], tokenizer: Any) -> Stock:
    """``stock(folder, **options)``: TRL's trainer on the tiny model, sampling from :class:`Sampler`."""

    def trainer(folder: str, **options: Any) -> trl.RLOOTrainer:
        fixed = {
            "output_dir": str(tmp_path / folder), "use_cpu": True, "bf16": False, "report_to": "none",
            "disable_tqdm": True, "gradient_checkpointing": False, "per_device_train_batch_size": MICRO_BATCH,
            "gradient_accumulation_steps": 2, "num_generations": GENERATIONS, "max_completion_length": LENGTH,
            "learning_rate": 1e-2, "max_steps": 3, "logging_steps": 1, "save_strategy": "no", "disable_dropout": True,
        }  # fmt: skip
        args = trl.RLOOConfig(**{**fixed, **options})
        made = trl.RLOOTrainer(
            fresh_model(), reward_funcs=score_last_word, args=args, train_dataset=tiny_prompts(),
            processing_class=tokenizer,
        )  # fmt: skip
        made.use_vllm, made.vllm_generation, made._last_loaded_step = True, Sampler(made), -1
        return made

    return trainer


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "num_iterations": 2}])
def test_the_training_is_trls_bit_for_bit(stock: Stock, options: dict[str, Any]) -> None:
    alone = stock("alone", **options)
    alone.train()
    watched = stock("watched", **options)
    op.attach(watched, write_report=False)
    watched.train()
    for (name, wanted), got in zip(alone.model.named_parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(wanted, got), name


def test_the_engines_log_probs_are_measured_and_recorded(stock: Stock) -> None:
    trainer = stock("run", num_iterations=2, gradient_accumulation_steps=1, steps_per_generation=1, max_steps=4)
    op.attach(trainer)
    trainer.train()
    rows = records(trainer)
    assert len(rows) == 4
    for row in rows:
        assert row["offpolicy/mismatch/kl_k1"] == pytest.approx(SHIFT, abs=1e-4)
        assert row["offpolicy/mismatch/ppl_ratio"] == pytest.approx(math.exp(SHIFT), rel=1e-3)
    stale = [row["offpolicy/staleness/kl_k3"] for row in rows]  # old is that of the generation, for both iterations
    assert max(stale[0], stale[2]) < 1e-9 and min(stale[1], stale[3]) > 1e-6
    frame = rollouts(trainer)
    assert len(frame) == 2 * MICRO_BATCH and frame["sampling_per_token_logps"].notna().all()


def test_detach_leaves_the_engine_as_it_was(stock: Stock) -> None:
    trainer = stock("run")
    observer = op.attach(trainer)
    assert "generate" in vars(trainer.vllm_generation)
    assert trainer.vllm_generation.logprobs == 0  # RLOO itself asks for none
    observer.detach()
    assert trainer.vllm_generation.logprobs is None
    assert "generate" not in vars(trainer.vllm_generation) and "_compute_loss" not in vars(trainer)


def test_other_trainers_are_refused_with_the_reason() -> None:
    why = r"GRPOTrainer or a trl\.RLOOTrainer, but got object, whose batches attach does not know"
    with pytest.raises(TypeError, match=why):
        op.attach(object())


def test_a_loss_that_the_options_do_not_describe_is_only_measured(
    tmp_path: Path, fresh_model: Callable[..., Any], tokenizer: Any
) -> None:
    """TRL's GMPO is a GRPOTrainer, but neither ``loss_type`` nor TRL's own correction reaches its loss."""
    args = GMPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=MICRO_BATCH,
        num_generations=GENERATIONS, max_completion_length=LENGTH,
    )  # fmt: skip
    stock = GMPOTrainer(
        fresh_model(), score_last_word, args=args, train_dataset=tiny_prompts(), processing_class=tokenizer
    )
    args.use_vllm = True  # TRL's correction is on by default
    assert op.attach(stock).preset.name == "measure"
    assert _description(stock) | {"objective": "TRL's own, GMPOTrainer", "correction": "none"} == _description(stock)


@pytest.mark.parametrize("name", ["RLOOTrainer", "GMPOTrainer"])
def test_other_trainers_refuse_this_kits_configuration(
    name: str, tmp_path: Path, fresh_model: Callable[..., Any], tokenizer: Any
) -> None:
    kind = {"RLOOTrainer": trl.RLOOTrainer, "GMPOTrainer": GMPOTrainer}[name]
    args = OffPolicyGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(TypeError, match=rf"for {name}, but got an OffPolicyGRPOConfig.*OffPolicyGRPOTrainer") as error:
        kind(fresh_model(), score_last_word, args=args, train_dataset=tiny_prompts(), processing_class=tokenizer)
    assert ("offpolicy: trl/rloo" in str(error.value)) == (name == "RLOOTrainer")
