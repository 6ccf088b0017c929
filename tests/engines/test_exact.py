"""``exact: true``: what it sets, what contradicts it, and what a server must be started with."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.engines import exact, settings
from trl_offpolicy.engines.effective import settings_of, settings_of_sglang
from trl_offpolicy.engines.exact import check_exact, exact_engine, float32_head, server_findings, server_flags
from trl_offpolicy.engines.settings import EngineSettings


def test_it_sets_what_brings_the_two_together_and_keeps_the_rest() -> None:
    found = exact_engine({"max_model_len": 64, "seed": 3}, dtype="float32", rows=8)
    assert found.arguments == {
        "max_model_len": 64, "seed": 3, "dtype": "float32", "max_num_seqs": 8, "enforce_eager": True,
        "enable_prefix_caching": False, "disable_cascade_attn": True, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    assert "enable_prefix_caching=False" in found.text
    assert exact_engine({}, dtype="bfloat16", rows=None).arguments["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"weight_rounding": "int8"},
            "engine.weight_rounding must be left out with engine.exact: true, but got 'int8'",
        ),
        ({"quantization": "fp8"}, "engine.quantization must be left out with engine.exact: true"),
        ({"kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype must be auto with engine.exact: true, but got 'fp8'"),
        ({"enable_prefix_caching": True}, "engine.enable_prefix_caching must be false with engine.exact: true"),
        ({"enforce_eager": False}, "engine.enforce_eager must be true with engine.exact: true, but got False"),
        ({"logprobs_mode": "raw_logprobs"}, "engine.logprobs_mode must be processed_logprobs with engine.exact"),
        ({"hf_overrides": {"rope_theta": 1}}, "engine.hf_overrides must hold nothing but head_dtype: float32"),
        ({"speculative_config": {"method": "ngram"}}, "engine.speculative_config must be left out"),
        ({"dtype": "bfloat16"}, r"engine.dtype must be float32 \(the trainer's\) with engine.exact: true"),
        ({"max_num_seqs": 4}, r"engine.max_num_seqs must be 8 \(the rows of the trainer's forward\) with engine.exact"),
    ],
)
def test_a_contradiction_names_both_fields(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_engine(engine, dtype="float32", rows=8)


def test_what_agrees_is_accepted() -> None:
    check_exact({"quantization": None, "kv_cache_dtype": "auto", "enforce_eager": True, "dtype": "float32"})
    check_exact({"hf_overrides": {"head_dtype": "float32"}})


def test_the_engine_field_parses_it() -> None:
    assert EngineSettings.parse({"exact": True, "max_model_len": 64}).exact
    assert not EngineSettings.parse({}).exact
    with pytest.raises(ValueError, match=r"engine.exact must be true or false, but got 'yes'"):
        EngineSettings.parse({"exact": "yes"})
    with pytest.raises(ValueError, match=r"engine.weight_rounding must be left out with engine.exact"):
        EngineSettings.parse({"exact": True, "weight_rounding": "int8"})
    assert EngineSettings.parse({"weight_rounding": "int8"}).weight_rounding is not None


def test_a_misspelt_option_of_the_kit_is_no_argument_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"engine\.chek_sync is no option here .* Did you mean 'check_sync'\?"):
        EngineSettings.parse({"chek_sync": False})
    monkeypatch.setattr(settings, "_vllm_arguments", lambda: frozenset({"chek_sync", "dtype"}))
    assert EngineSettings.parse({"chek_sync": False}).arguments == {"chek_sync": False}
    with pytest.raises(ValueError, match=r"engine\.dtpye is no option here .* Did you mean 'dtype'\?"):
        EngineSettings.parse({"dtpye": "float32"})


def test_arguments_of_the_installed_vllm_are_known() -> None:
    pytest.importorskip("vllm")
    known = {"dtype", "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype", "max_model_len", "hf_overrides"}
    assert known <= settings._vllm_arguments()


def test_the_hardware_decides_on_batch_invariant_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "has_batch_invariant_kernels", lambda: True)
    found = exact_engine({}, dtype="float32", rows=8)
    assert "only a server can have them (VLLM_BATCH_INVARIANT=1)" in found.missing[0]
    assert "VLLM_BATCH_INVARIANT" not in os.environ  # the trainer's own products would lose their gradient
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(
        ValueError, match=r"^VLLM_BATCH_INVARIANT must be unset where .* engine.exact: true, but got '1'"
    ):
        exact_engine({}, dtype="float32", rows=8)
    check_exact({})  # of a server
    monkeypatch.setattr(exact, "has_batch_invariant_kernels", lambda: False)
    found = exact_engine({}, dtype="float32", rows=8)
    assert "batch-invariant kernels: vLLM has none" in found.missing[0]


def test_tensor_parallelism_is_said_unless_its_kernels_are_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TP_INVARIANT", raising=False)
    assert (
        "tensor_parallel_size 2 sums in parts"
        in exact_engine({"tensor_parallel_size": 2}, dtype="float32", rows=1).missing[-1]
    )
    monkeypatch.setenv("VLLM_TP_INVARIANT", "1")
    assert len(exact_engine({"tensor_parallel_size": 2}, dtype="float32", rows=1).missing) == 1
    variables = {"VLLM_BATCH_INVARIANT": 1, "VLLM_TP_INVARIANT": "0"}
    assert settings_of({}, variables) == {"batch_invariant": True, "tp_invariant": False}


def test_reported_routing_needs_the_prefix_cache_that_exact_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ({"enable_return_routed_experts": True}, {"return_routing": True}):
        monkeypatch.setattr(exact, "engine_has_triton", lambda: True)
        with pytest.raises(ValueError, match=r"^engine\.return_routing must be left out .* engine.exact: true"):
            exact_engine(engine, dtype="float32", rows=8)
    monkeypatch.setattr(exact, "engine_has_triton", lambda: False)  # read from callbacks, without the cache
    assert exact_engine({"return_routing": True}, dtype="float32", rows=8).arguments["return_routing"] is True


def test_a_merged_adapter_is_said_in_16_bits() -> None:
    said = [exact_engine({}, dtype=dtype, rows=1, merged=True).missing[-1] for dtype in ("bfloat16", "float32")]
    assert said[0].startswith("the adapter by itself: merged into bfloat16") and "adapter" not in said[1]


def test_a_server_is_told_what_to_start_with() -> None:
    good = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "batch_invariant": True,
            "tensor_parallel_size": 1, "max_num_seqs": 8, "kv_cache_dtype": "auto"}  # fmt: skip
    assert server_findings(good, dtype="float32", rows=8) == ()
    bad = {**good, "dtype": "bfloat16", "enable_prefix_caching": True, "kv_cache_dtype": "fp8"}
    assert server_findings(bad, dtype="float32", rows=8) == (
        "dtype is bfloat16, not float32", "enable_prefix_caching is true, not false", "kv_cache_dtype is fp8, not auto",
    )  # fmt: skip
    assert "does not say" in server_findings({}, dtype="float32", rows=8)[0]
    assert "--hf-overrides" in server_flags(dtype="bfloat16", rows=None)
    assert server_flags(dtype="bfloat16", rows=8, sglang=True) == (
        "--dtype bfloat16 --enable-deterministic-inference --disable-radix-cache --disable-cuda-graph "
        "--max-running-requests 8 --enable-fp32-lm-head"
    )


def test_sglang_says_its_deterministic_mode() -> None:
    info = {"dtype": "bfloat16", "tp_size": 4, "ep_size": 4, "enable_deterministic_inference": False,
            "disable_radix_cache": False, "max_running_requests": None}  # fmt: skip
    found = settings_of_sglang(info)
    assert found["tensor_parallel_size"] == 4 and found["enable_expert_parallel"] and found["enable_prefix_caching"]
    assert found["batch_invariant"] is False and "max_num_seqs" not in found
    assert settings_of_sglang({**info, "rl_on_policy_target": "fsdp"})["batch_invariant"] is True


def test_the_head_of_a_16_bit_model_computes_in_float32() -> None:
    model: Any = tiny_model()
    assert not float32_head(model)
    model = model.to(torch.bfloat16)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        rounded = model(ids).logits
        assert float32_head(model)
        logits = model(ids).logits
        hidden = model.model(ids).last_hidden_state
    assert logits.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(logits, hidden.float() @ model.lm_head.weight.float().T)
    assert 0 < (logits - rounded.float()).abs().max() < 0.1


def test_an_sglang_server_is_asked_for_its_settings() -> None:
    from trl_offpolicy.engines.server.interview import interview_server

    class Client:
        base_url = "http://a:1"

        def get(self, route: str, **_: Any) -> dict[str, Any]:
            assert route == "/get_server_info"
            return {"dtype": "bfloat16", "tp_size": 2, "enable_deterministic_inference": True}

    client: Any = Client()
    interview = interview_server(client, ["/get_server_info", "/v1/models"], "policy", prompt=[1])
    facts = interview.facts()
    assert facts.source == "SGLang server at http://a:1" and interview.weights() is None
    assert facts.settings["batch_invariant"] is True and facts.settings["tensor_parallel_size"] == 2
