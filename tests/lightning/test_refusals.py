"""What the module cannot train on is an error that says what to do, not a fault further on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_runs import OwnMismatch, data, module, trainer
from tiny_models import score_last_word
from torch.utils.data import DataLoader

from lightning_module import OffPolicyGRPOModule
from lightning_module.engines import check_one_each
from trl_offpolicy.rollouts.screening import RolloutError


def test_a_plain_data_loader_is_refused_by_name(tmp_path: Path) -> None:
    rows: Any = [{"prompt": "w1"}] * 4
    with pytest.raises(TypeError, match=r"PromptDataModule.*\(MicroStep\).*but got a batch of type dict"):
        trainer(tmp_path, max_steps=1).fit(module(), DataLoader(rows, batch_size=2))
    with pytest.raises(TypeError, match=r"PromptDataModule.*\(HeldOut\).*but got a batch of type dict"):
        trainer(tmp_path).validate(module(), DataLoader(rows, batch_size=2), verbose=False)


def test_a_prompt_without_a_token_is_shown(tmp_path: Path) -> None:
    prompts = [{"prompt": "w1"}, {"prompt": ""}]
    with pytest.raises(ValueError, match=r"prompt must have at least one token, but prompt 1 of the batch, '', has"):
        trainer(tmp_path, max_steps=1).fit(module(), data(prompts, micro_batch_size=8))


def test_a_policy_that_is_loaded_whole_is_not_taken_for_a_sharded_one(tmp_path: Path) -> None:
    """A second trainer may shard; what the first one loaded would stay whole, and each rank train a copy of its own."""
    used = module()
    trainer(tmp_path, max_steps=1).fit(used, data())
    mesh = {"data_parallel": SimpleNamespace(size=lambda: 2), "tensor_parallel": SimpleNamespace(size=lambda: 1)}
    used._device_mesh = mesh
    with pytest.raises(ValueError, match="the module must be a new one under ModelParallelStrategy"):
        used.configure_model()


class Silent(OwnMismatch):
    """An engine that gives NaN in place of log-probs, for so many completions of the first generation."""

    def __init__(self, silent: int) -> None:
        super().__init__(noise=0.1)
        self.silent = silent

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        rollouts = super().generate(*args, **kwargs)
        for row in rollouts.sampling_per_token_logps[: self.silent]:
            row[:] = [math.nan] * len(row)
        return rollouts


@pytest.mark.parametrize("correction", ["measure", "paper/tis"])
@pytest.mark.parametrize("silent", [7, 8])
def test_an_engine_without_log_probs_stops_the_run_before_a_step(tmp_path: Path, silent: int, correction: str) -> None:
    ours = module(Silent(silent), correction=correction)
    owner = trainer(tmp_path, max_steps=1)
    if silent < 8:
        owner.fit(ours, data(micro_batch_size=8))
        return
    with pytest.raises(RolloutError, match=r"gave none that is finite in a whole generation batch"):
        owner.fit(ours, data(micro_batch_size=8))
    assert owner.global_step == 0


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    def two(parameters: Any) -> Any:
        return [torch.optim.SGD(parameters, lr=0.1)] * 2

    with pytest.raises(TypeError, match=r"optimizer must make one torch.optim.Optimizer .* but made list"):
        trainer(tmp_path, max_steps=1).fit(module(optimizer=two), data())


def test_a_checkpoint_without_its_functions_says_which(tmp_path: Path) -> None:
    owner = trainer(tmp_path, max_steps=1)
    owner.fit(module(reward_funcs=lambda completions, **_: [0.0] * len(completions)), data())
    owner.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(TypeError, match=r"'model' and 'reward_funcs' must be given again"):
        OffPolicyGRPOModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    with pytest.raises(TypeError, match=r"'reward_funcs' must be given again"):
        OffPolicyGRPOModule.load_from_checkpoint(
            tmp_path / "last.ckpt", weights_only=True, model=module().settings["model"]
        )
    again = module(reward_funcs=score_last_word).settings
    OffPolicyGRPOModule.load_from_checkpoint(
        tmp_path / "last.ckpt",
        weights_only=True,
        **{name: again[name] for name in ("model", "reward_funcs", "tokenizer")},
    )


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"type": "vllm", "weight_roundin": "int8"}, r"^engine\.weight_roundin .* Did you mean 'weight_rounding'"),
        ({"type": "server", "base_url": "http://127.0.0.1:1", "patient": {}}, r"^engine\.patient .* 'patience'"),
        ({"type": "transformers", "logit_fusoin": "t"}, r"^engine\.logit_fusoin is no option of 'transformers'"),
    ],
)
def test_a_misspelt_option_of_an_engine_is_named_before_anything_is_loaded(
    engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        module(engine)
    module({"type": "vllm", "gpu_memory_utilization": 0.5, "dtype": "float32", "norm_noise": True})


def test_vllm_in_each_of_several_processes_has_one_device() -> None:
    spec = {"type": "vllm", "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match=r"^engine\.tensor_parallel_size must be 1 with 4 ranks, .* but got 2"):
        check_one_each(spec, 4)
    for one, ranks in ((spec, 1), ({"type": "vllm"}, 4), ("vllm", 4), ({**spec, "type": "server"}, 4)):
        check_one_each(one, ranks)


def test_deepspeed_without_a_gpu_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    ours = module()
    with pytest.raises(ValueError, match=r"^strategy must be ddp or .* but got DeepSpeedStrategy on a CPUAccelerator"):
        trainer(tmp_path, max_steps=1, strategy=DeepSpeedStrategy(stage=3)).fit(ours, data())
    assert ours.policy is None


def test_a_policy_that_an_update_broke_is_told_of(tmp_path: Path) -> None:
    """transformers samples; torch alone says "probability tensor contains either inf, nan or element < 0"."""
    with pytest.raises(FloatingPointError, match="An earlier update broke them"):
        trainer(tmp_path, max_steps=4).fit(module(learning_rate=1e30), data())
