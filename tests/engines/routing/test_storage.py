"""What a record may hold, what it takes, and when which replay is recommended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import KINDS, LAYERS, TOP_K, moe_model
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from trl_offpolicy.engines.routing import RouteStorageError, bytes_per_token, check_routes, find_routers, route_dtype
from trl_offpolicy.engines.routing.freeze import freeze_router, freeze_router_bias
from trl_offpolicy.engines.routing.options import RoutingReplay, recommend_replay
from trl_offpolicy.engines.routing.storage import check_storage

SHAPE = {"experts": 8, "top_k": 2, "layers": 3}


def routes() -> Tensor:
    record = torch.tensor([0, 7], dtype=torch.int8).repeat(2, 4, 3, 1)
    record[0, 0] = -1
    return record


def changed(index: tuple[int, ...], value: int) -> Tensor:
    record = routes()
    record[index] = value
    return record


def test_a_valid_record_passes() -> None:
    check_routes(routes(), **SHAPE)
    check_routes(torch.zeros(0, 4, 3, 2, dtype=torch.int16), **SHAPE)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (changed((0, 1, 0, 1), 8), "from -1 to 7, but got -1 to 8"),
        (changed((0, 1, 0, 1), -2), "from -1 to 7, but got -2 to 7"),
        (changed((0, 1, 0, 1), -1), "all 2 experts of a token and layer or none"),
        (changed((0, 1, 0, 1), 0), "each expert of a token and layer once"),
    ],
)
def test_wrong_values_are_named(record: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_routes(record, **SHAPE)


@pytest.mark.parametrize(("experts", "dtype"), [(2, torch.int8), (128, torch.int8), (129, torch.int16)])
def test_the_smallest_type_holds_every_id(experts: int, dtype: torch.dtype) -> None:
    assert route_dtype(experts) == dtype and torch.iinfo(dtype).max >= experts - 1
    assert bytes_per_token(layers=3, top_k=2, experts=experts) == 6 * dtype.itemsize


def test_the_limit_is_in_gib() -> None:
    check_storage(2**20, each=1024, limit_gib=1.0)
    with pytest.raises(RouteStorageError, match=r"limit_gib must be at least 1 for 1048577 tokens of 1024 bytes"):
        check_storage(2**20 + 1, each=1024, limit_gib=1.0)


@pytest.mark.parametrize(
    ("steps", "mode"), [(0.5, "none"), (1, "none"), (2, "r2"), (3, "r2"), (4, "r3"), (8, "r3"), (16, "r3")]
)
def test_recommendation_by_off_policiness(steps: float, mode: str) -> None:
    advice = recommend_replay(steps)
    assert advice.mode == mode
    assert ("at 8" in advice.why) is (steps >= 8)


def test_options_refuse_what_they_do_not_know() -> None:
    assert RoutingReplay.parse(None) == RoutingReplay.parse("none") == RoutingReplay()
    assert RoutingReplay.parse({"mode": "r3", "device": "cpu"}) == RoutingReplay(mode="r3", device="cpu")
    wrong: list[tuple[Any, str]] = [
        ("r1", r"routing_replay\.mode must be one of"),
        (3, "routing_replay must be one of .* or a mapping, but got 3"),
        ({"mode": "r2", "where": "cpu"}, r"routing_replay\.where must be one of"),
        ({"mode": "r2", "device": "disk"}, r"routing_replay\.device must be one of \['model', 'cpu'\], but got 'disk'"),
        ({"mode": "r2", "limit_gib": 0}, r"routing_replay\.limit_gib must be"),
    ]
    for spec, message in wrong:
        with pytest.raises(ValueError, match=message):
            RoutingReplay.parse(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_freezing_the_router(kind: str) -> None:
    model = moe_model(kind)
    names = freeze_router(model)
    assert sorted(names) == sorted(f"{router.path}.weight" for (router,) in find_routers(model).of_layer)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == set(names)
    assert len(names) == LAYERS - (kind == "deepseek_v3") and find_routers(model).top_k == TOP_K


def test_freezing_biases() -> None:
    found = freeze_router_bias(moe_model("deepseek_v3"))
    assert found == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)]
    model = GptOssForCausalLM(
        GptOssConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2,
                     num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    )  # fmt: skip
    assert freeze_router_bias(model) == ["model.layers.0.mlp.router.bias"]
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"model.layers.0.mlp.router.bias"}
    with pytest.raises(ValueError, match="must be False for routers without a bias"):
        freeze_router_bias(moe_model("mixtral"))
