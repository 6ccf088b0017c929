"""What run.json declares of engine and trainer is what the attribution can read."""

from __future__ import annotations

from tiny_models import tiny_model
from torch import nn

from trl_offpolicy.diagnosis.attribution.evidence import Declared, differences
from trl_offpolicy.engines.kv_cache import KVCache, set_kv_cache
from trl_offpolicy.run_folder.declared import declared_sides

SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": None, "min_p": None}


def both(**engine: object) -> tuple[Declared, Declared]:
    said = declared_sides(tiny_model(), engine=engine, autocast=None, sampling=SAMPLING)
    return Declared(**said["engine"]), Declared(**said["trainer"])


def test_equal_sides_declare_no_difference() -> None:
    engine, trainer = both(dtype="float32")
    assert differences(engine, trainer) == {} and trainer.experts == 0 and trainer.dropout == 0.0


def test_rounding_and_dtype_are_declared_as_precision() -> None:
    assert "precision" in differences(*both(weight_rounding={"type": "int4", "group_size": 32}))
    assert both(weight_rounding="int8")[0].quantization == "int8"
    assert "bfloat16" in differences(*both(dtype="bfloat16"))["precision"].text


def test_a_compressed_cache_is_declared_on_both_sides() -> None:
    sparse = {"keep_first": 2, "keep_last": 8}
    engine, trainer = both(kv_cache=sparse)
    assert engine.kv_cache == "the first 2 and last 8 tokens" and trainer.kv_cache == "auto"
    assert list(differences(engine, trainer)) == ["compressed_cache"]
    assert list(differences(*both(kv_cache="fp8"))) == ["precision"]
    learner = tiny_model()
    set_kv_cache(learner, KVCache(**sparse))
    said = declared_sides(learner, engine={"kv_cache": sparse}, autocast=None, sampling=SAMPLING)
    assert differences(Declared(**said["engine"]), Declared(**said["trainer"])) == {}


def test_dropout_and_experts_are_seen_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    said = declared_sides(model, engine=None, autocast="bfloat16", sampling=SAMPLING)
    assert said["trainer"]["dropout"] == 0.1 and said["trainer"]["dtype"] == "bfloat16"
    moe = declared_sides(tiny_model("qwen3_moe"), engine=None, autocast=None, sampling=SAMPLING)
    assert moe["trainer"]["experts"] == 4
