"""Routing replay by optimizer steps: where tokens are sent, what each kind of replay scores, the entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.dtype_ladder.replay import (
    Job,
    ReplaySorter,
    Settings,
    lines,
    prepared,
    routes_of,
    sent_to,
    table,
    train,
)
from benchmarks.lab.experts import ExpertSorter, with_other_routers
from benchmarks.lab.sorting import Answers, prompts, sample, token_logps

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model() -> ReplaySorter:
    torch.manual_seed(0)
    return ReplaySorter()


@pytest.fixture
def sampler(model: ReplaySorter) -> ReplaySorter:
    other = with_other_routers(model, 1.0, torch.Generator().manual_seed(1))
    assert isinstance(other, ReplaySorter)
    return other


@pytest.fixture
def said(sampler: ReplaySorter) -> Answers:
    chance = torch.Generator().manual_seed(2)
    return sample(sampler, prompts(6, chance), chance)


def test_without_replay_it_is_the_lab_model(model: ReplaySorter, said: Answers) -> None:
    torch.manual_seed(0)
    plain = ExpertSorter()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(said.ids), plain(said.ids), atol=1e-5, rtol=1e-5)


def test_tokens_go_where_they_are_sent(model: ReplaySorter, sampler: ReplaySorter, said: Answers) -> None:
    own, theirs = routes_of(model, said.ids), routes_of(sampler, said.ids)
    assert own.shape == (2, 6, said.ids.shape[1] - 1) and (own != theirs).any()
    free = token_logps(model, said.ids)
    with sent_to(model, own):
        torch.testing.assert_close(token_logps(model, said.ids), free)
    with sent_to(model, theirs):
        assert not torch.allclose(token_logps(model, said.ids), free, atol=1e-3)
        assert torch.equal(routes_of(model, said.ids), theirs)
    torch.testing.assert_close(token_logps(model, said.ids), free)  # nothing stays behind


def test_each_kind_scores_the_old_policy_its_way(model: ReplaySorter, sampler: ReplaySorter, said: Answers) -> None:
    free = token_logps(model, said.ids).detach()
    (none, no_routes), (r2, mine), (r3, theirs) = (
        prepared(model, sampler, said, kind, 2)
        for kind in ("none", "R2", "R3")  # type: ignore[arg-type]
    )
    assert no_routes is None and mine is not None and theirs is not None
    assert torch.equal(mine, routes_of(model, said.ids)) and torch.equal(theirs, routes_of(sampler, said.ids))
    torch.testing.assert_close(none.old, free)
    torch.testing.assert_close(r2.old, free)  # R2 leaves the old policy as it is
    assert not torch.allclose(r3.old, free, atol=1e-3)  # R3 does not
    gap = [float((one.old - said.logps)[said.mask].abs().mean()) for one in (none, r3)]
    assert gap[1] < gap[0]  # the sampler's routes bring the learner nearer to the sampler


def test_a_tiny_run_trains_and_is_tabled(model: ReplaySorter) -> None:
    settings = Settings(generations=1, groups=2, group_size=2)
    outcomes = []
    for kind in ("none", "R2", "R3"):
        torch.manual_seed(0)
        rows = train(ReplaySorter(), Job(kind, 2, 0), settings)  # type: ignore[arg-type]
        assert 0 < rows[0]["flipped_sampler"] < 1 and rows[0]["mismatch_k3"] > 0
        end = {"accuracy": 0.5, "greedy_accuracy": 0.5, "reward": 0.5, "entropy": 0.1}
        outcomes.append(
            {"replay": kind, "steps": 2, "seed": 0, "cpu_seconds": 1.0, "start": end, "end": end, "curve": rows}
        )
    found = lines(outcomes)
    assert found[2]["mismatch_k3"] < found[0]["mismatch_k3"]  # R3 takes the routing's part of the mismatch away
    assert "| 2 | R3 | 0.500 | +0.000 |" in table(found)


@pytest.mark.slow
def test_the_short_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/dtype_ladder/replay.py", "--short", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in (tmp_path / "replay.jsonl").read_text().splitlines()]
    assert len(rows) == 7 and "| 8 | R3 |" in done.stdout
