"""Tiny training runs without vLLM: an engine that knows its own mismatch, and what a run folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_models import EOS, FIRST_WORD, VOCABULARY

from trl_offpolicy.rollouts.clock import TIME_METRICS

MICRO_BATCH, GENERATIONS, LENGTH = 4, 4, 6
TIMES = {"time", "step_time", *(f"offpolicy/time/{part}" for part in TIME_METRICS)}
"""Logged numbers that are of the clock: no two runs have the same."""


class Engine:
    """A ``rollout_func``: random words, and the trainer's own log-probs plus a shift and noise as the engine's.

    Args:
        shift: added to every log-prob, nats.
        noise: standard deviation of what is added besides.
    """

    def __init__(self, *, shift: float = 0.0, noise: float = 0.0) -> None:
        self.shift, self.noise = shift, noise
        self.random = torch.Generator().manual_seed(0)
        self.returned: dict[tuple[int, ...], list[float]] = {}
        """What was returned as log-probs, by completion ids."""

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        completions = [self._words() for _ in prompts]
        logprobs = [self._score(trainer.model, *pair) for pair in zip(prompt_ids, completions, strict=True)]
        self.returned.update(zip(map(tuple, completions), logprobs, strict=True))
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    def _words(self) -> list[int]:
        length = int(torch.randint(2, LENGTH + 1, (), generator=self.random))
        words = torch.randint(FIRST_WORD, len(VOCABULARY), (length,), generator=self.random).tolist()
        return words if length == LENGTH else [*words, EOS]

    def _score(self, model: Any, prompt: list[int], completion: list[int]) -> list[float]:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        true = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        noise = self.noise * torch.randn(len(completion), generator=self.random)
        return (true + self.shift + noise).tolist()


def tiny_options(folder: Path, **options: Any) -> dict[str, Any]:
    """``GRPOConfig`` options of a run into ``folder``: steps of 8 completions, everything as small as it can be."""
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": MICRO_BATCH,
        "per_device_eval_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": 2,
        "num_generations": GENERATIONS,
        "max_completion_length": LENGTH,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return {**defaults, **options}


def records(trainer: Any) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` that belong to an optimizer step."""
    lines = (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def rollouts(trainer: Any) -> pd.DataFrame:
    return pd.read_parquet(Path(trainer.args.output_dir) / "rollouts.parquet")


def scoring_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each call of TRL's scoring from now on."""
    from trl import GRPOTrainer

    calls: list[int] = []
    original = GRPOTrainer._get_per_token_logps_and_entropies

    def counted(self: Any, model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(input_ids))
        return original(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    return calls


def generation_batches(trainer: Any) -> list[dict[str, Any]]:
    """The dicts that leave ``_generate_and_score_completions``, before shuffle and split."""
    seen: list[dict[str, Any]] = []
    original = trainer._generate_and_score_completions

    def keep(inputs: Any) -> dict[str, Any]:
        seen.append(original(inputs))
        return {**seen[-1]}

    trainer._generate_and_score_completions = keep
    return seen
