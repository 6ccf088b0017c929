"""Weights against weights: an engine's summaries of known tensors, and the trainer's real model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from trl_offpolicy.diagnosis.probe.asked import Asked, Proof
from trl_offpolicy.diagnosis.probe.weights import shard, weight_rows
from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.rounding import round_weights
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.engines.weights.summary import checksum, sample_of, summarise

Change = Callable[[str, Tensor], Tensor]


def engine_of(weights: dict[str, Tensor], *, dtype: torch.dtype = torch.float32, tied: bool = False) -> Interview:
    """An engine that holds these weights, in its dtype."""

    def ask(question: str, *, names: Collection[str] | None = None, sample: int = 0) -> list[dict[str, Any]]:
        pieces: dict[str, Any] = {}
        for name, weight in weights.items():
            if names is None or name in names:
                kept = weight.to(dtype)
                pieces[name] = {**summarise(kept), "ordered": True, "start": None}
                if sample:
                    pieces[name] |= {"sample": sample_of(kept, sample), "values": checksum(kept, ordered=False)}
        other = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        name = str(dtype).removeprefix("torch.")
        return [{"pieces": pieces, "tied": other, "tp_rank": 0, "tp_size": 1, "dtype": name}]

    return Interview("a test", ask=ask)


def weights_of(model: Any, change: Change = lambda name, weight: weight) -> dict[str, Tensor]:
    return {name: change(name, weight.detach().clone()) for name, weight in ModelWeights(model).merged()}


def noisy(wanted: Callable[[str], bool], size: float = 1e-3) -> Change:
    def change(name: str, weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        scale = size * weight.square().mean().sqrt()
        return weight + scale * torch.randn(weight.shape, generator=generator) if wanted(name) else weight

    return change


def adapted(std: float = 0.05) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model: Any = get_peft_model(tiny_model(), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=std)
    return model


def scaled(model: Any, factor: float) -> Any:
    other = deepcopy(model)
    for module in other.modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            module.scaling["default"] *= factor
    return other


def proof(weights: dict[str, Tensor], model: Any, **options: Any) -> tuple[Proof, list[Asked]]:
    rows = weight_rows(engine_of(weights, **options), model)
    return Proof(tuple(rows)), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_weights_are_equal_in_every_dtype_of_the_engine(dtype: torch.dtype) -> None:
    model = tiny_model()
    found, _ = proof(weights_of(model), model, dtype=dtype)
    assert found.seen == () and {"weights", "adapter"} <= found.compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_weights_a_little_off_are_stale(dtype: torch.dtype) -> None:
    model = tiny_model()
    found, _ = proof(weights_of(model, noisy(lambda name: True, 0.02)), model, dtype=dtype)
    (seen,) = found.seen
    assert seen.cause == "stale_weights" and "all weights (21 of 21 differ)" in seen.what
    assert float(seen.engine) != float(seen.trainer) and "weights" in found.compared


def test_a_part_is_named_by_its_layers() -> None:
    model = tiny_model()
    found, _ = proof(weights_of(model, noisy(lambda name: ".layers.1.mlp." in name)), model)
    (seen,) = found.seen
    assert seen.cause == "stale_weights" and seen.what.startswith("layer 1 (3 of 21 differ)")
    found, _ = proof(weights_of(model, noisy(lambda name: name == "lm_head.weight")), model)
    assert found.seen[0].what.startswith("lm_head.weight (1 of 21 differ)")


def test_a_single_changed_value_is_seen() -> None:
    """Outside of the sample it shows in the checksum."""
    model = tiny_model()

    def change(name: str, weight: Tensor) -> Tensor:
        if name == "model.embed_tokens.weight":
            weight[77, 13] += 1e-3
        return weight

    found, _ = proof(weights_of(model, change), model)
    assert [one.what.split(" ")[0] for one in found.seen] == ["model.embed_tokens.weight"]


def test_another_model_is_not_a_training_step_away() -> None:
    found, _ = proof(weights_of(tiny_model(seed=1)), tiny_model())
    assert found.seen[0].cause == "other_weights" and "relative size 1." in found.seen[0].what
    model = tiny_model()
    found, _ = proof(weights_of(model, lambda name, weight: weight * 1.05), model)
    assert found.seen[0].cause == "other_weights" and "1.05 times as large" in found.seen[0].what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("factor", "text"), [(0.0, "none: the base model"), (0.5, "0.5 times"), (2.0, "2 times")])
def test_the_share_of_the_adapter_is_fitted(dtype: torch.dtype, factor: float, text: str) -> None:
    model = adapted()
    found, _ = proof(weights_of(scaled(model, factor)), model, dtype=dtype)
    (seen,) = found.seen
    assert (seen.cause, seen.engine, seen.trainer) == ("wrong_adapter", text, "1 time")
    assert {"weights", "adapter"} <= found.compared


def test_a_merged_adapter_is_equal_and_other_weights_are_not_a_scaled_adapter() -> None:
    model = adapted()
    found, rows = proof(weights_of(model), model)
    assert found.seen == () and rows[-1].engine == "merged"
    found, _ = proof(weights_of(model, noisy(lambda name: "q_proj" in name, 0.05)), model)
    assert found.seen[0].cause == "stale_weights"


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_rounded_weights_are_precision_not_stale(kind: str) -> None:
    model = tiny_model()
    found, _ = proof(dict(round_weights(weights_of(model).items(), kind)), model)
    (seen,) = found.seen
    assert (seen.cause, seen.engine) == ("precision", kind)
    interview = engine_of(dict(round_weights(weights_of(model).items(), kind)))
    interview.weight_rounding = kind  # declared: the weights are as they should be
    (declared,) = Proof(tuple(weight_rows(interview, model))).seen
    assert declared.what == "rounding of the linear weights" and declared.engine == kind


def test_a_trainer_in_16_bits_differs_from_the_checkpoint_by_rounding_only() -> None:
    whole = tiny_model()
    found, _ = proof(weights_of(whole), deepcopy(whole).to(torch.bfloat16))
    (seen,) = found.seen
    assert (seen.cause, seen.engine, seen.trainer) == ("precision", "as float32", "as bfloat16")
    moved = weights_of(whole, noisy(lambda name: True, 0.05))
    assert proof(moved, deepcopy(whole).to(torch.bfloat16))[0].seen[0].cause == "stale_weights"


def test_the_engines_tied_head_is_compared_with_the_trainers_own() -> None:
    model = tiny_model()  # untied
    held = {name: weight for name, weight in weights_of(model).items() if name != "lm_head.weight"}
    found, _ = proof(held, model, tied=True)
    assert found.seen[0].what.startswith("lm_head.weight (1 of 21 differ)")


def test_what_cannot_be_compared_is_said() -> None:
    model = tiny_model()
    held = weights_of(model)
    del held["model.norm.weight"]
    held["lm_head.weight"] = held["lm_head.weight"][:-1]
    held["model.layers.0.self_attn.q_proj.weight"] = held["model.layers.0.self_attn.q_proj.weight"].T.contiguous()
    found, rows = proof(held, model)
    assert found.seen == () and "weights" not in found.compared
    (row,) = [one for one in rows if one.outcome == "not compared"]
    assert row.what.startswith("3 weights")
    silent = Proof(tuple(weight_rows(Interview("vLLM server at x"), model)))
    assert silent.seen == () and silent.rows[0].engine == "vLLM server at x does not let its workers be asked"


def test_each_worker_is_compared_with_its_own_part() -> None:
    """Rows and columns by rank; heads of keys that are repeated; an embedding with padding at its end."""
    whole = torch.arange(24.0).reshape(6, 4)
    answers = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
    assert [shard(whole, {"shape": [3, 4]}, one).tolist() for one in answers] == [  # type: ignore[union-attr]
        whole[:3].tolist(), whole[3:].tolist()
    ]  # fmt: skip
    assert shard(whole, {"shape": [6, 2]}, answers[1]).tolist() == whole[:, 2:].tolist()  # type: ignore[union-attr]
    repeated = [shard(whole, {"shape": [3, 4]}, {"tp_rank": rank, "tp_size": 4}) for rank in range(4)]
    assert [float(part[0, 0]) for part in repeated] == [0.0, 0.0, 12.0, 12.0]  # type: ignore[index]
    assert shard(whole, {"shape": [2, 4], "start": 4}, answers[1]).tolist() == whole[4:].tolist()  # type: ignore[union-attr]
    assert shard(whole, {"shape": [4, 4]}, answers[0]) is None and shard(whole, {"shape": [24]}, answers[0]) is None
