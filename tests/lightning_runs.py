"""Tiny Lightning runs: an engine that plays back given rollouts, and what a module needs to train in a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tiny_models import score_last_word, tiny_model, tiny_prompts, tiny_tokenizer
from trainer_runs import GENERATIONS, LENGTH, MICRO_BATCH, Engine

from lightning_module import OffPolicyGRPOModule, PromptDataModule
from trl_offpolicy.engines.engine import Rollouts, Sampling, SyncReport
from trl_offpolicy.engines.weights.source import WeightSource


class Played:
    """An engine of the engine layer whose rollouts were made elsewhere; it scores with the weights it was synced.

    Args:
        calls: what ``generate`` returns, call by call.
    """

    version: int | None = None

    def __init__(self, calls: Sequence[dict[str, Any]]) -> None:
        self.calls, self.prompts, self.synced = list(calls), [], []

    def bind(self, source: WeightSource) -> None:
        self.source = source

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        call = self.calls[len(self.prompts)]
        self.prompts.append([list(ids) for ids in prompt_ids for _ in range(n)])
        return Rollouts(
            prompt_ids=call["prompt_ids"],
            completion_ids=call["completion_ids"],
            sampling_per_token_logps=call["logprobs"],
            policy_versions=[[self.version or 0] * len(ids) for ids in call["completion_ids"]],
            finish_reasons=["stop"] * len(call["completion_ids"]),
            routed_experts=call.get("routed_experts"),
            token_rewards=call.get("token_rewards"),
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        raise AssertionError("sync_check is off in these runs")

    def sync_weights(self, version: int) -> SyncReport:
        start = time.monotonic()
        size = sum(tensor.nbytes for _, tensor in self.source.merged())
        self.version = version
        self.synced.append(version)
        return SyncReport(version=version, kind="memory", bytes=size, seconds=time.monotonic() - start)

    def close(self) -> None:
        pass


class OwnMismatch(Played):
    """Random words; log-probs of the trainer's own weights with a shift and noise, as :class:`trainer_runs.Engine`."""

    def __init__(self, **mismatch: float) -> None:
        super().__init__([])
        self.words = Engine(**mismatch)

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        completions = [self.words._words() for _ in prompts]
        pairs = zip(prompts, completions, strict=True)
        logprobs = [self.words._score(self.source.model, *pair) for pair in pairs]
        self.calls.append({"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs})
        return super().generate(prompt_ids, sampling, n=n)


def module(engine: Any = "transformers", **options: Any) -> OffPolicyGRPOModule:
    """A module on the tiny model."""
    defaults = {
        "model": tiny_model(),
        "reward_funcs": score_last_word,
        "tokenizer": tiny_tokenizer(),
        "sampling": {"max_tokens": LENGTH},
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "noise_floor_steps": 0,
        "sync_check": engine == "transformers",
    }
    return OffPolicyGRPOModule(engine=engine, **{**defaults, **options})


def data(prompts: Any = None, **options: Any) -> PromptDataModule:
    """Prompts of the tiny vocabulary, in order."""
    defaults = {"micro_batch_size": MICRO_BATCH, "num_generations": GENERATIONS, "shuffle": False}
    return PromptDataModule(tiny_prompts() if prompts is None else prompts, **{**defaults, **options})


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    """A trainer on the CPU that says nothing."""
    defaults = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **options})


def two_generations(ours: OffPolicyGRPOModule, folder: Path, shown: Sequence[str]) -> list[dict[str, float | None]]:
    """Train two optimizer steps on each of two generations; the named diagnostics of every step, None = not logged."""
    watch = Watch()
    owner = trainer(folder, callbacks=[watch], max_steps=4)
    owner.fit(ours, data(micro_batch_size=8, steps_per_generation=2))
    return [{name: row.get(f"offpolicy/{name}") for name in shown} for row in watch.logs]


class Watch(pl.Callback):
    """Keeps loss, gradients, parameters and logged numbers of every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.logs: list[dict[str, float]] = []
        self.generations: list[tuple[int, int]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.policy.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.generations.append(batch.generation)
        if len(self.gradients) > len(self.weights):
            named = pl_module.policy.named_parameters()
            self.weights.append({name: p.detach().clone() for name, p in named})
            self.logs.append(dict(pl_module.step_logs))


class Rows(pl.Callback):
    """Keeps every generation batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        generate = pl_module.generation._generate

        def kept(step: Any) -> dict[str, Any]:
            self.batches.append(generate(step))
            return dict(self.batches[-1])

        pl_module.generation._generate = kept
