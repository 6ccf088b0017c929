"""A resumed run goes on as if it had not stopped: loss, weights, logged numbers; and what a checkpoint holds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import OwnMismatch, Watch, data, module, trainer
from peft import LoraConfig
from tiny_models import score_last_word, tiny_model, tiny_tokenizer
from trainer_runs import TIMES

from lightning_module import OffPolicyGRPOModule

pytestmark = pytest.mark.integration

STEPS = 6
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
ADAPTIVE = {"type": "adaptive", "coef": 0.1, "target": 0.01, "horizon": 99}
HELD_OUT = [{"prompt": f"w{i} w9"} for i in range(4)]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {  # module, data, trainer, stop
    "at_a_generation": ({}, {}, {}, 3),
    "inside_a_generation": ({}, {"steps_per_generation": 2, "num_iterations": 2}, {}, 3),
    "end_of_an_epoch": ({}, {"shuffle": True}, {"limit_train_batches": 3}, 3),
    "at_a_validation": ({}, {"val_dataset": HELD_OUT, "val_batch_size": 2}, {"val_check_interval": 1}, 3),
    "noise_that_learns": ({"perturbation": {"std": 0.05, "learning_rate": 0.1}}, {"num_iterations": 2}, {}, 3),
    "adapter_and_kl": (
        {"adapter": LORA, "objective": {"kl": {"coef": ADAPTIVE}}},
        {"num_iterations": 2}, {"accumulate_grad_batches": 1}, 3,
    ),
}  # fmt: skip


def fit(folder: Path, case: str, *, steps: int, resume: Path | None = None) -> tuple[Watch, Path, OffPolicyGRPOModule]:
    options, sizes, flags, _ = CASES[case]
    pl.seed_everything(1, verbose=False)
    if resume is not None:
        torch.manual_seed(99)  # other random numbers, until those of the checkpoint are back
    watch, ours = Watch(), module(learning_rate=0.01, lr_scheduler="linear", **options)
    when: dict[str, Any] = {"every_n_train_steps": CASES[case][3]}
    if case == "at_a_validation":  # saved when the validation of this step ends
        when = {"every_n_epochs": 1, "save_on_train_epoch_end": False}
    saver = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", **when)
    owner = trainer(folder, callbacks=[watch, saver], enable_checkpointing=True, max_steps=steps, **flags)
    owner.fit(ours, data(**sizes), ckpt_path=resume, weights_only=True if resume else None)
    return watch, folder / f"step={CASES[case][3]}.ckpt", ours


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_exactly(case: str, tmp_path: Path) -> None:
    whole, saved, _ = fit(tmp_path / "whole", case, steps=STEPS)
    rest, _, _ = fit(tmp_path / "rest", case, steps=STEPS, resume=saved)
    assert len(rest.logs) == STEPS - 3
    for step in range(3, STEPS):
        expected, logs = whole.logs[step], rest.logs[step - 3]
        assert {k: v for k, v in logs.items() if k not in TIMES} == pytest.approx(
            {k: v for k, v in expected.items() if k not in TIMES}, abs=1e-12, rel=1e-12, nan_ok=True
        )
    for name, value in whole.weights[-1].items():
        assert torch.equal(value, rest.weights[-1][name]), name


def test_without_the_random_state_the_test_above_would_fail(tmp_path: Path) -> None:
    whole, saved, _ = fit(tmp_path / "whole", "at_a_generation", steps=STEPS)
    state = torch.load(saved, weights_only=True)
    state["offpolicy"]["ranks"][0]["random"]["torch"] = torch.get_rng_state()
    torch.save(state, saved)
    rest, _, _ = fit(tmp_path / "rest", "at_a_generation", steps=STEPS, resume=saved)
    assert rest.logs[0]["reward"] != whole.logs[3]["reward"] or rest.logs[0]["loss"] != whole.logs[3]["loss"]


def test_a_checkpoint_of_an_adapter_holds_the_adapter_alone(tmp_path: Path) -> None:
    _, saved, ours = fit(tmp_path, "adapter_and_kl", steps=3)
    state = torch.load(saved, weights_only=True)
    assert state["state_dict"] and all("lora_" in name for name in state["state_dict"])
    assert state["offpolicy"]["kl"]["coef"] != 0.1 and state["offpolicy"]["version"] == 3
    state["state_dict"].popitem()
    with pytest.raises(ValueError, match="checkpoint must hold all trained weights of the adapter"):
        ours.on_load_checkpoint(state)


def test_a_price_that_moves_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Two and two steps; every price is the one before plus twice the violation that was logged with it."""
    price = {"type": "discrepancy", "statistic": "abs", "coef": 0.3, "target": 0.1, "rate": 2.0, "max_coef": 99.0}
    rows: list[dict[str, float]] = []
    for part, resume in (("first", None), ("rest", tmp_path / "first.ckpt")):
        watch, ours = Watch(), module(OwnMismatch(noise=0.5), objective={"shaping": [price]})
        owner = trainer(tmp_path / part, callbacks=[watch], max_steps=2 if resume is None else 4)
        owner.fit(ours, data(), ckpt_path=resume)
        owner.save_checkpoint(tmp_path / f"{part}.ckpt")
        rows += watch.logs
    assert len(rows) == 4 and rows[0]["offpolicy/loss/discrepancy_coef"] == pytest.approx(0.3)
    for row, after in pairwise(rows):
        wanted = row["offpolicy/loss/discrepancy_coef"] + 2.0 * (row["offpolicy/loss/discrepancy"] - 0.1)
        assert after["offpolicy/loss/discrepancy_coef"] == pytest.approx(wanted, rel=1e-4) and wanted > 0.31


def test_a_module_comes_back_from_its_checkpoint_alone(tmp_path: Path, model_folder: Any) -> None:
    """Model name, reward function, adapter and correction are among the hyperparameters."""
    given = {"model": str(model_folder()), "reward_funcs": score_last_word, "correction": "measure", "adapter": LORA}
    ours = OffPolicyGRPOModule(**given, sampling={"max_tokens": 4}, learning_rate=0.05)
    owner = trainer(tmp_path, max_steps=1, enable_checkpointing=False)
    owner.fit(ours, data())
    owner.save_checkpoint(tmp_path / "one.ckpt")
    again = OffPolicyGRPOModule.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert again.hparams["correction"] == "measure" and again.preset.name == "measure"
    assert again.rewards.functions == [score_last_word]
    theirs = dict(again.policy.named_parameters())
    for name, value in ours.policy.named_parameters():
        assert torch.equal(value, theirs[name]), name
    assert any(bool(value.any()) for name, value in theirs.items() if "lora_B" in name)


def test_full_weights_come_back(tmp_path: Path) -> None:
    ours = module(adapter=None, learning_rate=0.05)
    owner = trainer(tmp_path, max_steps=1)
    owner.fit(ours, data())
    owner.save_checkpoint(tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert all(name.startswith("policy.") for name in state["state_dict"])
    again = OffPolicyGRPOModule.load_from_checkpoint(
        tmp_path / "one.ckpt", model=tiny_model(seed=7), tokenizer=tiny_tokenizer(), reward_funcs=score_last_word
    )
    for name, value in ours.policy.named_parameters():
        assert torch.equal(value, dict(again.policy.named_parameters())[name]), name


def test_a_peft_configuration_is_as_good_as_a_mapping() -> None:
    ours = module(adapter=LoraConfig(**LORA, task_type="CAUSAL_LM"))
    ours.configure_model()
    assert all("lora_" in name for name, p in ours.policy.named_parameters() if p.requires_grad)
