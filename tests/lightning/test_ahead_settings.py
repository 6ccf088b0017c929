"""``async_rollouts`` of the Lightning module: what it refuses, and which prompts its stream gives ahead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning_runs import OwnMismatch, data, module, trainer

from lightning_module.streams import BatchPlan, PromptStream

SERVER = {"type": "server", "base_url": "http://127.0.0.1:1"}
INTERPOLATED = {"preset": "paper/tis", "objective": {"proximal": "interpolated"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"engine": "transformers", "correction": "measure"},
            r"left out with engine 'transformers': .* Start a server",
        ),
        ({"engine": "vllm"}, r"^async_rollouts must be left out with engine 'vllm'"),
        ({"async_rollouts": "soon"}, r"^async_rollouts must be a lag or a mapping, but got 'soon'"),
        ({"async_rollouts": 2, "sampling": {"max_tokens": 4, "extra": {"min_tokens": 2}}}, "sampling options min_tok"),
        ({"async_rollouts": {"old_logps": "refuse"}}, r"'refuse' with TruncateWeight on old/sampling"),
        ({"async_rollouts": {"old_logps": "ewma"}, "correction": INTERPOLATED}, "both make the proximal policy"),
        ({"routing_replay": "r2"}, r"^routing_replay must be none or r3 with async_rollouts: .* but got 'r2'"),
    ],
)
def test_what_cannot_be_combined_is_said_at_once(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"engine": SERVER, "async_rollouts": 1, "correction": "paper/tis", **options}
    with pytest.raises(ValueError, match=message):
        module(given.pop("engine"), **given)


def test_an_engine_of_ones_own_must_be_a_server(tmp_path: Path) -> None:
    ours = module(OwnMismatch(), async_rollouts=1, correction="paper/tis")
    with pytest.raises(TypeError, match=r"engine must be a server with async_rollouts, but got a OwnMismatch, which l"):
        trainer(tmp_path, max_steps=1).fit(ours, data())


def test_a_number_in_yaml_and_none() -> None:
    assert module(SERVER, async_rollouts="2", correction="paper/tis").ahead is not None
    assert module(SERVER, correction="paper/tis").ahead is None
    assert module(SERVER, async_rollouts={"lag": 3}, correction="paper/tis").hparams["async_rollouts"] == {"lag": 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_micro_step_knows_the_prompts_that_come(rank: int) -> None:
    rows = [{"prompt": str(i)} for i in range(12)]
    plan = BatchPlan(micro_batch_size=2, num_generations=2, steps_per_generation=2)
    steps = list(PromptStream(rows, plan, rank=rank, world_size=2, shuffle=True, seed=3))

    generations = {step.generation[1]: step.prompts for step in steps}
    for step in steps:
        for later in range(3 - step.generation[1]):
            assert step.coming(later) == generations[step.generation[1] + later]


@pytest.mark.parametrize(
    ("done", "max_steps", "per_epoch", "accumulation", "expected"),
    [
        ((0, 0), 10, 100, 2, [0, 1, 2]),
        ((0, 0), 2, 100, 2, [0, 1]),  # the third generation is after the last step
        ((3, 0), -1, 8, 2, [0]),  # the epoch ends
        ((1, 0), 10, 7, 2, [0, 1, 2]),  # the limit cuts the fourth
        ((2, 1), 1, 100, 4, [0, 1]),  # 5 micro-steps done, one of them of the step that is under way; 3 are left
        ((0, 0), 1, 100, 4, [0, 1]),  # two generations a step
    ],
)
def test_nothing_is_asked_for_that_the_run_does_not_reach(
    done: tuple[int, int], max_steps: int, per_epoch: int, accumulation: int, expected: list[int]
) -> None:
    ours: Any = module(SERVER, async_rollouts=2, correction="paper/tis")
    number, position = done
    plan = BatchPlan(micro_batch_size=2, num_generations=2, steps_per_generation=2)
    step: Any = SimpleNamespace(generation=(0, number), position=position, plan=plan)
    taken = 0 if max_steps < 0 else (2 * number + position) // accumulation
    ours.ahead._module = SimpleNamespace(
        trainer=SimpleNamespace(
            num_training_batches=per_epoch,
            max_steps=max_steps if max_steps < 0 else max_steps + taken,
            global_step=taken,
            accumulate_grad_batches=accumulation,
        )
    )
    assert ours.ahead._reached(step, 3) == expected
