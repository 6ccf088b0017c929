"""The benchmark of corrections: its mismatches are what they say, its rows are the kit's, its numbers are paired."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import trl_offpolicy as op
from benchmarks.corrections import run as command
from benchmarks.corrections import tables
from benchmarks.corrections.experiment import Corrected, Job, Settings, at_the_start, band_of
from benchmarks.corrections.mismatches import MISMATCHES, Mismatch
from benchmarks.corrections.results import collect, missing, read
from benchmarks.corrections.rows import AVAILABLE, ROWS
from benchmarks.lab.experts import EXPERTS, ExpertSorter, flipped, with_other_routers
from benchmarks.lab.loop import Rollouts, group_advantages
from benchmarks.lab.sorting import Sorter, nucleus, prompts, reward, sample, solutions, token_logps

TINY = Settings(
    start_accuracy=0.02, warm_up_steps=20, generations=2, groups=4, group_size=4, log_every=1, questions=16, answers=2
)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model() -> Sorter:
    torch.manual_seed(0)
    return Sorter()


@pytest.fixture(scope="module")
def experts() -> ExpertSorter:
    torch.manual_seed(0)
    return ExpertSorter()


def test_what_the_tasks_ask_for() -> None:
    asked = prompts(3, chance())
    ranks = [[sum(other < one for other in row) for one in row] for row in asked[:, :10].tolist()]
    assert solutions(asked, "ranking")[:, :10].tolist() == ranks
    assert torch.equal(solutions(asked, "reversing")[:, :10], asked[:, :10].flip(1))
    assert (solutions(asked)[:, :10].diff(dim=1) >= 0).all()


def test_a_nucleus_holds_at_least_its_share() -> None:
    probs = torch.rand(50, 19, generator=chance()).softmax(-1)
    kept = nucleus(probs, 0.9)
    assert (kept.sum(-1) >= 0.9).all() and (kept > 0).sum() < probs.numel()
    smallest = torch.where(kept > 0, kept, 1.0).min(-1).values
    assert (kept.sum(-1) - smallest < 0.9).all()  # without its smallest token it would not
    assert torch.equal(nucleus(probs, 1.0), probs)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_unsaid_sampling_reports_log_probs_of_the_whole_distribution(model: Sorter, name: str) -> None:
    """So pi_old / mu is 1 everywhere and no weight can see it."""
    drawn = MISMATCHES[name].sample(model, prompts(64, chance()), chance())
    scored = token_logps(model, drawn.ids)
    assert (scored - drawn.logps)[drawn.mask].abs().max() < 1e-4
    plain = sample(model, prompts(64, chance()), chance())
    assert drawn.logps[drawn.mask].mean() > plain.logps[plain.mask].mean() + 0.01  # likelier tokens are drawn


def test_a_stale_sampler_has_the_weights_of_so_many_generations_before() -> None:
    versions = deque([Sorter() for _ in range(5)], maxlen=5)
    lagging = Mismatch("lag 4", lag=4)
    assert torch.equal(lagging.sampler(versions, chance()).head.weight, versions[0].head.weight)
    early = deque(list(versions)[:2])
    assert torch.equal(lagging.sampler(early, chance()).head.weight, versions[0].head.weight)
    assert torch.equal(Mismatch("none").sampler(versions, chance()).head.weight, versions[4].head.weight)


def test_rounding_reaches_every_linear_layer(model: Sorter) -> None:
    copy = MISMATCHES["int3"].sampler([model], chance())
    for name, module in copy.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.unique(dim=1).shape[1] > 1
            assert max(row.unique().numel() for row in module.weight) <= 8, name


def test_routers_with_noise_choose_other_experts_and_nothing_else_differs(experts: ExpertSorter) -> None:
    other = with_other_routers(experts, 0.5, chance())
    same, moved = dict(experts.named_parameters()), dict(other.named_parameters())
    assert {name for name in same if not torch.equal(same[name], moved[name])} == {
        f"blocks.{layer}.router.weight" for layer in (0, 1)
    }
    drawn = sample(experts, prompts(16, chance()), chance())
    assert 0.05 < flipped(experts, other, drawn.ids, drawn.mask) < 0.95
    assert flipped(experts, experts, drawn.ids, drawn.mask) == 0.0
    with pytest.raises(ValueError, match="model must have experts"):
        with_other_routers(Sorter(), 0.5, chance())


def test_the_reference_of_flips_turns_no_router(experts: ExpertSorter) -> None:
    measured = at_the_start(experts, MISMATCHES["experts"], TINY, 0)
    assert measured["flipped"] == 0.0 and at_the_start(experts, MISMATCHES["flips"], TINY, 0)["flipped"] > 0.01


def test_an_expert_is_one_of_eight_weighed_by_its_probability(experts: ExpertSorter) -> None:
    block, x = experts.blocks[0], torch.randn(2, 3, 64, generator=chance())
    for i, j in ((0, 0), (1, 2)):
        scores = (block.router.weight @ x[i, j]).softmax(-1)
        best = int(scores.argmax())
        hidden = torch.nn.functional.gelu(x[i, j] @ block.first[best])
        torch.testing.assert_close(block.feed_forward(x)[i, j], scores[best] * (hidden @ block.second[best]))
    assert block.router.out_features == EXPERTS


def rollouts_of(model: Sorter, mismatch: Mismatch) -> Rollouts:
    answers = mismatch.sample(
        mismatch.sampler([model], chance()), prompts(8, chance()).repeat_interleave(4, 0), chance()
    )
    with torch.no_grad():
        old = token_logps(model, answers.ids)
    rewards = torch.rand(32, generator=chance())
    return Rollouts(answers, old, rewards, group_advantages(rewards, 4), 4)


@pytest.mark.parametrize("row", AVAILABLE)
def test_every_row_trains(model: Sorter, row: str) -> None:
    """A loss with a gradient; without a mismatch the rows that weigh pi_old / mu all have that of no correction."""
    gradients = {}
    for name in (row, "none"):
        found = rollouts_of(model, MISMATCHES["none"])
        objective = Corrected(ROWS[name].preset((0.9, 1.1))).for_generation(1, found)
        logps = token_logps(model, found.answers.ids).detach().requires_grad_()
        batch = op.PolicyBatch(
            per_token_logps=logps,
            old_per_token_logps=found.old,
            sampling_per_token_logps=found.answers.logps,
            completion_mask=found.answers.mask,
            advantages=found.advantages,
            rewards=found.rewards,
            group_ids=torch.arange(32) // 4,
        )
        (gradients[name],) = torch.autograd.grad(objective(batch).loss, logps)
    assert gradients[row].abs().sum() > 0
    if row not in ("gspo", "cispo", "vespo"):
        torch.testing.assert_close(gradients[row], gradients["none"], rtol=1e-3, atol=1e-7)


def test_auto_chooses_a_correction_where_there_is_a_mismatch(model: Sorter) -> None:
    chosen = {}
    for name in ("none", "int3"):
        corrected = Corrected(ROWS["auto"].preset((0.9, 1.1)))
        corrected.for_generation(1, rollouts_of(model, MISMATCHES[name]))
        chosen[name] = corrected.choice
    assert chosen["none"] == "none" != chosen["int3"]


def test_the_band_leaves_the_asked_share_outside() -> None:
    log_ratio = torch.randn(1000, generator=chance()) * 0.1
    low, high = band_of(log_ratio, 0.05)
    outside = (log_ratio.exp() < low) | (log_ratio.exp() > high)
    assert 0.045 <= outside.float().mean() <= 0.055 and low < 1 < high


@pytest.mark.parametrize("name", ["none", "lag4", "temperature", "top_p"])
def test_without_a_mismatch_at_the_start_the_band_is_that_of_int4(model: Sorter, name: str) -> None:
    """Rounding of float32 between a cached and a whole forward is no mismatch: a band of its width drops everything."""
    low, high = band_of(at_the_start(model, MISMATCHES[name], TINY, 0)["log_ratio"], 0.05)
    of_int4 = band_of(at_the_start(model, MISMATCHES["int4"], TINY, 0)["log_ratio"], 0.05)
    assert high - low > 0.3 * (of_int4[1] - of_int4[0]) > 1e-4


# ----------------------------------------------------------------------------------------------- results and tables


def line(mismatch: str, row: str, seed: int, accuracy: float, **others: Any) -> dict[str, Any]:
    fixed = {"task": "sorting", "settings": "x", "start_accuracy": 0.25, "reward": 0.5, "sampler_reward": 0.6}
    measured = {"mismatch_k3": 0.01, "ess_token": 0.9, "ess_sequence": 0.5}
    return {**fixed, **measured, "mismatch": mismatch, "row": row, "seed": seed, "accuracy": accuracy, **others}


def test_costs_and_gains_are_paired_by_seed() -> None:
    """Seeds differ by .3, but by the same for all: the difference has no width."""
    rows = [("none", "none", 0.5), ("int3", "none", 0.4), ("int3", "token_tis", 0.45)]
    results = [line(mismatch, row, seed, base - 0.1 * seed) for seed in range(3) for mismatch, row, base in rows]
    cost, gain = tables.cost_of(results, "sorting", "int3"), tables.gain_of(results, "sorting", "int3", "token_tis")
    assert cost is not None and gain is not None
    assert cost.mean == pytest.approx(-0.1) and cost.half < 1e-6 and gain.mean == pytest.approx(0.05)
    assert tables.share_back(cost, gain) == pytest.approx(0.5)
    assert tables.share_back(gain, gain) is None  # what costs nothing cannot be got back
    text = tables.report(results)
    assert "**+5.0 ± 0.0**" in text and "-10.0 ± 0.0" in text


def test_the_answer_names_only_what_is_beyond_its_interval() -> None:
    rows = {"none": (0.4, 0.0), "token_tis": (0.45, 0.0), "icepop": (0.41, 0.1), "opsm": (0.3, 0.0)}
    results = [line("none", "none", seed, 0.5) for seed in range(3)]
    for row in ("none", "token_tis", "icepop", "opsm"):
        mean, spread = rows[row]
        results += [line("int3", row, seed, mean + spread * (seed - 1)) for seed in range(3)]
    text = tables.answer(results, "sorting")
    assert "token TIS, cap 2 +5.0 ± 0.0 (50%)" in text and "IcePop" not in text
    assert text.splitlines()[2].endswith("| OPSM -10.0 ± 0.0 |")


def test_collapsed_runs_are_counted() -> None:
    results = [line("int3", "none", seed, 0.1 if seed else 0.3) for seed in range(3)]
    assert "16.7**" in tables.ends(results, "sorting")


def test_a_run_with_other_settings_is_not_taken_for_done(tmp_path: Path) -> None:
    results, out = tmp_path / "results.jsonl", tmp_path / "out"
    options = ["--results", str(results), "--out", str(out), "--jobs", "1", "--seeds", "0"]
    args = command.parse(["--short", *options, "--rows", "none", "auto"])
    assert [job.name for job in command.plan(args)] == [
        f"sorting-{mismatch}-{row}-0" for mismatch in ("none", "int3") for row in ("none", "auto")
    ]
    assert missing(command.plan(args), [], args.settings) == command.plan(args)


def test_the_plan_runs_the_reference_of_flips_without_correction_only() -> None:
    jobs = command.plan(command.parse(["--seeds", "0"]))
    assert [job.row for job in jobs if job.mismatch == "experts"] == ["none"]
    assert len(jobs) == (len(MISMATCHES) - 1) * len(AVAILABLE) + 1


@pytest.mark.integration
def test_runs_are_written_collected_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = tmp_path / "results.jsonl", tmp_path / "out"
    monkeypatch.setattr(command, "Settings", lambda: TINY)
    options = ["--results", str(results), "--out", str(out), "--jobs", "1", "--seeds", "1"]
    first = ["--mismatches", "none", "int3", "--rows", "none", "token_tis", "geometric", *options]
    assert command.main([*first, "--figure", str(tmp_path / "figure.svg")]) == 0
    lines = read(results)
    assert len(lines) == 6 and "</svg>" in (tmp_path / "figure.svg").read_text()
    by_name = {(one["mismatch"], one["row"]): one for one in lines}
    # the same start, the same prompts; without a mismatch a weight changes nothing
    assert len({one["start_accuracy"] for one in lines}) == 1
    assert by_name["none", "none"]["accuracy"] == by_name["none", "token_tis"]["accuracy"]
    assert by_name["int3", "none"]["mismatch_k3"] > 1e-4 > by_name["none", "none"]["mismatch_k3"]
    assert 0 <= by_name["int3", "geometric"]["dropped_sequences"] <= 1
    before = results.read_text()
    for file in (out / "runs").glob("*.json"):
        file.unlink()
    assert missing([Job("int3", "none", 1)], collect(results, out / "runs"), TINY) == []
    assert missing([Job("int3", "none", 1)], lines, replace(TINY, generations=3)) == [Job("int3", "none", 1)]
    assert command.main([*first, "--report"]) == 0 and results.read_text() == before
    assert json.loads(before.splitlines()[0])["commit"] and asdict(TINY)["generations"] == 2


@pytest.mark.slow
def test_the_short_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--short", "--jobs", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert len(read(tmp_path / "results.jsonl")) == 8
    assert printed.count("| INT3 |") == printed.count("| none |") == 4


def test_the_committed_results_are_whole() -> None:
    """Every line is of the settings that the command has, and no run is there twice."""
    lines = read(command.HERE / "results.jsonl")
    keys = [(one["task"], one["mismatch"], one["row"], one["seed"]) for one in lines]
    assert len(set(keys)) == len(keys)
    expected = command.parse([]).settings
    assert not missing([Job(m, r, s, t) for t, m, r, s in keys], lines, expected)
    assert all(one["row"] in ROWS and one["mismatch"] in MISMATCHES and one["commit"] for one in lines)


def test_the_reward_of_the_second_task_is_its_own(model: Sorter) -> None:
    asked = prompts(4, chance())
    ids = torch.cat([asked, solutions(asked, "reversing")], dim=1)
    drawn = replace(sample(model, asked, chance()), ids=ids)
    assert (reward(drawn, "reversing") == 1).all() and (reward(drawn) < 1).any()
