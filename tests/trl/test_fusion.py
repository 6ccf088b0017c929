"""A teacher in the TRL trainer's rollouts: the mixture's log-probs reach the loss, the share falls, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_model, tiny_prompts
from trainer_runs import generation_batches, records, rollouts

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1))


def mixed(trainer: Any, student: Any, batch: dict[str, Any], share: float) -> torch.Tensor:
    """(B, T) log-probs of the mixture, from whole forwards of the student before its step and of the teacher."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        parts = [
            model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -length - 1 : -1]
            for model in (student, tiny_model(seed=1))
        ]
    logits = (1 - share) * parts[0] + share * parts[1]
    logps: torch.Tensor = (logits / trainer.temperature).log_softmax(-1)
    return logps.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def test_the_mixture_is_the_sampling_policy(build: Callable[..., Any], teacher: str) -> None:
    """The first batch against both models; the share falls to 0 over the run, and the mismatch with it."""
    trainer = build(None, engine={"logit_fusion": {"teacher": teacher, "alpha": 0.5}}, max_steps=4, temperature=0.8)
    made = generation_batches(trainer)
    trainer.train()
    batch, mask = made[0], made[0]["completion_mask"].bool()
    expected = mixed(trainer, tiny_model(), batch, 0.5)
    torch.testing.assert_close(batch["sampling_per_token_logps"][mask], expected[mask], rtol=0, atol=1e-3)
    student = mixed(trainer, tiny_model(), batch, 0.0)
    assert float((expected - student)[mask].abs().mean()) > 0.1  # the test could not fail otherwise
    rows = records(trainer)
    assert [row["offpolicy/rollout/teacher_share"] for row in rows] == pytest.approx([0.5, 0.375, 0.25, 0.125])
    divergence = [row["offpolicy/mismatch/kl_k3"] for row in rows]
    assert divergence[0] > 3 * divergence[-1] > 0
    assert trainer.objective.mode == "bypass"  # the preset of a teacher, unless another is named
    assert rollouts(trainer)["weights"].map(max).max() <= 3.0
    assert trainer.args.preset.name == "paper/logit-fusion"
    found = examine(trainer.args.output_dir).attribution
    assert found is not None and (found.cause, found.basis) == ("on_purpose", "seen")  # no hunt for a fault
    path = Path(trainer.args.output_dir) / "metrics.jsonl"
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "offpolicy/rollout/teacher_share": 0.0}) + "\n" for row in logged))
    left = examine(trainer.args.output_dir).attribution  # a mismatch without a teacher has another cause
    assert left is not None and left.cause != "on_purpose"


def test_hard_prompts_get_more_and_an_evaluation_nothing(build: Callable[..., Any], teacher: str) -> None:
    data = tiny_prompts().add_column("hard", [float(i % 2) for i in range(32)])
    options = {"teacher": teacher, "alpha": 0.4, "steps": 100, "difficulty": "hard"}
    trainer = build(None, engine={"logit_fusion": options}, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer.train_dataset = data  # the held-out rows have no such column
    made = generation_batches(trainer)
    trainer.train()
    batch, mask = made[0], made[0]["completion_mask"].bool()
    shares = []
    logps = {share: mixed(trainer, tiny_model(), batch, share) for share in (0.0, 0.4)}
    for row in range(len(mask)):
        near = [share for share, found in logps.items() if _close(found[row], batch, row)]
        assert len(near) == 1
        shares += near
    assert shares[:4] != shares[4:] and sorted(set(shares)) == [0.0, 0.4]  # groups of 4: one easy, one hard prompt
    logged = records(trainer)[0]["offpolicy/rollout/teacher_share"]
    assert logged == pytest.approx(sum(shares) / len(shares))
    held_out, mask = made[-1], made[-1]["completion_mask"].bool()
    alone = mixed(trainer, trainer.model, held_out, 0.0)
    torch.testing.assert_close(held_out["sampling_per_token_logps"][mask], alone[mask], rtol=0, atol=1e-3)


def _close(found: torch.Tensor, batch: dict[str, Any], row: int) -> bool:
    mask = batch["completion_mask"][row].bool()
    return bool((found - batch["sampling_per_token_logps"][row])[mask].abs().max() < 1e-3)


def test_what_does_not_go_with_a_teacher(
    make_args: Callable[..., Any], build: Callable[..., Any], teacher: str
) -> None:
    engine = {"logit_fusion": teacher}
    with pytest.raises(ValueError, match="must be left out with a rollout_func"):
        build(lambda prompts, trainer: {}, engine=engine)
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\]"):
        make_args(engine={"logit_fusion": {"teacher": teacher, "alpha": 2.0}})
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.3"):
        build(None, engine=engine, repetition_penalty=1.3)
    with pytest.raises(ValueError, match=r"generation_kwargs\.temperature"):
        build(None, engine=engine, generation_kwargs={"temperature": 0.5})
    for options in ({"vllm_mode": "server"}, {"vllm_enable_sleep_mode": True}):
        with pytest.raises(ValueError, match=r"engine\.norm_noise must be left out with"):
            build(None, engine={"norm_noise": True}, use_vllm=True, **options)
    with pytest.raises(ValueError, match="use_transformers_continuous_batching"):
        build(None, engine=engine, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match=r"use_vllm: true \(vLLM cannot run two models"):
        build(None, engine=engine, use_vllm=True)


def test_options_of_an_engine_that_is_not_used_are_named(build: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match=r"^engine\.seed and engine\.dtype have no effect with use_vllm: false"):
        build(None, engine={"seed": 1, "dtype": "float32"})


def test_a_configuration_without_a_teacher_is_as_before(make_args: Callable[..., Any], tmp_path: Path) -> None:
    args: OffPolicyGRPOConfig = make_args()
    assert args.logit_fusion is None and not args.reports_logps
    assert OffPolicyGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, use_vllm=True).reports_logps
