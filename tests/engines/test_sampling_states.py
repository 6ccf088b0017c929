"""States in which the sampling policy is another one: what is refused, warned about and noted, and who asks."""

import json
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest

from trl_offpolicy.engines.colocate import reset_prefix_cache
from trl_offpolicy.engines.engine import EngineError, Sampling, SyncError
from trl_offpolicy.engines.sampling_states import (
    ENGINE_RULES,
    REQUEST_RULES,
    SEVERITIES,
    described,
    engine_findings,
    flag_arguments,
    judge,
    request_findings,
    server_arguments,
)
from trl_offpolicy.engines.server import checks as server_checks
from trl_offpolicy.engines.server.serve import ServeOptions, announce

NEUTRAL = {
    "top_p": 0.9,  # mirrored by the trainer, and so no finding
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.0,
    "structured_outputs_regex": None,
    "generation_kwargs": {"presence_penalty": 0.0, "max_tokens": 8, "stop": [], "logit_bias": {}, "min_tokens": 0},
}
REQUESTS = {
    "repetition_penalty": (1.1, "refuse"),
    "frequency_penalty": (0.5, "refuse"),
    "presence_penalty": (-0.5, "refuse"),
    "logit_bias": ({5: 1.0}, "refuse"),
    "allowed_token_ids": ([1, 2], "refuse"),
    "bad_words": (["no"], "refuse"),
    "structured_outputs": ({"regex": "[0-9]+"}, "refuse"),
    "structured_outputs_regex": ("[0-9]+", "refuse"),
    "thinking_token_budget": (5, "refuse"),
    "trace_decode_token_ids": ([7], "refuse"),
    "extra_args": ({"a": 1}, "warn"),
    "min_tokens": (3, "warn"),
    "ignore_eos": (True, "warn"),
    "stop": (["\n"], "note"),
    "stop_token_ids": ([7], "note"),
}
ENGINES = {
    "logprobs_mode": ("raw_logprobs", "refuse"),
    "logits_processors": (["mine.Processor"], "refuse"),
    "watermark_config": ({"algorithm": "x"}, "refuse"),
    "kv_cache_dtype": ("fp8", "warn"),
    "quantization": ("fp8", "warn"),
    "hf_overrides": ({"rope_theta": 1}, "warn"),
    "kv_transfer_config": ({"kv_connector": "x"}, "warn"),
    "kv_offloading_size": (4.0, "warn"),
    "enable_prefix_caching": (True, "note"),
}


def found(findings):
    return [(one.severity, one.setting) for one in findings]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_neutral_requests_are_comparable(device_type):
    assert request_findings(NEUTRAL, device_type=device_type) == ()
    assert request_findings({}, device_type=device_type) == ()
    assert request_findings({"generation_kwargs": None}, device_type=device_type) == ()


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("nested", [False, True])
def test_requests(name, nested):
    value, severity = REQUESTS[name]
    options = {**NEUTRAL, "generation_kwargs": {name: value}} if nested else {name: value}
    assert found(request_findings(options, device_type="cuda")) == [(severity, f"{name}={value}")]


def test_generation_kwargs_win_over_the_field():
    both = (
        {"repetition_penalty": low, "generation_kwargs": {"repetition_penalty": high}} for low, high in [(2, 1), (1, 2)]
    )
    assert [len(request_findings(options, device_type="cpu")) for options in both] == [0, 1]


@pytest.mark.parametrize("name", ["logprobs", "n", "temperature"])
def test_what_the_trainer_itself_sets_may_not_be_set_again(name):
    (one,) = request_findings({"generation_kwargs": {name: 1}}, device_type="cuda")
    assert (one.severity, one.setting) == ("refuse", f"generation_kwargs.{name}")


@pytest.mark.parametrize(("device_type", "reason"), [("cpu", "stops vLLM's CPU engine"), ("cuda", "the same numbers")])
def test_a_seed_per_request_is_refused(device_type, reason):
    (one,) = request_findings({"generation_kwargs": {"seed": 1}}, device_type=device_type)
    assert (one.severity, one.setting, one.remedy) == ("refuse", "generation_kwargs.seed", "set engine.seed")
    assert reason in one.reason


def test_every_rule_is_tested():
    assert set(REQUESTS) - {"structured_outputs_regex", "stop_token_ids"} == set(REQUEST_RULES)
    assert set(ENGINES) | {"speculative_config"} == set(ENGINE_RULES)


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name):
    value, severity = ENGINES[name]
    assert found(engine_findings({"dtype": "float32", name: value})) == [(severity, f"{name}={value}")]
    assert engine_findings({name: None}) == ()


def test_neutral_engines():
    neutral = {"logprobs_mode": "processed_logprobs", "kv_cache_dtype": "auto", "quantization": None}
    assert (
        engine_findings({**neutral, "enable_prefix_caching": False, "kv_offloading_size": 0, "enable_lora": True}) == ()
    )


@pytest.mark.parametrize(
    ("config", "severity"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, "note"),
        ({"method": "eagle", "rejection_sample_method": "block"}, "note"),
        ({"method": "eagle", "rejection_sample_method": "synthetic"}, "refuse"),
        ({"model": "draft", "acceptance_method": "typical_acceptance_sampler"}, "refuse"),
    ],
)
def test_speculative_decoding(config, severity):
    assert found(engine_findings({"speculative_config": config})) == [(severity, f"speculative_config={config}")]


def test_an_adapter_on_a_rounded_base():
    settings = [one.setting for one in engine_findings({"quantization": "fp8", "enable_lora": True})]
    assert settings == ["quantization=fp8", "enable_lora"]


def test_names_are_those_of_vllm():
    sampling_params = pytest.importorskip("vllm.sampling_params").SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    assert set(REQUEST_RULES) <= set(sampling_params.__struct_fields__)
    assert set(ENGINE_RULES) | {"enable_lora"} <= {item.name for item in fields(EngineArgs)}


# ------------------------------------------------------------------------------------------------------- what follows


def test_a_correction_is_refused_diagnostics_warn():
    both = request_findings({"repetition_penalty": 1.1, "generation_kwargs": {"n": 2}}, device_type="cuda")
    with pytest.raises(ValueError, match=r"^sampling options must leave .*comparable, but got repet.*=1\.1: .*; .*\.n"):
        judge(both, needs_sampling=True)
    with pytest.warns(UserWarning, match=r"^Diagnostics will be biased: repetition_penalty=1\.1"):
        judge(both, needs_sampling=False)


def test_warnings_and_silence():
    with pytest.warns(UserWarning, match=r"kv_cache_dtype=fp8: keys and values are stored in another format"):
        judge(engine_findings({"kv_cache_dtype": "fp8"}), needs_sampling=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judge(engine_findings({"enable_prefix_caching": True}), needs_sampling=True)


def test_what_is_said_is_whole():
    both = (*request_findings({n: v for n, (v, _) in REQUESTS.items()}, device_type="cpu"),)
    both += engine_findings({name: value for name, (value, _) in ENGINES.items()})
    for one in described(both):
        assert one["severity"] in SEVERITIES and all(one.values())
        assert not one["reason"].endswith(".") and not one["remedy"].endswith(".")


def test_the_trainer_asks_before_it_loads(make_args):
    from trl_offpolicy.trl.checks import check_engine, sampling_findings

    args = make_args(use_vllm=True, vllm_mode="colocate", engine={"kv_cache_dtype": "fp8", "check_sync": True})
    args.vllm_structured_outputs_regex = "[0-9]+"
    assert [setting for _, setting in found(sampling_findings(args))] == [
        "structured_outputs_regex=[0-9]+", "kv_cache_dtype=fp8",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="structured_outputs_regex"):
        check_engine(args, args.preset.objective, has_rollout_func=False)
    args.use_vllm = False
    assert sampling_findings(args) == ()


def test_the_lightning_module_asks_too():
    from lightning_module.engines import check_sampling

    with pytest.raises(ValueError, match="logits_processors"):
        arguments = {"logits_processors": ["x"]}
        check_sampling("vllm", Sampling(max_tokens=1), needs_sampling=True, arguments=arguments)
    with pytest.raises(ValueError, match="bad_words"):
        check_sampling("vllm", Sampling(max_tokens=1, extra={"bad_words": ["x"]}), needs_sampling=True)


def test_run_json_and_the_attribution_know(build):
    """Without vLLM nothing is found; what the engine declares of its cache reaches the attribution."""
    from trl_offpolicy.diagnosis.attribution.evidence import Declared, differences, excluded
    from trl_offpolicy.trl.run_description import run_description

    trainer = build()
    info = run_description(trainer.args, trainer.args.preset, trainer)
    assert info["sampling_states"] == [] and info["declared"]["engine"]["kv_cache"] == "auto"
    assert info["effective"] == {}  # transformers generates: there is no other engine to ask
    same = {"dtype": "bfloat16", "quantization": "none"}
    said = differences(Declared(**same, kv_cache="fp8"), Declared(**same))["precision"]
    assert said.certain and said.text == "keys and values stored as fp8 in the engine"
    assert "precision" not in excluded(Declared(**same, kv_cache="fp8"), Declared(**same))
    assert differences(Declared(**same, kv_cache="auto"), Declared(**same))["precision"].text == "16-bit arithmetic"


# ----------------------------------------------------------------------------------------------------------- a server


class Client:
    """A server's answers."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, *, resets=(), **config):
        self.resets, self.config, self.posted = list(resets), config, []

    def get(self, path, **_):
        assert path == "/server_info"
        return {"vllm_config": self.config}

    def post(self, path, body):
        self.posted.append(path)
        return self.resets.pop(0)


def judged(**config):
    client = Client(**config)
    return server_checks.require_ready(client, server_checks.server_config(client, ["/weight_info"]))


def test_a_servers_configuration_is_read():
    config = {
        "model_config": {"logprobs_mode": "processed_logprobs", "quantization": "fp8"},
        "cache_config": {"cache_dtype": "fp8_e5m2", "enable_prefix_caching": True},
        "lora_config": {"max_lora_rank": 16},
        "speculative_config": None,
    }
    with pytest.warns(UserWarning, match="kv_cache_dtype=fp8_e5m2"):
        findings = judged(**config)
    assert [one.setting for one in findings] == [
        "kv_cache_dtype=fp8_e5m2", "quantization=fp8", "enable_prefix_caching=True", "enable_lora",
    ]  # fmt: skip
    assert engine_findings(server_arguments({})) == ()


def test_a_server_that_cannot_be_corrected_for_is_refused():
    config = {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}}
    with pytest.raises(EngineError, match=r"cannot be corrected for: speculative_config=.*standard or block\.$"):
        judged(**config)
    with pytest.raises(EngineError, match="reports raw_logprobs"):
        judged(model_config={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(EngineError, match="does not serve /weight_info"):
        server_checks.server_config(Client(), [])


def test_the_cache_is_reset_and_proven(monkeypatch):
    monkeypatch.setattr(server_checks, "RESET_PAUSE", 0.0)
    client = Client(resets=[{"success": False}, {"success": False}, {"success": True}])
    server_checks.reset_prefix_cache(client)
    assert client.posted == ["/reset_prefix_cache?reset_external=true"] * 3
    server_checks.reset_prefix_cache(Client(resets=[None]))  # an older server says nothing
    monkeypatch.setattr(server_checks, "RESET_PATIENCE", 0.0)
    with pytest.raises(SyncError, match="did not reset its prefix cache within 0 s: requests of another client"):
        server_checks.reset_prefix_cache(Client(resets=[{"success": False}]))


def test_an_engine_in_this_process_must_reset_too():
    asked = []
    reset_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda **kwargs: asked.append(kwargs)))
    assert asked == [{"reset_connector": True}]
    with pytest.raises(SyncError, match="it declined: requests are still running"):
        reset_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda **_: False))


def test_flags():
    assert flag_arguments(()) == {}
    flags = ("--kv-cache-dtype=fp8", "--enable-prefix-caching", "--speculative-config", json.dumps({"method": "ngram"}))
    assert flag_arguments(flags) == {
        "kv_cache_dtype": "fp8", "enable_prefix_caching": True, "speculative_config": {"method": "ngram"},
    }  # fmt: skip


def test_serve_says_what_its_flags_do(capsys):
    announce(ServeOptions(model="m", extra=("--kv-cache-dtype", "fp8")))
    assert "warn: kv_cache_dtype=fp8: keys and values are stored in another format" in capsys.readouterr().out


def test_requests_say_that_there_are_no_penalties():
    """A server takes what a request leaves out from the model's generation_config.json."""
    options = Sampling(max_tokens=4).vllm_options()
    assert {name: options[name] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")} == {
        "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    assert Sampling(max_tokens=4, extra={"repetition_penalty": 1.2}).vllm_options()["repetition_penalty"] == 1.2
