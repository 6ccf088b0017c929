"""``offpolicy: trl/rloo`` against TRL's own RLOOTrainer on the same draws (test_trainer_parity.py: same tensors)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from tiny_models import score_last_word, tiny_prompts
from trainer_runs import GENERATIONS, LENGTH, MICRO_BATCH, Engine, records

import trl_offpolicy as op
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

BETA = 0.5
SHIFT = 0.5
RUN_LIMIT = 1e-3
"""Largest difference of a weight after four steps, relative to the largest change of one. Seen, with and without
``--other-digits``: 2e-5; without the KL in the reward, or with the mean in the place of the product: 0.5 or more."""


@pytest.fixture
def build(fresh_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """``build(options, rloo=..., ours=...)``: TRL's RLOOTrainer and this kit's trainer on copies of one model."""

    def pair(
        options: dict[str, Any], *, rloo: dict[str, Any], ours: dict[str, Any], reward: Any = score_last_word,
        rollout_func: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        shared = {
            "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
            "disable_dropout": True, "save_strategy": "no", **options,
        }  # fmt: skip
        data = {"train_dataset": tiny_prompts(), "processing_class": tokenizer}
        theirs = trl.RLOOConfig(output_dir=str(tmp_path / "rloo"), **shared, **rloo)
        own = OffPolicyGRPOConfig(output_dir=str(tmp_path / "ours"), write_report=False, **shared, **ours)
        return (
            trl.RLOOTrainer(fresh_model(), reward, theirs, **data),
            OffPolicyGRPOTrainer(fresh_model(), reward, own, rollout_func=rollout_func, **data),
        )

    return pair


class Sampler:
    """In the place of vLLM for TRL's trainer: words of the same seed as :class:`~trainer_runs.Engine`'s."""

    mode, logprobs = "server", None

    def __init__(self) -> None:
        self.words = Engine()

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        return prompts, [self.words._words() for _ in prompts], None, None


class Drawn(Engine):
    """A ``rollout_func`` with the same words; its log-probs are the trainer's plus :data:`SHIFT`."""

    def __init__(self) -> None:
        super().__init__(shift=SHIFT)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        completions = [self._words() for _ in prompts]
        logps = [self._score(trainer.model, *pair) for pair in zip(ids, completions, strict=True)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logps}

    def _score(self, model: Any, prompt: list[int], completion: list[int]) -> list[float]:
        kept, self.random = self.random, torch.Generator()  # its noise must not move the words
        try:
            return super()._score(model, prompt, completion)
        finally:
            self.random = kept


def sometimes(completions: list[str], **_: object) -> list[float | None]:
    """A reward that some completions do not have; a group may be left with one."""
    scores = score_last_word(completions)
    return [score if int(100 * score) % 3 else None for score in scores]


def moved(trainer: Any, before: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(p.detach() - before[name]).flatten() for name, p in trainer.model.named_parameters()])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("rloo", "options", "reward"),
    [
        ({}, {}, score_last_word),
        ({"normalize_advantages": True}, {"num_iterations": 2}, score_last_word),
        ({"normalize_advantages": True, "epsilon": 0.05}, {"steps_per_generation": 4}, sometimes),
    ],
    ids=["plain", "normalised, two iterations", "unscored, four updates"],
)
def test_a_run_on_the_same_draws(
    build: Any, monkeypatch: pytest.MonkeyPatch, rloo: dict[str, Any], options: dict[str, Any], reward: Any
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda rows: rows)
    monkeypatch.setattr("trl.trainer.rloo_trainer.shuffle_sequence_dict", lambda rows: rows)
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))
    shared = {
        "per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": 2, "num_generations": GENERATIONS,
        "max_completion_length": LENGTH, "max_steps": 4, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.02,
        "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "shuffle_dataset": False, **options,
    }  # fmt: skip
    spec = {"preset": "trl/rloo", "options": {"beta": BETA, **rloo}}
    stock, ours = build(
        shared, rloo={"beta": BETA, **rloo}, ours={"offpolicy": spec}, reward=reward, rollout_func=Drawn()
    )
    stock.use_vllm, stock.vllm_generation, stock._last_loaded_step = True, Sampler(), -1
    before = {name: p.detach().clone() for name, p in stock.model.named_parameters()}
    stock.train()
    ours.train()
    wanted, got = moved(stock, before), moved(ours, before)
    assert wanted.abs().max() > 1e-3
    assert (got - wanted).abs().max() <= RUN_LIMIT * wanted.abs().max()
    # what RLOOTrainer throws away is measured: log(old / mu) is -SHIFT
    assert all(row["offpolicy/mismatch/kl_k1"] == pytest.approx(SHIFT, abs=1e-3) for row in records(ours))


def test_the_correction_is_added_by_the_same_field() -> None:
    weight = {"type": "truncate", "max_weight": 3.0}
    spec = {"preset": "trl/rloo", "options": {"beta": 0.2}, "correction": {"weight": weight}}
    preset = OffPolicyGRPOConfig(output_dir="x", use_cpu=True, bf16=False, use_vllm=True, offpolicy=spec).preset
    assert preset.correction == op.Correction(weight=op.TruncateWeight(max_weight=3.0))
    assert preset.objective.policy_loss == op.losses.PPOClip(level="sequence")
    assert preset.objective.kl is not None and preset.objective.kl.in_reward and preset.objective.kl.beta == 0.2
    assert preset.advantages == op.advantages.RLOO()


def test_no_kl_without_beta() -> None:
    assert op.presets.get("trl/rloo", beta=0).objective.kl is None
    with pytest.raises(ValueError, match=r"^beta must be a finite number, but got None"):
        op.presets.get("trl/rloo", beta=None)


def test_the_preset_in_words() -> None:
    """The mapping of docs/integrations.md."""
    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text().split())
    objective = (
        "{policy_loss: {type: ppo_clip, level: sequence}, aggregation: seq_mean_token_mean, "
        "kl: {coef: 0.05, estimator: k1, place: reward}}"
    )
    advantages = "{type: rloo, normalize: false}"
    assert f"`objective: {objective}` and `advantages: {advantages}`" in page
    spec = {"preset": "measure", "objective": yaml.safe_load(objective), "advantages": yaml.safe_load(advantages)}
    said, named = (
        OffPolicyGRPOConfig(output_dir="x", use_cpu=True, bf16=False, use_vllm=True, offpolicy=one).preset
        for one in (spec, "trl/rloo")
    )
    assert (said.objective, said.advantages) == (named.objective, named.advantages)
