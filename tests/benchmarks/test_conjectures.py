"""Four conjectures at laptop scale: the pieces by hand-made numbers, then every command, shortened."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from processes import run_command

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.conjectures import budget, collapse, common, lag, moe, run
from benchmarks.conjectures.experts import Record, choosing, expert_layers, flipping, mixture, moments_of, replayed
from benchmarks.lab.intervals import Interval
from benchmarks.lab.sorting import Sorter, prompts, reward, sample, token_logps

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def routed() -> Sorter:
    torch.manual_seed(0)
    return mixture(4)()


def test_exact_accuracy_is_the_probability_of_the_answer() -> None:
    model = Sorter()
    with torch.no_grad():
        model.head.weight *= 0.0  # every symbol is equally likely
    assert common.exact_accuracy(model, "reversing") == pytest.approx(19.0**-11, rel=1e-3)


def test_auroc_and_logistic_find_a_known_boundary() -> None:
    assert common.auroc([1.0, 2.0, 3.0], [True, False, False]) == 0.0
    assert common.auroc([1.0, 1.0], [True, False]) == 0.5 and math.isnan(common.auroc([1.0], [True]))
    chance = np.random.default_rng(0)
    x = chance.normal(size=(4000, 2))
    labels = (chance.random(4000) < 1 / (1 + np.exp(-(2 * x[:, 0] - x[:, 1] + 0.5)))).astype(float)
    np.testing.assert_allclose(common.logistic(x, labels), [2.0, -1.0, 0.5], atol=0.2)
    separable = common.logistic(np.array([[-1.0], [1.0]]), np.array([0.0, 1.0]))
    assert 0 < separable[0] < 5  # the ridge keeps it finite


def test_squared_mean_has_no_bias_from_noise() -> None:
    noise = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    assert abs(common.squared_mean(noise)) < 0.01  # the plain square of a mean of pairs would be 1.5
    assert common.squared_mean(noise + torch.tensor([2.0, 0.0, 1.0])) == pytest.approx(5.0, abs=0.2)


def test_bootstrap_and_verdicts() -> None:
    found = common.bootstrap([1.0, 2.0, 3.0, 4.0], lambda some: float(np.mean(some)))
    assert found.value == 2.5 and 1.0 <= found.low < 2.5 < found.high <= 4.0
    limits = [common.judged(Interval(mean, 0.001), 0.003) for mean in (0.001, 0.003, 0.005)]
    assert limits == ["below", "open", "above"]
    assert common.judged(Interval(0.0, math.nan), 0.003) == "open"


def test_replayed_routing_gives_the_samplers_log_probs(routed: Sorter) -> None:
    flips, asked = flipping(routed, 0.5, torch.Generator().manual_seed(1)), prompts(3, torch.Generator().manual_seed(2))
    there, here = Record(routed, flips), Record(routed)
    with choosing(routed, there.choices):
        answers = sample(routed, asked, torch.Generator().manual_seed(3))
    with choosing(routed, here.choices):
        free = token_logps(routed, answers.ids)
    with choosing(routed, replayed(there.routes)):
        again = token_logps(routed, answers.ids)
    torch.testing.assert_close(again[answers.mask], answers.logps[answers.mask], atol=1e-5, rtol=1e-4)
    assert (free - answers.logps)[answers.mask].abs().max() > 1e-3
    seen = moments_of(there.routes, here.routes, answers.mask, 4)
    # half of the second experts flip; a flip takes one of four experts away and adds another, later ones sometimes both
    assert seen["delta"] == pytest.approx(seen["flips"] * 2 / 4, rel=0.1) and 0.35 < seen["flips"] < 0.8
    assert all(layer.choose is None for layer in expert_layers(routed))


def test_flips_at_ties_are_those_below_the_limit(routed: Sorter) -> None:
    logits = torch.tensor([[[3.0, 1.0, 0.9, 0.0], [3.0, 1.0, 0.0, -1.0]]])
    near, everywhere = (flipping(routed, 1.0, torch.Generator(), limits=limits)[0] for limits in ([0.5, 0.5], None))
    assert near(logits).tolist() == [[[0, 2], [0, 1]]] and everywhere(logits).tolist() == [[[0, 2], [0, 2]]]
    with pytest.raises(ValueError, match="experts must exceed top=2, but got 2"):
        mixture(2)


def test_a_mixture_computes_the_chosen_experts_alone(routed: Sorter) -> None:
    layer, x = expert_layers(routed)[0], torch.randn(2, 3, 64)
    logits = layer.router(x[1, 2])
    first, second = logits.topk(2).indices.tolist()
    gates = logits[[first, second]].softmax(0)
    parts = [layer.down[i](torch.nn.functional.gelu(layer.up[i](x[1, 2]))) for i in (first, second)]
    torch.testing.assert_close(layer(x)[1, 2], gates[0] * parts[0] + gates[1] * parts[1], atol=1e-5, rtol=1e-4)


def cell(engine: str, correction: str, seed: int, accuracy: float, tv: float) -> dict[str, Any]:
    names = {"world": "reversing", "engine": engine, "correction": correction, "seed": seed}
    return {**names, "accuracy": accuracy, "tv_p95": tv, "chi2_sequence": 0.0, "delta": 0.0}


@pytest.mark.parametrize(
    ("gain", "tv", "verdict"),
    [(0.001, 5e-5, "holds"), (0.008, 5e-5, "does not hold"), (0.008, 5e-4, "cannot be told here")],
)
def test_the_budget_judges_gains_within_it(gain: float, tv: float, verdict: str) -> None:
    runs = [cell("int14", "none", seed, 0.5 + seed / 10, tv) for seed in range(3)]
    runs += [cell("int14", "tis", seed, 0.5 + seed / 10 + gain + seed * 1e-4, tv) for seed in range(3)]
    found = budget.find(runs)
    assert found.verdict == verdict
    assert f"{gain + 1e-4:+.4f} ± 0.0002" in found.table


def lagged(ess: float, steps: int, rate: float, unstable: bool, seed: int = 0) -> dict[str, Any]:
    names = {"task": "sorting", "objective": "oapl", "lag": steps, "learning_rate": rate, "seed": seed}
    rewards = [0.5, 0.6, 0.2, 0.2] if unstable else [0.5, 0.6, 0.6, 0.6]
    return {
        **names,
        "rewards": rewards,
        "ess": [ess],
        "bias": (steps * rate) ** 2,
        "gradient": 2.0,
        "accuracy": 0.5,
        "start": 0.3,
    }


def test_the_boundary_of_a_made_up_law_is_found() -> None:
    chance = np.random.default_rng(0)
    runs = []
    for _ in range(400):
        ess, steps, rate = np.exp([chance.uniform(-4, 0), chance.uniform(0, 6), chance.uniform(-9, -5)])
        runs.append(lagged(float(ess), float(steps), float(rate), unstable=bool(steps > 50 * ess**1.5)))
    found = lag.boundary(runs, "ess", "lag")
    assert found.slope == pytest.approx(1.5, abs=0.2) and math.exp(found.constant) == pytest.approx(50, rel=0.4)
    assert found.separated > 0.99
    assert lag.bias_exponent(runs) == pytest.approx(1.0, abs=1e-6)
    stable = [run for run in runs if lag.is_stable(run)]
    assert math.isnan(lag.boundary(stable, "ess", "lag").slope)
    assert lag.law(runs[:24], lag.is_stable).unstable == (sum(not lag.is_stable(run) for run in runs[:24]), 24)


def test_a_lag_is_judged_by_what_no_lag_gains() -> None:
    runs = [{**lagged(1.0, steps, 1e-3, False), "accuracy": end} for steps, end in ((1, 0.5), (10, 0.41), (50, 0.39))]
    assert [lag.learns(runs)(run) for run in runs] == [True, True, False]
    lost = [{**run, "accuracy": 0.2} for run in runs]
    assert not any(lag.learns(lost)(run) for run in lost)


def test_batches_drawn_at_once_are_split_by_group() -> None:
    torch.manual_seed(0)
    asking, chance = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    drawn = common.rollouts_of(Sorter(), None, 4, "reversing", asking, chance)
    parts = lag.split(drawn, 2)
    assert torch.equal(torch.cat([part.advantages for part in parts]), drawn.advantages)
    assert [len(part.answers.ids) for part in parts] == [16, 16]
    assert torch.equal(drawn.old, drawn.answers.logps)
    assert torch.equal(drawn.rewards, reward(drawn.answers, "reversing"))


def drifting(task: str, seed: int, collapsed: bool) -> dict[str, Any]:
    chance = np.random.default_rng([seed, task == "sorting"])
    rows = {name: np.exp(chance.normal(scale=0.1, size=40)).tolist() for name in collapse.COLUMNS}
    if collapsed:
        rows["variance"] = (np.array(rows["variance"]) * np.exp(np.linspace(0, 4, 40))).tolist()
    rows |= {"step": [2.0 * (place + 1) for place in range(40)], "risk": [0.0] * 40, "learner_reward": [0.5] * 40}
    return {"task": task, "seed": seed, "collapse": 70.0 if collapsed else None, "rows": rows}


def test_the_predictor_transfers_what_drifts_alike() -> None:
    runs = [drifting(task, seed, bool(seed % 2)) for task in collapse.TASKS for seed in range(10)]
    table = collapse.table_of(runs[1], collapse.FOUR)
    assert table is not None and table.features.shape == (32, 8)  # rows 3 to 34 of 40: before step 70
    assert table.labels.all() and not collapse.table_of(runs[0], collapse.FOUR).labels.any()  # type: ignore[union-attr]
    told = collapse.predictions(runs, collapse.FOUR, "ranking")
    untold = collapse.predictions(runs, collapse.PLAIN_LOG, "ranking")
    assert collapse.by_run(told) == 1.0 and collapse.by_row(told) > 0.85 > 0.7 > collapse.by_row(untold)
    assert np.isnan(collapse.by_row(collapse.by_risk(runs[::2], "ranking")))  # no run collapsed


def test_mixtures_of_a_seed_are_the_same_for_both_tasks() -> None:
    setting, drawn = collapse.mixture_of(3)
    assert collapse.mixture_of(3)[1] == drawn and setting.bits == drawn["bits"]
    assert {job.name for job in collapse.plan([3], False)} == {"sorting-3", "ranking-3"}


def flipped(experts: int, rate: float, seed: int) -> dict[str, Any]:
    delta = 2 * rate / experts
    seen = {"kl_k3": 0.01, "chi2_token": 0.02, "ess_sequence": 0.9, "delta": delta, "seed": seed}
    biases = {"bias_to_replay": (3 * experts * delta**1.0) ** 2, "bias_to_policy": 0.01}
    return {
        "arm": "flips",
        "experts": experts,
        "rate": rate,
        **seen,
        **biases,
        "oracle_replay": 1.0,
        "oracle_policy": 1.0,
    }


def test_exponents_of_a_made_up_bias() -> None:
    runs = [flipped(experts, rate, seed) for experts in (4, 8) for rate in (0.01, 0.03, 0.1) for seed in (0, 1)]
    assert moe.exponents(runs, "flips", "replay") == pytest.approx((1.0, 0.0), abs=1e-6)
    assert moe.relative(runs[:1], "replay") == pytest.approx(3 * 0.02)
    negative = [{**run, "bias_to_replay": -1.0} for run in runs]
    assert math.isnan(moe.exponents(negative, "flips", "replay")[0])
    assert "| flips | 4 | 0.01 | 0.0200 |" in moe.find(runs).table


def test_token_is_without_mismatch_is_the_replayed_gradient(routed: Sorter) -> None:
    chance = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    found = moe.compared(routed, routed, flipping(routed, 0.0, chance[0]), 2, *chance[1:])
    torch.testing.assert_close(found.token_is, found.replay, atol=1e-5, rtol=1e-3)
    flips = moe.compared(routed, routed, flipping(routed, 0.5, chance[0]), 2, *chance[1:])
    assert (flips.token_is - flips.replay).norm() > 1e-3 * flips.replay.norm()
    assert flips.seen["kl_k3"] > found.seen["kl_k3"] and found.seen["delta"] == 0.0


def test_plans_are_the_issues_grids() -> None:
    counts = {
        name: len({job.name for job in module.plan([0, 1], False)})
        for name, module in (("budget", budget), ("lag", lag), ("collapse", collapse), ("moe", moe))
    }
    assert counts == {"budget": 2 * 45, "lag": 2 * 84, "collapse": 4, "moe": 2 * 52}
    assert {job.lag for job in lag.plan([0], False)} == {1, 10, 50, 100, 200, 400, 800}


@pytest.mark.slow
@pytest.mark.parametrize("name", run.NAMES)
def test_every_command_in_short(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "benchmarks/conjectures/run.py", name, "--short", "--out", str(tmp_path)]
    done = run_command(command, seconds=590, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["verdict"] in ("holds", "does not hold", "cannot be told here") and result["seeds"]
    assert {"command", "commit", "date", "torch", "cpu", "cost", "settings"} <= set(result)
    lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert len(lines) == result["runs"] > 0 and (tmp_path / f"{name}.md").read_text() in done.stdout
    ElementTree.parse(tmp_path / f"{name}.svg")
    # a fresh folder resumes from the results alone
    assert run.main([name, "--short", "--out", str(tmp_path / "again"), "--results", str(tmp_path)]) == 0
    assert f"({len(lines)} from before)" in capsys.readouterr().out
