"""transformers' generate on two ranks of the TRL trainer: a group that lies on both has no two equal completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

pytestmark = pytest.mark.integration
SAME_NOISE = "same noise"


def train(folder: Path, rank: int) -> dict[str, Any]:
    """Two steps as they are, and two in which both ranks draw from one seed."""
    return {name: one_run(folder, name) for name in ("as it is", SAME_NOISE)}


def one_run(folder: Path, name: str) -> list[list[list[int]]]:
    """The completions of this rank, by step: two rows of a group of four."""
    from trainer_runs import generation_batches

    options = {"max_steps": 2, "max_completion_length": 12, "gradient_accumulation_steps": 1, "use_vllm": False}
    trainer = two_ranks.tiny_trainer(folder, name, None, **options)
    if name == SAME_NOISE:
        generate = trainer._generate

        def with_one_seed(prompts: Any) -> Any:
            torch.manual_seed(7)
            return generate(prompts)

        trainer._generate = with_one_seed
    outputs = generation_batches(trainer)
    trainer.train()
    return [output["completion_ids"].tolist() for output in outputs]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    said, _ = two_ranks.trained(__file__, tmp_path_factory.mktemp("draws"))
    return said


def distinct(ranks: list[dict[str, Any]], name: str) -> list[int]:
    """Number of different completions in each group, which lies half on each rank."""
    steps = zip(*(said[name] for said in ranks), strict=True)
    return [len({tuple(row) for rows in step for row in rows}) for step in steps]


def test_no_two_completions_of_a_group_are_equal(ranks: list[dict[str, Any]]) -> None:
    assert distinct(ranks, "as it is") == [4, 4]


def test_one_seed_on_both_ranks_would_be_seen(ranks: list[dict[str, Any]]) -> None:
    assert distinct(ranks, SAME_NOISE) == [2, 2]


if __name__ == "__main__":
    two_ranks.leave(train)
