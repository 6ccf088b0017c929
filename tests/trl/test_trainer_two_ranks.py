"""The trainer on two processes: groups that span the ranks, one KL coefficient, the same numbers on both."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from tiny_models import save_tiny_model

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
    from tiny_models import score_last_word, tiny_prompts, tiny_tokenizer
    from trainer_runs import Engine, generation_batches, records

    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    engine = Engine(noise=0.3)
    engine.random.manual_seed(rank)  # or both ranks would say the same words
    args = OffPolicyGRPOConfig(
        str(folder / name),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        learning_rate=2e-2,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
        noise_floor_steps=0,
        offpolicy=RUNS[name],
    )
    trainer = OffPolicyGRPOTrainer(
        str(folder / "model"), score_last_word, args, train_dataset=tiny_prompts(), processing_class=tiny_tokenizer(),
        rollout_func=engine,
    )  # fmt: skip
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes say, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model")
    two_ranks.launch_script(__file__, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


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
            if key.startswith("offpolicy/") or key in ("loss", "grad_norm"):
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
    torch.set_num_threads(1)
    here = int(os.environ["RANK"])
    torch.save({name: train(Path(sys.argv[1]), name, here) for name in RUNS}, Path(sys.argv[1]) / f"{here}.pt")
