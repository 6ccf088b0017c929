"""The small experiment with quantised rollouts: its pieces against known answers, then its entry point."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from processes import run_command
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import trl_offpolicy as op
from benchmarks.lab import intervals, measure
from benchmarks.lab.loop import Rollouts, group_advantages, learn, policy_batch, rounded
from benchmarks.lab.sorting import (
    COUNT,
    END,
    VOCABULARY,
    Answers,
    Sorter,
    prompts,
    reward,
    sample,
    solutions,
    token_logps,
)
from recipes.quantised_rollouts import experiment, run, tables
from recipes.quantised_rollouts.experiment import VARIANTS, Job, Settings, objective_of

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(warm_up_steps=2, generations=2, groups=2, group_size=4, log_every=1, questions=8, answers=2)


class Perfect(nn.Module):
    """Sorts without a mistake; ``confidence`` is the logit of the right token, the others have 0."""

    def __init__(self, confidence: float = 50.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.confidence = confidence

    def forward(self, ids: Tensor, cache: list[list[Tensor]]) -> Tensor:
        if ids.shape[1] == COUNT + 1:
            self.right, self.said = solutions(ids), 0
        else:
            self.said += 1
        here = self.right[:, min(self.said, COUNT)]
        return self.confidence * nn.functional.one_hot(here, VOCABULARY).float().unsqueeze(1)


def rollouts_of(model: Sorter, bits: int | None, *, groups: int = 4, group_size: int = 4) -> Rollouts:
    settings = Settings(groups=groups, group_size=group_size)
    chance = torch.Generator().manual_seed(0)
    return experiment.generation(model, settings, bits, prompts(groups, chance), chance)


@pytest.fixture(scope="module")
def model() -> Sorter:
    torch.manual_seed(0)
    return Sorter()


def test_a_perfect_model_scores_one() -> None:
    found = measure.evaluate(Perfect(), TINY, answers=2)
    assert found == {"accuracy": 1.0, "greedy_accuracy": 1.0, "reward": 1.0, "entropy": pytest.approx(0.0, abs=1e-6)}
    assert "greedy_accuracy" not in measure.evaluate(Perfect(), TINY, answers=1, greedy=False)


def test_greedy_takes_the_likeliest_token_and_sampling_does_not() -> None:
    """With logit log(18) the right one of 19 tokens has probability 1/2: greedy is perfect, 11 draws are hardly."""
    found = measure.evaluate(Perfect(math.log(VOCABULARY - 1)), Settings(questions=64), answers=4)
    assert found["greedy_accuracy"] == 1.0 and found["accuracy"] < 0.02
    entropy = 0.5 * math.log(2) + 0.5 * math.log(2 * (VOCABULARY - 1))
    assert found["entropy"] == pytest.approx(entropy, abs=0.1)  # nats


def test_reward_of_known_answers() -> None:
    question = prompts(1, torch.Generator().manual_seed(0))
    right = solutions(question)
    wrong = right.clone()
    wrong[0, 0] = (wrong[0, 0] + 1) % 16
    endless = torch.where(right == END, 0, right)
    ids = torch.cat([question.repeat(3, 1), torch.cat([right, wrong, endless])], dim=1)
    got = reward(Answers(ids, torch.ones(3, COUNT + 1).bool(), torch.zeros(3, COUNT + 1)))
    torch.testing.assert_close(got, torch.tensor([1.0, 0.5 * COUNT / (COUNT + 1), 0.0]))


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_every_linear_weight_of_the_sampler_has_few_levels(model: Sorter, bits: int) -> None:
    for name, module in rounded(model, bits).named_modules():
        if isinstance(module, nn.Linear):
            assert max(len(row.unique()) for row in module.weight) <= 2**bits - 1, name
    before = dict(model.named_parameters())
    copy = dict(rounded(model, bits).named_parameters())
    assert not torch.equal(copy["head.weight"], before["head.weight"])
    assert torch.equal(copy["tokens.weight"], before["tokens.weight"])
    assert all(torch.equal(p, before[name]) for name, p in rounded(model, None).named_parameters())


def test_mu_is_the_samplers_and_old_the_learners(model: Sorter) -> None:
    got = rollouts_of(model, 3)
    with torch.no_grad():
        by_sampler, by_learner = token_logps(rounded(model, 3), got.answers.ids), token_logps(model, got.answers.ids)
    mask = got.answers.mask
    torch.testing.assert_close(got.answers.logps[mask], by_sampler[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(got.old[mask], by_learner[mask], atol=1e-5, rtol=0)
    assert (got.old - got.answers.logps)[mask].abs().mean() > 1e-3


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def published(variant: str, now: Tensor, old: Tensor, mu: Tensor, advantages: Tensor, band: Any) -> Tensor:
    """The (B, T) loss as the source writes it (full mask), without the kit."""
    ratio, mismatch, a = (now - old).exp(), (old - mu).exp(), advantages.unsqueeze(1)
    geometric = (old - mu).mean(1, keepdim=True).exp()
    weight = {
        "none": torch.ones_like(mismatch),
        "tis": mismatch.clamp(max=2.0),
        "mis": mismatch * ((mismatch >= 0.5) & (mismatch <= 2.0)),
        "vanilla_is": mismatch,
        "geometric": ((geometric >= band[0]) & (geometric <= band[1])).expand_as(mismatch).float(),
    }
    return -surrogate((now - mu).exp(), a) if variant == "ppo_is" else -weight[variant] * surrogate(ratio, a)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_objectives_are_the_published_ones(variant: str) -> None:
    chance, band = torch.Generator().manual_seed(3), (0.8, 1.25)
    old = -2 * torch.rand(32, 5, generator=chance)
    mu = old + 0.5 * torch.randn(32, 5, generator=chance)
    now = old + 0.3 * torch.randn(32, 5, generator=chance)
    advantages = torch.randn(32, generator=chance)
    mine, theirs = now.clone().requires_grad_(), now.clone().requires_grad_()
    batch = op.PolicyBatch(
        per_token_logps=mine,
        old_per_token_logps=old,
        sampling_per_token_logps=mu,
        completion_mask=torch.ones(32, 5).bool(),
        advantages=advantages,
    )
    loss = objective_of(variant, band)(batch).loss
    loss.backward()
    expected = published(variant, theirs, old, mu, advantages, band).mean()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_variants_that_do_not_exist_or_lack_their_band_are_refused() -> None:
    with pytest.raises(ValueError, match=r"variant must be one of .*'none'.*, but got 'tiss'"):
        objective_of("tiss")
    with pytest.raises(ValueError, match="band must be given with the variant 'geometric'"):
        objective_of("geometric")


@pytest.mark.integration
def test_the_band_drops_what_it_is_calibrated_to(model: Sorter) -> None:
    settings = Settings(questions=200, answers=2, mask_drops=0.1)
    band = experiment.calibrated_band(model, settings, 3, seed=5)
    questions = prompts(200, torch.Generator().manual_seed(5)).repeat_interleave(2, 0)
    answers = sample(rounded(model, 3), questions, torch.Generator().manual_seed(5))
    with torch.no_grad():
        ratios = [
            (token_logps(model, answers.ids)[row][keep] - answers.logps[row][keep]).mean().exp().item()
            for row, keep in enumerate(answers.mask)
        ]
    assert band == pytest.approx(tuple(np.quantile(ratios, [0.05, 0.95])), rel=1e-4)
    again = rollouts_of(model, 3, groups=100)  # other prompts of the same model
    with torch.no_grad():
        result = objective_of("geometric", band)(policy_batch(model, again, torch.arange(400)))
    assert 0.05 < float(result.stats["keep/dropped_sequence_fraction"]) < 0.16


def test_raw_ess_of_known_ratios() -> None:
    """Ratios pi_old / mu of 2 once and 1 otherwise: (sum)^2 / (n sum of squares), of tokens and of products."""
    logps = torch.full((3, 3), -1.0)
    log_ratio = torch.tensor([[2.0, 1.0, 9.0], [1.0, 1.0, 9.0], [1.0, 1.0, 9.0]]).log()
    mask = torch.tensor([[True, True, False]] * 3)
    answers = Answers(torch.zeros(3, 14).long(), mask, logps)
    token, sequence = measure.raw_ess(Rollouts(answers, logps + log_ratio, torch.zeros(3), torch.zeros(3), 3))
    assert token == pytest.approx(7**2 / (6 * 9)) and sequence == pytest.approx(4**2 / (3 * 6))


def test_k1_is_old_minus_now() -> None:
    """The source's direction: positive where the learner has made the sampled tokens less likely."""
    logps = torch.full((2, 3), -1.0)
    batch = op.PolicyBatch(
        per_token_logps=(logps - 0.25).requires_grad_(),
        old_per_token_logps=logps,
        sampling_per_token_logps=logps + 0.5,
        completion_mask=torch.ones(2, 3).bool(),
        advantages=torch.ones(2),
    )
    row = experiment.Window(objective_of("none")(batch).stats, [0.5, 1.0], [1.0], [1.0]).row()
    assert row["staleness_k1"] == pytest.approx(0.25) and row["mismatch_k1"] == pytest.approx(0.5)
    assert row["sampler_reward"] == 0.75


def test_learning_raises_the_reward_of_what_was_rewarded(model: Sorter) -> None:
    """One pass makes the better answers of a group likelier, and the worse ones less likely."""
    student = rounded(model, None).requires_grad_(True)
    got = rollouts_of(student, None, groups=2)
    advantages = group_advantages(torch.arange(8.0), 4)
    taught = Rollouts(got.answers, got.old, torch.arange(8.0), advantages, 4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    learn(student, optimizer, objective_of("none"), taught, 1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        change = torch.where(got.answers.mask, token_logps(student, got.answers.ids) - got.old, 0.0).sum(1)
    above = torch.tensor([-1.5, -0.5, 0.5, 1.5] * 2)  # reward over the mean of its group
    assert float((change * above).sum()) > 0


@pytest.mark.integration
def test_warm_start_ends_at_its_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is enough for a target of 0: ten steps. A target out of reach takes all steps. Made once."""
    made: list[int] = []
    original = measure.warm_start

    def counted(model: nn.Module, *, enough: Callable[[], bool], **options: Any) -> None:
        original(model, enough=lambda: bool(made.append(1)) or enough(), **options)

    monkeypatch.setattr(measure, "warm_start", counted)
    for target, asked in ((0.0, 1), (1.1, 2)):
        made.clear()
        settings = Settings(warm_up_steps=20, start_accuracy=target)
        first = measure.warm_model(settings, 0, tmp_path)
        again = measure.warm_model(settings, 0, tmp_path)
        assert len(made) == asked
        assert torch.equal(first.head.weight, again.head.weight)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.integration
def test_runs_of_a_seed_share_start_and_prompts_and_repeat_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    original = experiment.prompts

    def recorded(count: int, generator: torch.Generator) -> Tensor:
        got = original(count, generator)
        if count == TINY.groups:
            seen.append(got.flatten().tolist())
        return got

    monkeypatch.setattr(experiment, "prompts", recorded)
    first = experiment.run(Job("none", 3, 1), TINY, tmp_path / "a")
    second = experiment.run(Job("tis", 3, 1), TINY, tmp_path / "a")
    again = experiment.run(Job("none", 3, 1), TINY, tmp_path / "b")
    other = experiment.run(Job("none", 3, 2), TINY, tmp_path / "a")
    assert seen[:2] == seen[2:4] != seen[6:8]
    assert first["start"] == second["start"] != other["start"]
    assert first["curve"] == again["curve"] and first["end"] == again["end"]


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("geometric", 4, 0)
    done = experiment.run(job, TINY, tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["geometric-int4-0.json"]

    def never(*_: Any) -> None:
        raise RuntimeError("trained again")

    monkeypatch.setattr(experiment, "train", never)
    again = experiment.run(job, TINY, tmp_path)
    assert again == json.loads(json.dumps(done))
    with pytest.raises(RuntimeError, match="trained again"):
        experiment.run(job, Settings(**{**TINY.__dict__, "learning_rate": 2e-4}), tmp_path)


def test_interval_of_known_numbers() -> None:
    found = intervals.interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.half == pytest.approx(4.303 / math.sqrt(3))
    assert intervals.interval([5.0]).text(1) == "5.0"
    assert intervals.interval([1.0, 2.0, 3.0]).text(1, sign=True) == "+2.0 ± 2.5"


@pytest.mark.parametrize(
    ("y", "tau"), [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([1, 2, 4, 3], 4 / 6), ([1, 1, 1, 1], 0.0)]
)
def test_kendall_of_known_rankings(y: list[float], tau: float) -> None:
    assert intervals.kendall_tau([0.1, 0.2, 0.3, 0.4], y) == pytest.approx(tau)


def outcome(variant: str, bits: int | None, seed: int, *, logged: float, true: float) -> dict[str, Any]:
    keys = ("staleness_k1", "mismatch_k3", "ess_token", "ess_sequence", "learner_reward")
    rows = [
        {"generation": g, "sampler_reward": logged, **dict.fromkeys(keys, sign * 0.5)} for g, sign in ((1, -1), (2, 1))
    ]
    end = {"reward": true, "accuracy": true, "greedy_accuracy": true, "entropy": 0.1}
    return {"variant": variant, "bits": bits, "seed": seed, "curve": rows, "start": {"accuracy": 0.4}, "end": end}


@pytest.fixture
def made_up() -> list[dict[str, Any]]:
    """No fix logs .6 and learns .5, TIS logs .5 and learns .7, PPO-IS has collapsed; seeds shift all of them."""
    return [
        outcome(variant, bits, seed, logged=logged + seed / 10, true=true + seed / 10)
        for seed in (0, 1)
        for variant, bits, logged, true in (
            ("none", None, 0.8, 0.8), ("none", 4, 0.6, 0.5), ("tis", 4, 0.5, 0.7), ("ppo_is", 4, 0.0, 0.0)
        )
    ]  # fmt: skip


def test_summary_pairs_by_seed(made_up: list[dict[str, Any]]) -> None:
    rows = {(row["variant"], row["bits"]): row for row in tables.summarise(made_up)}
    assert list(rows) == [("none", None), ("none", 4), ("tis", 4), ("ppo_is", 4)]
    gain = rows["tis", 4]["gain"]
    assert gain.mean == pytest.approx(0.2) and gain.half == pytest.approx(0.0, abs=1e-12)  # the seeds' shift is gone
    assert rows["none", 4]["gain"] is None and rows["none", None]["to_float"] is None
    assert rows["none", 4]["to_float"].mean == pytest.approx(-0.3)
    assert rows["tis", 4]["negative_k1"].mean == 0.5 and rows["tis", 4]["accuracy"].half > 0.6
    text = tables.table(list(rows.values()))
    assert "| INT4 | token TIS, cap 2 | 2 | 0.550 ± 0.635 | 0.750 ± 0.635 |" in text and "+0.200 ± 0.000" in text


def test_paradox_is_a_rank_correlation_of_log_and_truth(made_up: list[dict[str, Any]]) -> None:
    every = tables.reward_paradox(made_up, 4, with_collapsed=True)
    left = tables.reward_paradox(made_up, 4, with_collapsed=False)
    assert every is not None and left is not None
    assert every.mean == pytest.approx(1 / 3)  # PPO-IS is last in both
    assert left.mean == -1.0
    assert "INT4: tau +0.33 ± 0.00 over all corrections, -1.00 ± 0.00 without" in tables.paradox_text(made_up, [4])
    assert tables.paradox_text(made_up, [8]) == ""


def test_figure_shows_every_variant(made_up: list[dict[str, Any]]) -> None:
    svg = run.draw(made_up)
    ElementTree.fromstring(svg)
    for name in ("float rollouts", "no fix, INT4", "token TIS", "PPO-IS", "prefers-color-scheme"):
        assert name in svg


def test_plan_and_options() -> None:
    whole, short = run.parse([]), run.parse(["--short", "--generations", "7"])
    assert len(run.plan(whole.variants, whole.bits, whole.seeds)) == 5 * (1 + 3 * len(VARIANTS))
    assert (short.settings.generations, short.bits, short.seeds) == (7, [3], [0, 1])
    assert len({job.name for job in run.plan(whole.variants, whole.bits, whole.seeds)}) == 95
    assert len(whole.seeds) >= 5


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    tiny = [f"--{name}={value}" for name, value in TINY.__dict__.items()]
    return ["--out", str(tmp_path / "out"), "--bits", "4", "--seeds", "0", "--jobs", "1", *tiny]


@pytest.mark.integration
def test_entry_point_writes_the_table_and_resumes(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "recipes/quantised_rollouts/run.py", *options, "--variants", "none", "tis"]
    done = run_command(command, seconds=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 runs (0 from before)" in done.stdout and "| INT4 | token TIS, cap 2 | 1 |" in done.stdout
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["variant"] for row in result["rows"]] == ["none", "none", "tis"] and result["cost"]["cpu_seconds"] > 0
    assert 0.0 <= result["rows"][2]["accuracy"]["mean"] <= 1.0
    assert (tmp_path / "out" / "table.md").read_text() in done.stdout
    ElementTree.parse(tmp_path / "out" / "figure.svg")

    def never(*_: Any) -> None:
        raise RuntimeError("trained again")

    monkeypatch.setattr(experiment, "train", never)
    assert run.main([*options, "--variants", "none", "tis"]) == 0
    assert "3 runs (3 from before)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_short_form_learns_and_ranks(tmp_path: Path) -> None:
    """Two minutes on two idle cores: GRPO learns with float rollouts, PPO-IS does not with INT3 ones."""
    command = [sys.executable, "recipes/quantised_rollouts/run.py", "--short", "--out", str(tmp_path)]
    done = run_command(command, seconds=1700, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {(r["variant"], r["bits"]): r for r in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert set(rows) == {("none", None), *((variant, 3) for variant in VARIANTS)}
    start = rows["none", None]["start_accuracy"]["mean"]
    assert rows["none", None]["accuracy"]["mean"] > start + 0.05
    assert rows["tis", 3]["accuracy"]["mean"] > start + 0.05
    assert rows["ppo_is", 3]["accuracy"]["mean"] < rows["tis", 3]["accuracy"]["mean"] - 0.05
    assert 0.02 < rows["none", 3]["mismatch_k3"]["mean"] < 0.5
