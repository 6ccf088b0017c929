"""The frontier benchmark: its gradients against autograd, its estimates against known answers, its entry point."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.frontier import estimates, results
from benchmarks.frontier.experiment import Job, Settings, beginning, plan, prepare, run
from benchmarks.frontier.families import FAMILIES, ON_POLICY, advantages, coefficients
from benchmarks.frontier.figure import draw
from benchmarks.frontier.gradients import Sketch, beginnings, factors, weighted_sum, whole_sums
from benchmarks.frontier.tables import decide, report
from benchmarks.frontier.walk import Walker, reward, sample, walks, winding
from benchmarks.lab.jobs import Experiment, run_all
from benchmarks.lab.sorting import COUNT, Answers, prompts, token_logps

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(
    longest=32, cheap=16, groups=2, group_size=2, turn=8, lag=1, warm_steps=2,
    settle_steps=1, numbers=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Walker:
    torch.manual_seed(0)
    return Walker(40)


@pytest.fixture(scope="module")
def said(model: Walker) -> Answers:
    chance = torch.Generator().manual_seed(1)
    return sample(model, prompts(6, chance), 20, torch.rand(6, 20, generator=chance))


def coefficients_of(name: str, logps: Tensor, sampling: Tensor, rewards: Tensor) -> Tensor:
    return coefficients(FAMILIES[name].objective, logps, sampling, rewards, group_size=2, turn=2)


# ------------------------------------------------------------------------------------------------------- the task


def test_sampled_log_probs_are_those_of_the_whole_forward_pass(model: Walker, said: Answers) -> None:
    assert said.ids.shape == (6, COUNT + 1 + 20) and said.mask.all()
    torch.testing.assert_close(said.logps, token_logps(model, said.ids).detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.logits(said.ids), model(said.ids), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model.logits(said.ids, shift=3), model(said.ids), atol=1e-2)


def test_a_shorter_answer_is_the_beginning_of_a_longer_one(model: Walker, said: Answers) -> None:
    chance = torch.Generator().manual_seed(1)
    questions, uniforms = prompts(6, chance), torch.rand(6, 20, generator=chance)
    short = sample(model, questions, 7, uniforms)
    assert torch.equal(short.ids, beginning(said, 7).ids)
    with pytest.raises(ValueError, match="length must be at most 40"):
        sample(model, questions, 41, uniforms)


def test_tokens_come_with_their_probabilities(model: Walker) -> None:
    chance = torch.Generator().manual_seed(2)
    question = prompts(1, chance)
    drawn = sample(model, question.repeat(4000, 1), 1, torch.rand(4000, 1, generator=chance)).ids[:, -1]
    expected = model(question)[0, -1].softmax(-1).detach()
    found = torch.bincount(drawn, minlength=len(expected)) / 4000
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


def test_walks_wind_and_are_rewarded() -> None:
    chance = torch.Generator().manual_seed(0)
    questions = prompts(400, chance)
    ids = torch.cat([questions, walks(questions, 50, chance)], dim=1)
    answers = Answers(ids, torch.ones(400, 50, dtype=torch.bool), torch.zeros(400, 50))
    wound = winding(answers).float()
    assert abs(float(wound.mean())) < 3 and 10 < float(wound.std()) < 30
    assert 0.45 < float(reward(answers, float(wound.median())).mean()) < 0.55
    up = torch.arange(3, 23).remainder(16).unsqueeze(0)
    straight = Answers(torch.cat([torch.full((1, 10), 2), torch.tensor([[17]]), up], 1), up > -1, up.float())
    assert float(winding(straight)) == 20
    assert reward(straight, 20.0).tolist() == [0.5] and reward(straight, 19.0).tolist() == [1.0]


# ---------------------------------------------------------------------------------------------------- the gradients


def test_factors_give_the_gradient_of_autograd(model: Walker, said: Answers) -> None:
    scale = torch.randn(6, 20, generator=torch.Generator().manual_seed(3))
    parts = factors(model, said.ids)
    model.zero_grad()
    (token_logps(model, said.ids) * scale).sum().backward()
    block = model.blocks[-1]

    def both(layer: torch.nn.Linear, rows: int | None = None) -> Tensor:
        assert layer.weight.grad is not None and layer.bias.grad is not None
        return torch.cat([layer.weight.grad[:rows], layer.bias.grad[:rows, None]], dim=1).flatten()

    norms = [norm.get_parameter(name).grad for norm in (block.norms[1], model.norm) for name in ("weight", "bias")]
    expected = torch.cat(
        [
            model.head.weight.grad.flatten(),
            both(block.down),
            both(block.up),
            both(block.out),
            both(block.qkv, 64),
            *norms,
        ]
    )
    torch.testing.assert_close(weighted_sum(parts, scale), expected, atol=1e-4, rtol=1e-4)
    assert len(expected) == parts.size == 42_880
    torch.testing.assert_close(parts.logps, token_logps(model, said.ids).detach(), atol=1e-5, rtol=1e-5)
    short = weighted_sum(beginnings(parts, 7), scale[:, :7])
    torch.testing.assert_close(
        short, weighted_sum(factors(model, said.ids[:, :-13]), scale[:, :7]), atol=1e-4, rtol=1e-4
    )


def test_all_parameters_contain_the_last_ones(model: Walker, said: Answers) -> None:
    scales = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(3))
    whole = whole_sums(model, said.ids, scales, 4)
    assert whole.shape == (2, sum(one.numel() for one in model.parameters()))
    head = model.head.weight.numel()
    for found, scale in zip(whole, scales, strict=True):
        torch.testing.assert_close(
            found[-head:], weighted_sum(factors(model, said.ids), scale)[:head], atol=1e-4, rtol=1e-4
        )
    with pytest.raises(ValueError, match="parameters must be 'last' or 'all'"):
        replace(TINY, parameters="head")


def test_the_sketch_is_linear_and_keeps_lengths() -> None:
    chance = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 5000, generator=chance)
    project = Sketch(1024)
    first, second = project(vectors)
    torch.testing.assert_close(project(vectors.sum(0, keepdim=True))[0], first + second, atol=1e-3, rtol=1e-3)
    assert float(first @ first / (vectors[0] @ vectors[0])) == pytest.approx(1, abs=0.15)
    assert abs(float(first @ second)) < 0.1 * float(first @ first)


# ------------------------------------------------------------------------------------------------------ the families


@pytest.mark.parametrize("name", list(FAMILIES))
def test_on_policy_every_family_is_the_oracle(name: str) -> None:
    chance = torch.Generator().manual_seed(0)
    logps, rewards = -torch.rand(4, 6, generator=chance), torch.tensor([1.0, 0.0, 0.0, 1.0])
    oracle = coefficients(ON_POLICY, logps, logps, rewards, group_size=2, turn=2)
    torch.testing.assert_close(oracle, (advantages(rewards, 2) / 4).unsqueeze(1).expand(4, 6))
    torch.testing.assert_close(coefficients_of(name, logps, logps, rewards), oracle, atol=1e-6, rtol=1e-5)


def test_families_weigh_as_their_names_say() -> None:
    ratio = torch.tensor([[1.5, 2.0, 0.5, 4.0], [0.9, 1.0, 1.2, 0.8]])
    logps, rewards = -torch.ones(2, 4), torch.tensor([1.0, 0.0])
    sign = torch.tensor([[1.0], [-1.0]]) / 2
    whole = ratio.prod(1, keepdim=True)
    expected = {
        "none": torch.ones(2, 4),
        "token IS": ratio,
        "token TIS 2": ratio.clamp(max=2),
        "turn IS": torch.tensor([[3.0, 3.0, 2.0, 2.0], [0.9, 0.9, 0.96, 0.96]]),
        "prefix IS": ratio.cumprod(1),
        "geometric mean IS": whole**0.25,
        "GMPO": None,
        "sequence IS": whole,
        "sequence IS, self-normalised": whole / whole.mean(),
        "sequence TIS 5": whole.clamp(max=5),
        "sequence MIS 2": torch.where(whole <= 2, whole, 0.0),
        "product mask": torch.where((whole >= 0.5) & (whole <= 2), 1.0, 0.0),
    }
    for name, weight in expected.items():
        found = coefficients_of(name, logps, logps - ratio.log(), rewards)
        if weight is not None:
            torch.testing.assert_close(found, (sign * weight).expand(2, 4), msg=name, atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- the estimates


def test_pairs_of_different_batches_only() -> None:
    products = torch.arange(9.0).view(3, 3).double()
    counts = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0]]).double()
    slow = []
    for row in counts.tolist():
        pairs = [(row[i] * row[j], products[i, j]) for i in range(3) for j in range(3) if i != j]
        slow.append(float(sum(w * p for w, p in pairs) / sum(w for w, _ in pairs)))
    torch.testing.assert_close(estimates.off_diagonal(products, counts), torch.tensor(slow).double())


def test_bias_and_variance_are_unbiased_under_noise_in_both() -> None:
    chance = torch.Generator().manual_seed(0)
    true, bias = torch.zeros(30), torch.zeros(30)
    true[0], bias[1] = 1.0, 0.5
    found = []
    for _ in range(800):  # noise with a variance of 30 x 0.25, far above the squared bias of 0.25
        common = 0.3 * torch.randn(8, 30, generator=chance)
        oracle = true + common + 0.4 * torch.randn(8, 30, generator=chance)
        wrong = true + bias + common + 0.4 * torch.randn(8, 30, generator=chance)
        found.append(estimates.moments(wrong, oracle, torch.ones(1, 8)))
    means = {name: float(torch.stack([getattr(one, name) for one in found]).mean()) for name in found[0]._fields}
    assert means["bias_sq"] == pytest.approx(0.25, abs=0.05)
    assert means["oracle_sq"] == pytest.approx(1.0, abs=0.06)
    assert means["mean_sq"] == pytest.approx(1.25, abs=0.06)
    assert means["inner"] == pytest.approx(1.0, abs=0.06)
    assert means["variance"] == pytest.approx(7.5, rel=0.03)


def test_progress_and_its_best_scale() -> None:
    true, mean, variance = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.5]), 3.0

    def by_hand(scale: float, batches: int) -> float:
        m = scale * mean
        return float((true @ m) ** 2 / (scale**2 * variance / batches + (m - true).square().sum()))

    found = estimates.Moments(
        *(
            torch.tensor([float(v)])
            for v in (mean @ mean, true @ mean, true @ true, (mean - true).square().sum(), variance)
        )
    )
    assert float(estimates.progress(found, 4)) == pytest.approx(by_hand(1.0, 4))
    best = max(by_hand(0.01 * k, 4) for k in range(1, 2000))
    assert float(estimates.scaled_progress(found, 4)) == pytest.approx(best, rel=1e-3)
    assert float(estimates.progress(found._replace(inner=torch.tensor([-1.0])))) == 0


def test_a_kind_is_judged_by_the_family_that_the_other_seeds_chose() -> None:
    chance = torch.Generator().manual_seed(0)
    true = torch.zeros(20)
    true[0] = 5.0
    names = list(FAMILIES)

    def world(lucky: str) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6, len(names), 20, generator=chance)
        noise[:, names.index(lucky)] *= 0.1  # little variance: the best of its kind here
        return true + noise, true + 0.1 * torch.randn(6, 20, generator=chance)

    table = results.Table({0: world("turn IS"), 1: world("CTPO")})
    assert table.best("intermediate", "P", 8, without=1) == "turn IS"
    assert table.best("intermediate", "P", 8, without=0) == "CTPO"
    honest = estimates.progress(table.pooled({0: "CTPO", 1: "turn IS"}), 8)
    torch.testing.assert_close(table.held_out("intermediate", "P", 8), honest)
    assert float(honest[0]) < float(estimates.progress(table.pooled({0: "turn IS", 1: "CTPO"}), 8)[0])


@pytest.mark.parametrize(
    ("token", "sequence", "expected"),
    [((1.1, 1.4), (2.0, 3.0), "holds"), ((0.6, 0.9), (2.0, 3.0), "fails"), ((0.9, 1.4), (2.0, 3.0), "open")],
)
def test_the_decision(token: tuple[float, float], sequence: tuple[float, float], expected: str) -> None:
    line = {"over token low": token[0], "over token high": token[1]}
    assert decide(line | {"over sequence low": sequence[0], "over sequence high": sequence[1]}) == expected


# ------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.integration
def test_a_tiny_sweep_is_resumed_and_reported(tmp_path: Path) -> None:
    jobs = plan(TINY, (0,), long=2, cheap=1)
    assert [job.length for job in jobs] == [32, 32, 16]
    outcomes = run_all(jobs, TINY, tmp_path, 1, Experiment(prepare, run))
    written = tmp_path / "gradients" / f"{jobs[0].name}.pt"
    before = written.stat().st_mtime_ns
    assert run(jobs[0], TINY, tmp_path)["measured"] == outcomes[0]["measured"] and written.stat().st_mtime_ns == before
    rows = results.lines(outcomes, tmp_path, TINY)
    results.write(tmp_path / "results.jsonl", {"line": "run"}, rows)
    frame = pd.read_json(tmp_path / "results.jsonl", lines=True)
    families = frame[frame.line == "family"]
    assert set(families.length) == {16} and set(families.batches) == {3}  # two batches of length 32 are too few
    assert set(families.sampler) == {"int4", "lag"}
    lines = results.read(tmp_path / "results.jsonl")
    ElementTree.fromstring(draw(lines))
    assert "| sequence IS |" in report(lines) and "Conjecture at T >= 200" in report(lines)


def test_the_lag_moves_the_policy_towards_the_reward(tmp_path: Path) -> None:
    start = prepare(replace(TINY, lag=6, lag_rate=1e-2, lag_length=16), 0, tmp_path)
    chance = torch.Generator().manual_seed(5)
    questions, uniforms = prompts(512, chance), torch.rand(512, 16, generator=chance)
    now, then = (winding(sample(one, questions, 16, uniforms)).float().mean() for one in (start.policy, start.behind))
    assert float(now) > float(then) + 0.2
    assert Job(0, 3, 16).name == "0-003-16"


@pytest.mark.slow
def test_the_short_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/frontier/run.py", "--short", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Conjecture at T >= 200" in done.stdout and (tmp_path / "frontier.svg").exists()
    frame = pd.read_json(tmp_path / "results.jsonl", lines=True)
    sequence = frame[(frame.line == "family") & (frame.family == "sequence IS") & (frame.sampler == "int4")]
    variance = sequence.set_index("length").variance
    token = frame[(frame.line == "family") & (frame.family == "token IS") & (frame.sampler == "int4")]
    assert variance[256] > 2 * token.set_index("length").variance[256]  # what grows with length
