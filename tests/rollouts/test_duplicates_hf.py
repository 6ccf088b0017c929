"""Copies where transformers' ``generate`` samples, which reports no log-probs: found by the doctor, chance is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import data, module
from lightning_runs import trainer as lightning_trainer
from tiny_models import score_last_word, tiny_model, tiny_prompts, tiny_tokenizer
from trainer_runs import GENERATIONS, tiny_options

from lightning_module.callbacks import RunFolder
from trl_offpolicy.diagnosis.doctor import examine

pytestmark = pytest.mark.integration

COPIED, DISTINCT = "offpolicy/rollout/copied_fraction", "offpolicy/rollout/distinct_fraction"


def by_trl(folder: Path, model: Any, **options: Any) -> None:
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    given = tiny_options(folder, max_steps=3, report_to="none", write_report=False, noise_floor_steps=0, **options)
    OffPolicyGRPOTrainer(
        model, score_last_word, OffPolicyGRPOConfig(**given), tiny_prompts(), processing_class=tiny_tokenizer()
    ).train()


def by_attach(folder: Path, model: Any, **options: Any) -> None:
    import trl

    import trl_offpolicy as op

    given = trl.GRPOConfig(**tiny_options(folder, max_steps=3, **options))
    watched = trl.GRPOTrainer(model, score_last_word, given, tiny_prompts(), processing_class=tiny_tokenizer())
    op.attach(watched, write_report=False)
    watched.train()


def by_lightning(folder: Path, model: Any, **options: Any) -> None:
    sampling = {"max_tokens": 6, "top_p": options.get("top_p", 1.0)}
    owner = lightning_trainer(folder, max_steps=3, callbacks=[RunFolder(str(folder), report=False)])
    owner.fit(module(model=model, sampling=sampling), data())


TRAINERS = pytest.mark.parametrize("run", [by_trl, by_attach, by_lightning])


def steps_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def finds_copies(folder: Path) -> bool:
    return "repeated_draws" in {one.cause for one in examine(folder).diagnosis.findings}


@TRAINERS
def test_rows_that_draw_the_same_numbers_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]
) -> None:
    draw = torch.multinomial

    def same_for_all(probabilities: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return draw(probabilities, *args, **kwargs)[::GENERATIONS].repeat_interleave(GENERATIONS, dim=0)

    monkeypatch.setattr(torch, "multinomial", same_for_all)
    run(tmp_path, tiny_model())
    assert all(row[DISTINCT] == 1 / GENERATIONS and row[COPIED] == 1.0 for row in steps_of(tmp_path))
    assert finds_copies(tmp_path)


@TRAINERS
def test_independent_draws_are_not(tmp_path: Path, run: Callable[..., None]) -> None:
    run(tmp_path, tiny_model())
    assert all(row[COPIED] == 0.0 for row in steps_of(tmp_path))
    assert not finds_copies(tmp_path)


@TRAINERS
def test_honest_repeats_of_a_sure_policy_are_not(tmp_path: Path, run: Callable[..., None]) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight *= 40  # next to no entropy
    run(tmp_path, model)
    rows = steps_of(tmp_path)
    assert all(row[DISTINCT] < 0.8 for row in rows) and all(row.get(COPIED, 0.0) == 0.0 for row in rows)
    assert not finds_copies(tmp_path)


def test_truncation_that_trl_does_not_score_is_unknown(tmp_path: Path) -> None:
    """Stock TRL scores the whole distribution: under top-p an honest repeat would look too improbable."""
    by_attach(tmp_path, tiny_model(), top_p=0.5)
    assert all(COPIED not in row and DISTINCT in row for row in steps_of(tmp_path))
    mirrored = tmp_path / "mirrored"
    by_trl(mirrored, tiny_model(), top_p=0.9)
    assert all(COPIED in row for row in steps_of(mirrored))
