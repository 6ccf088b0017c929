"""transformers' ``generate`` from a policy in shards: two processes draw and learn what one process does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import Played, Watch, data, module, trainer
from lightning_shards import GENERATE_STEPS, LORA, PROMPTS, ending_model, generate_settings
from processes import run_command

from trl_offpolicy.rollouts.scoring import sequence_logps

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
Seen = list[dict[str, Any]]
RUNS = [("ddp", False), ("fsdp2", False), ("fsdp", False), ("zero3", False), ("fsdp2", True), ("zero3", True)]
"""Strategies, and whether an adapter is trained, whose reference is the policy without it."""


@pytest.fixture(scope="module", params=RUNS, ids=lambda one: one[0] + "-lora" * one[1])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, bool]:
    """What both ranks saw."""
    kind, lora = request.param
    folder = tmp_path_factory.mktemp("generate")
    script = str(ROOT / "tests" / "lightning" / "sharded_generate_run.py")
    command = [sys.executable, "-W", "ignore", script, str(folder), kind, *(["--lora"] if lora else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_command(command, seconds=600, env={**environment, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    name = kind + "-lora" * lora
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)], lora


def policy_with(weights: dict[str, torch.Tensor], *, lora: bool) -> Any:
    """A whole model in this process."""
    model = ending_model()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.load_state_dict(weights, strict=False)
    assert {name for name, _ in model.named_parameters()} == set(weights)
    return model.eval()


def completion(row: torch.Tensor, ends: list[int]) -> list[int]:
    """A sampled row up to the first token that ends it."""
    ids: list[int] = row.tolist()
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def completions_of(call: dict[str, Any]) -> list[list[int]]:
    width, ends = call["options"]["input_ids"].shape[1], call["options"]["eos_token_id"]
    return [completion(row, ends) for row in call["out"][:, width:]]


def prompts_of(call: dict[str, Any]) -> list[list[int]]:
    pairs = zip(call["options"]["input_ids"], call["options"]["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def test_each_rank_draws_what_one_process_draws(ran: tuple[Seen, bool]) -> None:
    """With the weights before the step and the rank's random numbers. No two ranks draw alike."""
    parts, lora = ran
    for rank, part in enumerate(parts):
        assert len(part["calls"]) == GENERATE_STEPS
        for step, call in enumerate(part["calls"]):
            model = policy_with(part["weights"][step], lora=lora)
            torch.set_rng_state(call["state"])
            with torch.no_grad():
                mine = model.generate(**call["options"])
            assert completions_of({**call, "out": mine}) == completions_of(call), (rank, step)
    for first, second in zip(*(part["calls"] for part in parts), strict=True):
        assert not torch.equal(first["state"], second["state"])
        assert completions_of(first) != completions_of(second)
    lengths = [[max(map(len, completions_of(call))) for call in part["calls"]] for part in parts]
    assert lengths[0] != lengths[1]  # else nobody had to wait for the other


def test_the_loss_reads_the_log_probs_of_what_sampled(ran: tuple[Seen, bool]) -> None:
    """Those of the whole model, by rows without padding."""
    parts, lora = ran
    for part in parts:
        assert len(part["scores"]) == GENERATE_STEPS
        for step, (call, scores) in enumerate(zip(part["calls"], part["scores"], strict=True)):
            model, rows = policy_with(part["weights"][step], lora=lora), completions_of(call)
            texts = [prompt + row for prompt, row in zip(prompts_of(call), rows, strict=True)]
            for row, found, alone in zip(rows, scores, sequence_logps(model, texts, pad=0), strict=True):
                assert found[: len(row)].tolist() == pytest.approx(alone[-len(row) :], abs=1e-4)


def test_it_trains_as_one_process(ran: tuple[Seen, bool], tmp_path: Path) -> None:
    """One process is given what both ranks drew. The loss has a KL to the policy of the start."""
    parts, lora = ran
    calls = []
    for both in zip(*(part["calls"] for part in parts), strict=True):
        rows = [row for call in both for row in completions_of(call)]
        prompts = [prompt for call in both for prompt in prompts_of(call)]
        logprobs = [[-5.0] * len(row) for row in rows]
        calls.append({"prompt_ids": prompts, "completion_ids": rows, "logprobs": logprobs})
    engine, watch = Played(calls), Watch()
    torch.manual_seed(1)  # of the adapter
    owner = trainer(tmp_path, callbacks=[watch], max_steps=GENERATE_STEPS)
    owner.fit(module(engine, **generate_settings(lora=lora)), data(PROMPTS[4:], micro_batch_size=8))
    assert engine.prompts == [call["prompt_ids"] for call in calls]
    for part in parts:
        for mine, theirs in zip(watch.weights, part["weights"][1:], strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                assert torch.allclose(theirs[name], value, atol=1e-5), name
        assert part["logs"][-1]["loss"] == pytest.approx(watch.logs[-1]["loss"], rel=1e-4, abs=1e-6)
        assert part["logs"][-1]["kl"] == pytest.approx(watch.logs[-1]["kl"], rel=1e-3, abs=1e-6)
    assert watch.logs[-1]["kl"] > 1e-3  # the reference is not the policy
    moved = [float((watch.weights[-1][name] - watch.weights[0][name]).abs().max()) for name in watch.weights[0]]
    assert max(moved) > 1e-3
