"""What changes the learner's forward, or what samples, on two processes: one gradient, and draws of each rank's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

pytestmark = pytest.mark.slow

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rounded": {"learner_rounding": "int4"},
    "perturbed": {"perturbation": 0.05},
    "fused": {"engine": {"logit_fusion": {"teacher": "model", "alpha": 0.4}}, "offpolicy": "paper/logit-fusion"},
    "generate": {"offpolicy": "measure"},  # by transformers, with TRL's seeds
}
SAMPLED_BY_TRANSFORMERS = ("fused", "generate")
STEPS = 2


def train(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Two steps of 2 x 2 x 2 rows under DDP: gradients, weights, numbers, and what this rank drew."""
    from both_trainers import WatchTRL
    from trainer_runs import Engine, records, rollouts

    from trl_offpolicy.rollouts import perturbed_forward

    options = {**RUNS[name]}
    engine: Any = Engine(noise=0.1)
    engine.random.manual_seed(rank)  # or both ranks would say the same words
    if name == "fused":
        fusion = {**options["engine"]["logit_fusion"], "teacher": str(folder / "model")}
        options["engine"] = {"logit_fusion": fusion}
    if name in SAMPLED_BY_TRANSFORMERS:
        engine = None
    trainer = two_ranks.tiny_trainer(
        folder, name, engine, learning_rate=2e-2, optim="sgd", max_grad_norm=1e9, max_steps=STEPS, **options
    )
    drawn: list[float] = []
    normal = perturbed_forward._normal

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        noise = normal(hidden)
        drawn.append(float(noise.flatten()[0]))
        return noise

    perturbed_forward._normal = noted
    watch = WatchTRL(trainer.model)
    trainer.add_callback(watch)
    trainer.train()
    perturbed_forward._normal = normal
    unwrapped = trainer.accelerator.unwrap_model
    return {
        "gradients": watch.gradients,
        "weights": {key: value.clone() for key, value in unwrapped(trainer.model).state_dict().items()},
        "drawn": drawn,
        "scales": trainer._noise.std,
        "records": records(trainer) if rank == 0 else None,
        "rollouts": rollouts(trainer) if rank == 0 else None,
    }


def train_all(folder: Path, rank: int) -> dict[str, Any]:
    return {name: train(folder, name, rank) for name in RUNS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes say, by rank."""
    said, _ = two_ranks.trained(__file__, tmp_path_factory.mktemp("ranks"))
    return said


@pytest.mark.parametrize("name", list(RUNS))
def test_both_ranks_take_the_same_step(ranks: list[dict[str, Any]], name: str) -> None:
    """The gradient is that of all rows, and all weights move alike."""
    one, other = (said[name] for said in ranks)
    for ours, theirs in zip(one["gradients"], other["gradients"], strict=True):
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-4
    assert all(torch.equal(one["weights"][key], other["weights"][key]) for key in one["weights"])


def test_a_rounded_forward_is_learned_through(ranks: list[dict[str, Any]]) -> None:
    from both_trainers import distance

    plain, rounded = (ranks[0][name]["gradients"][0] for name in ("plain", "rounded"))
    assert distance(rounded, plain) > 1e-2


def test_each_rank_has_noise_of_its_own_and_the_scales_are_one(ranks: list[dict[str, Any]]) -> None:
    one, other = (said["perturbed"]["drawn"] for said in ranks)
    assert len(one) > 4 and not set(one) & set(other)
    scales = [row["offpolicy/perturbation/std"] for row in ranks[0]["perturbed"]["records"]]
    assert len(set(scales)) == STEPS
    assert torch.equal(*(said["perturbed"]["scales"] for said in ranks))


def test_a_teacher_takes_part_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["fused"]["records"]
    assert all(row["offpolicy/rollout/teacher_share"] == pytest.approx(0.4, abs=0.21) for row in found)


@pytest.mark.parametrize("name", SAMPLED_BY_TRANSFORMERS)
def test_no_completion_is_drawn_twice(ranks: list[dict[str, Any]], name: str) -> None:
    frame = ranks[0][name]["rollouts"]
    assert len(frame) == STEPS * 2 * 2 * 2
    for _, group in frame.groupby(["step", "prompt"]):
        assert len(group) == 4  # of both ranks
        assert len({tuple(ids) for ids in group.completion_ids}) == 4


if __name__ == "__main__":
    two_ranks.leave(train_all)
