"""The trainer on two processes: groups that span the ranks, one KL coefficient, the same numbers on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

from trl_offpolicy.functional.kl import adaptive_kl_coef
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.presets.parsing import parse_advantages

KL = {"type": "adaptive", "coef": 0.5, "target": 0.02, "horizon": 40}
BAND = {"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": 1.1}
WIDE = {"normalize": "original", "keep": [BAND, {"type": "group_rejection", "max_dropped_fraction": 0.5}]}
RUNS: dict[str, dict[str, Any]] = {
    "wide": {"preset": "paper/tis", "correction": WIDE},
    "wide, compiled": {"preset": "paper/tis", "correction": {**WIDE, "compiled": True}},
    "rloo": {"advantages": "rloo"},
    "optimal_token_baseline": {"advantages": "optimal_token_baseline"},
    "kl": {"preset": "measure", "objective": {"kl": {"coef": KL}}},
}


def train(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Three steps of 2 x 2 x 2 rows; groups of four lie half on each rank."""
    from trainer_runs import Engine, generation_batches, records

    engine = Engine(noise=0.3)
    engine.random.manual_seed(rank)  # or both ranks would say the same words
    trainer = two_ranks.tiny_trainer(folder, name, engine, learning_rate=2e-2, max_steps=3, offpolicy=RUNS[name])
    seen: list[Any] = []
    stages = trainer._stages
    if stages is not None and stages.needs_old:
        decide = type(stages).decide
        type(stages).decide = lambda self, batch, inputs=None: seen.append(batch) or decide(self, batch, inputs)  # type: ignore[method-assign,assignment,func-returns-value]
    outputs = generation_batches(trainer)
    trainer.train()
    if stages is not None and stages.needs_old:
        type(stages).decide = decide  # type: ignore[method-assign]
    return {
        "outputs": outputs,
        "old": [{"logps": b.per_token_logps, "sums": b.sum_sq_probs, "mask": b.mask} for b in seen],
        "rewards": trainer._rewards,
        "beta": None if trainer._kl is None else trainer._kl.beta,
        "logged": list(trainer._logs["advantages"]),
        "records": records(trainer) if rank == 0 else None,
    }


def train_all(folder: Path, rank: int) -> dict[str, Any]:
    return {name: train(folder, name, rank) for name in RUNS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes say, by rank."""
    said, _ = two_ranks.trained(__file__, tmp_path_factory.mktemp("ranks"))
    return said


def whole(ranks: list[dict[str, Any]], name: str, key: str) -> torch.Tensor:
    """Rows of both ranks of the last generation batch."""
    return torch.cat([said[name]["outputs"][-1][key] for said in ranks])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "optimal_token_baseline"])
def test_groups_are_whole_across_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    estimator = parse_advantages(name, where="advantages")
    assert estimator is not None
    rewards = whole(ranks, name, "rewards")
    assert torch.equal(rewards, ranks[0][name]["rewards"].squeeze(1)) and len(rewards.unique()) > 4
    batches = [said[name]["old"][-1] for said in ranks] if estimator.by_token else []
    inputs = AdvantageInputs(rewards=rewards, group_ids=torch.arange(8) // 4)
    if batches:
        inputs = AdvantageInputs(
            rewards=rewards,
            group_ids=torch.arange(8) // 4,
            mask=_padded([batch["mask"] for batch in batches]).bool(),
            per_token_logps=_padded([batch["logps"] for batch in batches]),
            sum_sq_probs=_padded([batch["sums"] for batch in batches]),
        )
    expected = estimator(inputs)
    actual = _padded([said[name]["outputs"][-1]["advantages"] for said in ranks]) if batches else (
        whole(ranks, name, "advantages")
    )  # fmt: skip
    torch.testing.assert_close(actual, expected[:, : actual.shape[1]] if batches else expected, rtol=1e-4, atol=1e-5)
    by_row = expected if not batches else expected.sum(1) / inputs.need("mask", "the test").sum(1)
    for said in ranks:
        assert said[name]["logged"] == pytest.approx(by_row.tolist(), abs=1e-5)


def _padded(parts: list[torch.Tensor]) -> torch.Tensor:
    length = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part.float(), (0, length - part.shape[1])) for part in parts])


@pytest.mark.slow
def test_compiled_decisions_over_both_ranks_are_the_plain_ones(ranks: list[dict[str, Any]]) -> None:
    plain, compiled = (ranks[0][name]["records"] for name in ("wide", "wide, compiled"))
    assert len(plain) == len(compiled) == 3
    assert 0 < plain[0]["offpolicy/keep/dropped_sequence_fraction"] < 1
    for expected, row in zip(plain, compiled, strict=True):
        for key, value in expected.items():
            measured = key.startswith("offpolicy/") and "/time/" not in key
            if measured or key in ("loss", "grad_norm"):
                assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


@pytest.mark.slow
def test_one_coefficient_from_the_tokens_of_both_ranks(ranks: list[dict[str, Any]]) -> None:
    rows = ranks[0]["kl"]["records"]
    coefs = [row["offpolicy/loss/kl_coef"] for row in rows] + [ranks[0]["kl"]["beta"]]
    assert ranks[0]["kl"]["beta"] == ranks[1]["kl"]["beta"] and coefs[0] == 0.5 and len(set(coefs)) == 4
    for row, after in zip(rows, coefs[1:], strict=True):
        expected = adaptive_kl_coef(
            row["offpolicy/loss/kl_coef"], row["offpolicy/loss/kl"], target=0.02, samples=8, horizon=40
        )
        assert after == pytest.approx(expected, rel=1e-5)


if __name__ == "__main__":
    two_ranks.leave(train_all)
