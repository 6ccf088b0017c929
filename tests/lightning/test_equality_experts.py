"""A mixture of experts in both trainers on the same rollouts: R2, R3 and the load-balancing loss alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from both_trainers import assert_same_numbers, distance, keep_order, run_lightning, run_trl, trl_side
from tiny_models import tiny_model
from trainer_runs import Engine

from trl_offpolicy.engines.routing import record
from trl_offpolicy.engines.routing.reported import EngineRoutes, RouteStore

pytestmark = pytest.mark.integration

STEPS, LIMIT = 4, 1e-5
FLIPS = "offpolicy/routing/flip_fraction"
TWO = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
WHOLE = {"preset": "deepseek-v3.2/whole", "options": {"max_divergence": 0.02, "kl_coef": 0.3}}
OBJECTIVE = {**WHOLE, "preset": "deepseek-v3.2/objective"}  # without its routing replay
UNMASKED = {**WHOLE, "options": {"max_divergence": 100.0, "kl_coef": 0.3}}
NO_KL = {**WHOLE, "options": {"max_divergence": 0.02, "kl_coef": 1e-6}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], float]] = {  # TRL's, the module's, the data's
    "r2": (TWO, {"routing_replay": "r2"}, {"steps_per_generation": 2, "num_iterations": 2}, 0.03),
    "r3": (TWO, {"routing_replay": "r3"}, {"steps_per_generation": 2, "num_iterations": 2}, 0.03),
    "r3_aligned": ({"gradient_accumulation_steps": 2}, {"routing_replay": "r3"}, {"steps_per_generation": 2}, 0.03),
    "compared": ({"gradient_accumulation_steps": 1}, {"routing_replay": "none"}, {}, 0.02),
    "aux_loss": ({"gradient_accumulation_steps": 2}, {"router_aux_loss_coef": 0.5}, {"steps_per_generation": 2}, 0.02),
    "frozen": ({"gradient_accumulation_steps": 1}, {"freeze_router": True}, {}, 0.02),
    "deepseek": ({**TWO, "offpolicy": WHOLE}, {}, {"steps_per_generation": 2, "num_iterations": 2}, 0.03),
}


class RoutedEngine(Engine):
    """A sampler that routes every token to the experts next to the trainer's, and reports it."""

    def __init__(self) -> None:
        super().__init__(shift=0.2, noise=0.3)
        self.routes = RouteStore()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        answer = super().__call__(prompts, trainer)
        fed = [[*pair[0], *pair[1]][:-1] for pair in zip(answer["prompt_ids"], answer["completion_ids"], strict=True)]
        routes = [self._route(trainer.model, ids) for ids in fed]
        for ids, one in zip(fed, routes, strict=True):
            self.routes.add(EngineRoutes(tuple(ids), one))
        return {**answer, "routed_experts": routes}

    @torch.no_grad()
    def _route(self, model: Any, ids: list[int]) -> torch.Tensor:
        with record(model) as recorded:
            model(input_ids=torch.tensor([ids]))
        return (recorded.routed_experts[0].to(torch.int16) + 1) % 4


@pytest.fixture
def build(make_args: Any, fresh_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("trl_offpolicy.trl.config.check_replay", lambda args: None)  # r3 wants vLLM there
    keep_order(monkeypatch)
    return trl_side(make_args, fresh_model, tokenizer, kind="qwen3_moe")


def both(case: str, build: Any, folder: Path, **changed: Any) -> tuple[Any, Any, Any]:
    """TRL's run, its rows, and Lightning's run; ``changed`` are settings of the module alone."""
    options, ours, sizes, rate = CASES[case]
    engine = RoutedEngine() if case.startswith("r3") or case in ("compared", "deepseek") else None

    def share_routes(trainer: Any) -> None:
        if engine is not None:
            trainer._routing._store = engine.routes

    theirs, rows, calls = run_trl(
        build, engine=engine, prepare=share_routes, max_steps=STEPS, learning_rate=rate, **options, **ours
    )
    accumulation = options["gradient_accumulation_steps"]
    correction = options.get("offpolicy", "paper/tis")
    settings = {"model": tiny_model("qwen3_moe"), "correction": correction, **ours, **changed}
    watch, _ = run_lightning(folder, calls, accumulation, settings, sizes, steps=STEPS, rate=rate)
    return theirs, rows, watch


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_metrics_and_weights_are_those_of_trl(case: str, build: Any, tmp_path: Path) -> None:
    theirs, rows, watch = both(case, build, tmp_path)
    assert len(rows) == len(watch.logs) == STEPS
    assert (FLIPS in rows[0]) == (case not in ("aux_loss", "frozen"))
    if FLIPS in rows[0]:
        assert max(row[FLIPS] for row in rows) > 0.01
    assert rows[0]["aux_loss"] > 1, "the architecture's own coefficient, unless one is given"
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < LIMIT
        assert watch.logs[step]["loss"] == pytest.approx(rows[step]["loss"], rel=LIMIT, abs=LIMIT)
        assert_same_numbers(watch.logs[step], rows[step])


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("r2", {"routing_replay": "none"}),
        ("r3", {"routing_replay": "none"}),
        ("r3_aligned", {"routing_replay": "none"}),
        ("compared", {"routing_replay": "r3"}),
        ("aux_loss", {"router_aux_loss_coef": -0.5}),
        ("frozen", {"router_aux_loss_coef": 0.0}),
        ("deepseek", {"correction": OBJECTIVE}),
        ("deepseek", {"correction": UNMASKED}),
        ("deepseek", {"correction": NO_KL}),
    ],
)
def test_another_setting_is_seen(case: str, changed: dict[str, Any], build: Any, tmp_path: Path) -> None:
    """The comparison above is not satisfied by a module that ignores the option."""
    theirs, _, watch = both(case, build, tmp_path, **changed)
    assert max(map(distance, watch.gradients, theirs.gradients)) > 10 * LIMIT
