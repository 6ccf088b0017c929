"""The small AReaL ablation: schedule, objectives against their formulas, summary, then its entry point."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from processes import run_command
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lab.loop import learn, rounded
from benchmarks.lab.sorting import Sorter, prompts, token_logps
from recipes.async_lag import experiment, run, tables
from recipes.async_lag.experiment import Job, Settings, stale_rollouts
from recipes.async_lag.lag import LAGS, VARIANTS, History, StaleBatch, objective_of, sampling_version

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(
    warm_up_steps=2, generations=4, groups=2, group_size=4, minibatches=2, log_every=2, questions=8, answers=1
)


@pytest.fixture(scope="module")
def model() -> Sorter:
    torch.manual_seed(0)
    return Sorter()


def test_bounded_lags_fill_up_and_unbounded_ones_grow() -> None:
    lags = [[step - 1 - sampling_version(step, lag, speed=2.0) for step in range(1, 13)] for lag in (0, 4, None)]
    assert lags[0] == [0] * 12
    assert lags[1] == [0, 1, 2, 3] + [4] * 8
    assert lags[2] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]  # half of the steps made
    assert 59 - sampling_version(60, None, speed=4.0) == 59 - 14


def test_history_samples_from_the_weights_of_then() -> None:
    torch.manual_seed(1)
    student = Sorter()
    history, kept = History(student), {0: student.head.weight.detach().clone()}
    for version in (1, 2, 3):
        with torch.no_grad():
            student.head.weight += version
        history.add(version, student)
        kept[version] = student.head.weight.detach().clone()
    for version in (1, 3):
        assert torch.equal(history.sampler(version).head.weight, kept[version])
    with pytest.raises(KeyError):
        history.sampler(2)  # forgotten


def written_out(variant: str, now: Tensor, proximal: Tensor, mu: Tensor, a: Tensor, age: int) -> Tensor:
    """The (B, T) loss as published, without the kit."""

    def clipped(ratio: Tensor) -> Tensor:
        return torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)

    if variant == "naive":
        return -clipped((now - mu).exp())
    if variant == "a3po":
        proximal = (mu + (age - 1) / age * (now - mu)).detach()
    weight = torch.ones_like(mu) if variant == "recomputed" else (proximal - mu).exp().clamp(max=2.0)
    return -weight * clipped((now - proximal).exp())


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_objectives_are_the_published_ones(variant: str, model: Sorter) -> None:
    """Stale rollouts of a perturbed model, one optimizer step later, value and gradient."""
    torch.manual_seed(2)
    sampler, learner = rounded(model, None), rounded(model, None).requires_grad_(True)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    asked = prompts(3, torch.Generator().manual_seed(0)).repeat_interleave(4, 0)
    rollouts = stale_rollouts(sampler, learner, asked, 4, torch.Generator().manual_seed(1))
    rollouts = type(rollouts)(**{**rollouts.__dict__, "advantages": torch.linspace(-1, 1, 12)})
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    batch = StaleBatch(2, 5, proximal=variant != "a3po")(learner, rollouts, torch.arange(12))
    result = objective_of(variant)(batch)
    result.loss.backward()
    mine = learner.head.weight.grad.clone()
    learner.zero_grad()
    now, mask = token_logps(learner, rollouts.answers.ids), rollouts.answers.mask
    loss = written_out(variant, now, rollouts.old, rollouts.answers.logps, rollouts.advantages.unsqueeze(1), 3)
    expected = torch.where(mask, loss, 0.0).sum() / mask.sum()
    expected.backward()
    torch.testing.assert_close(result.loss.detach(), expected.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mine, learner.head.weight.grad, atol=1e-5, rtol=1e-4)
    assert (rollouts.old - rollouts.answers.logps)[mask].abs().mean() > 0.05  # the weights do something


@pytest.mark.integration
def test_fresh_rollouts_are_no_matter_of_the_objective(model: Sorter) -> None:
    """At lag 0 all of them make the same steps, up to rounding."""
    ends = []
    for variant in VARIANTS:
        torch.manual_seed(0)
        student = rounded(model, None).requires_grad_(True)
        asked = prompts(4, torch.Generator().manual_seed(0)).repeat_interleave(4, 0)
        rollouts = stale_rollouts(student, student, asked, 4, torch.Generator().manual_seed(1))
        rollouts = type(rollouts)(**{**rollouts.__dict__, "advantages": torch.linspace(-1, 1, 16)})
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        batch_of = StaleBatch(3, 3, proximal=variant != "a3po")
        learn(student, optimizer, objective_of(variant), rollouts, 2, torch.Generator().manual_seed(2), batch_of)
        ends.append(student.head.weight.detach())
    assert not torch.allclose(ends[0], model.head.weight, atol=1e-4)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-5, rtol=0)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"variant must be one of .*'naive'.*, but got 'naif'"):
        objective_of("naif")
    with pytest.raises(ValueError, match="lag must be at least 0, but got -1"):
        run.lag_of("-1")
    assert run.lag_of("unbounded") is None and run.lag_of("12") == 12


@pytest.mark.integration
def test_what_a_run_logs_is_its_lag(tmp_path: Path) -> None:
    found = experiment.run(Job("decoupled", 1, 0), TINY, tmp_path)
    assert [row["lag"] for row in found["curve"]] == [0.5, 1.0]  # lags 0, 1 then 1, 1
    assert found["curve"][0]["ess_sequence"] > found["curve"][1]["ess_sequence"]
    assert [row["generation"] for row in found["curve"]] == [2, 4] and found["curve"][1]["truncated_fraction"] >= 0.0
    fresh = experiment.run(Job("naive", 0, 0), TINY, tmp_path)
    assert [row["ess_token"] for row in fresh["curve"]] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert found["start"] == fresh["start"]


def outcome(variant: str, lag: int | None, seed: int, accuracy: float) -> dict[str, Any]:
    keys = ("lag", "ess_token", "ess_sequence", "clip_fraction", "truncated_fraction", "learner_accuracy")
    rows = [{"generation": g, **dict.fromkeys(keys, 0.25 * g)} for g in (1, 2)]
    end = {"accuracy": accuracy, "reward": accuracy, "greedy_accuracy": accuracy, "entropy": 0.1}
    return {"variant": variant, "lag": lag, "seed": seed, "curve": rows, "start": {"accuracy": 0.2}, "end": end}


MADE_UP = [
    outcome(variant, lag, seed, accuracy + seed / 10)
    for seed in (0, 1)
    for variant, lag, accuracy in (("naive", 0, 0.5), ("naive", 8, 0.2), ("decoupled", 8, 0.4), ("naive", None, 0.1))
]


def test_summary_pairs_by_seed() -> None:
    rows = {(row["variant"], row["lag_bound"]): row for row in tables.summarise(MADE_UP)}
    assert list(rows) == [("naive", 0), ("naive", 8), ("decoupled", 8), ("naive", None)]
    best = rows["decoupled", 8]
    assert best["to_naive"].mean == pytest.approx(0.2) and best["to_naive"].half == pytest.approx(0.0, abs=1e-12)
    assert best["to_sync"].mean == pytest.approx(-0.1) and rows["naive", 0]["to_sync"] is None
    text = tables.table(list(rows.values()))
    assert "| 8 | decoupled PPO | 2 | 0.450 ± 0.635 | -0.100 ± 0.000 | +0.200 ± 0.000 |" in text
    assert "| unbounded | naive PPO | 2 |" in text


@pytest.mark.integration
def test_figure_shows_every_variant() -> None:
    svg = run.draw(MADE_UP)
    ElementTree.fromstring(svg)
    assert "lag unbounded" in run.draw([one for one in MADE_UP if one["lag"] is None])
    for name in ("naive PPO", "decoupled PPO", "unbounded", "lag 8", "prefers-color-scheme"):
        assert name in svg
    assert "A-3PO" not in svg


def test_plan_and_options() -> None:
    whole, short = run.parse([]), run.parse(["--short", "--generations", "7"])
    jobs = run.plan(whole.variants, whole.lags, whole.seeds)
    assert len(jobs) == len({job.name for job in jobs}) == 3 * (2 * len(LAGS) + 2 * 2)
    assert {job.lag for job in jobs if job.variant == "a3po"} == {4, 8}
    assert (short.settings.generations, short.lags, short.seeds) == (7, [0, 8], [0])
    assert len(run.plan(["a3po"], [0, 1], [0])) == 2  # what is asked for is run


@pytest.mark.integration
def test_entry_point_writes_the_table_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = [f"--{name}={value}" for name, value in TINY.__dict__.items()]
    options = ["--out", str(tmp_path / "out"), "--seeds", "0", "--lags", "1", "unbounded", *tiny]
    options += ["--variants", "decoupled"]
    command = [sys.executable, "recipes/async_lag/run.py", *options]
    done = run_command(command, seconds=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 runs (0 from before)" in done.stdout and "| unbounded | decoupled PPO | 1 |" in done.stdout
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["lag_bound"] for row in result["rows"]] == [1, None] and result["cost"]["cpu_seconds"] > 0
    ElementTree.parse(tmp_path / "out" / "figure.svg")

    def never(*_: Any) -> None:
        raise RuntimeError("trained again")

    monkeypatch.setattr(experiment, "train", never)
    assert run.main(options) == 0
    out = capsys.readouterr().out
    assert "2 runs (2 from before)" in out and (tmp_path / "out" / "table.md").read_text() in out
