"""Settings against settings, requests against what the trainer assumes; pure comparison of known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.probe.asked import Proof
from trl_offpolicy.diagnosis.probe.proof import Asking, compare_facts, theta_of
from trl_offpolicy.engines.effective import (
    SAMPLING_DEFAULTS,
    EngineFacts,
    facts_of_model,
    flat_config,
    folder_defaults,
    tokenizer_facts,
)
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.functional.truncated_sampling import Truncation

SETTINGS = {
    "dtype": "float32", "quantization": None, "logprobs_mode": "processed_logprobs", "kv_cache_dtype": "auto",
    "kv_cache_torch_dtype": "float32", "tensor_parallel_size": 1, "enable_expert_parallel": False,
    "logits_processors": [], "max_model_len": 64, "batch_invariant": False,
}  # fmt: skip
PROMPTS = [[3, 4, 5, 6], [7, 8, 9]]
COMPARED = {"model_config", "precision", "tokenizer", "prompts", "sampling", "logprobs_mode", "parallelism"}


@pytest.fixture(scope="module")
def trainer() -> EngineFacts:
    return replace(facts_of_model(tiny_model()), tokenizer=tokenizer_facts(tiny_tokenizer()))


def asked(trainer: EngineFacts, *, head: Head | None = None, requests: Any = None, **changes: Any) -> Proof:
    """The proof for an engine that says what the trainer says, but for ``changes``."""
    settings = {**SETTINGS, **changes.pop("settings", {})}
    engine = replace(trainer, settings=settings, defaults={}, **changes)
    if requests is None:
        requests = [{"prompt_token_ids": ids, "sampling": {}} for ids in PROMPTS]
    return compare_facts(engine, trainer, Asking(prompts=PROMPTS, head=head or Head(), requests=requests))


def seen(found: Proof) -> list[tuple[str, str, str, str]]:
    return [(one.cause, one.what.split(" (")[0], one.engine, one.trainer) for one in found.seen]


def sampled(**options: Any) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids, "sampling": options} for ids in PROMPTS]


def test_equal_sides_are_equal_in_everything(trainer: EngineFacts) -> None:
    found = asked(trainer)
    assert found.seen == () and found.compared == COMPARED
    assert set(found.not_compared) == {"weights", "adapter"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "bfloat16", "kv_cache_torch_dtype": "bfloat16"}, ("precision", "dtype", "bfloat16", "float32")),
        ({"quantization": "fp8"}, ("precision", "quantisation of the weights", "fp8", "none")),
        (
            {"kv_cache_dtype": "fp8_e4m3", "kv_cache_torch_dtype": "uint8"},
            ("precision", "keys and values stored as", "fp8_e4m3", "float32 (not stored)"),
        ),
        ({"tensor_parallel_size": 2}, ("parallelism", "tensor parallel size", "2", "1")),
        ({"enable_expert_parallel": True}, ("parallelism", "expert parallel", "yes", "no")),
        ({"logits_processors": ["my.Mark"]}, ("logit_processors", "logits processors", "my.Mark", "none")),
        (
            {"logprobs_mode": "raw_logits"},
            ("unreported_sampling", "which log-probs it reports", "raw_logits", "processed_logprobs"),
        ),
    ],
)
def test_settings_that_differ_are_seen_with_both_values(trainer: EngineFacts, settings: Any, expected: Any) -> None:
    assert seen(asked(trainer, settings=settings)) == [expected]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"repetition_penalty": 1.3}, "logit_processors"),
        ({"presence_penalty": 0.5}, "logit_processors"),
        ({"logit_bias": {"5": 2.0}}, "logit_processors"),
        ({"bad_words": ["the"]}, "logit_processors"),
        ({"min_tokens": 3}, "logit_processors"),
        ({"allowed_token_ids": [1, 2]}, "logit_processors"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "truncated_sampling"),
        ({"top_k": 5}, "truncated_sampling"),
        ({"min_p": 0.1}, "truncated_sampling"),
    ],
)
def test_options_that_reached_the_engine_are_compared_with_what_the_trainer_assumes(
    trainer: EngineFacts, options: Any, cause: str
) -> None:
    (name,) = options
    found = seen(asked(trainer, requests=sampled(**options)))
    assert [(one[0], one[1]) for one in found] == [(cause, name)] and found[0][2] != found[0][3]
    # one of two requests is enough
    mixed = [*sampled(), *sampled(**options)]
    assert [one[1] for one in seen(asked(trainer, requests=mixed))] == [name]


def test_what_the_trainer_mirrors_or_switches_off_is_equal(trainer: EngineFacts) -> None:
    head = Head(0.7, Truncation(top_p=0.9))
    assert asked(trainer, head=head, requests=sampled(temperature=0.7, top_p=0.9)).seen == ()
    off = sampled(top_k=-1, repetition_penalty=1.0, bad_words=[], logit_bias={}, ignore_eos=False, seed=5, max_tokens=4)
    assert asked(trainer, requests=off).seen == ()
    assert [one[1] for one in seen(asked(trainer, head=head, requests=sampled(temperature=0.7)))] == ["top_p"]


def test_raw_log_probs_matter_only_where_sampling_is_not_plain(trainer: EngineFacts) -> None:
    raw = {"logprobs_mode": "raw_logprobs"}
    assert asked(trainer, settings=raw).seen == () and "logprobs_mode" in asked(trainer, settings=raw).compared
    found = asked(trainer, settings=raw, head=Head(0.7), requests=sampled(temperature=0.7))
    assert [one[0] for one in seen(found)] == ["unreported_sampling"]


@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ([1, 3, 4, 5, 6], "the engine has 1 in front"),
        ([4, 5, 6], "the engine lacks 3 in front"),
        ([5, 6], "the engine lacks the first 2"),
        ([3, 4], "the engine lacks the last 2"),
        ([3, 4, 9, 6], "the first difference is at 2"),
    ],
)
def test_other_prompts_are_seen_with_how_they_differ(trainer: EngineFacts, changed: list[int], how: str) -> None:
    requests = [{"prompt_token_ids": ids, "sampling": {}} for ids in (changed, PROMPTS[1])]
    (one,) = asked(trainer, requests=requests).seen
    assert one.cause == "prompt_difference" and how in one.what and "1 of 2 requests" in one.what
    assert one.trainer == "[3, 4, 5, 6]"


def test_the_models_configuration_and_its_live_modules_are_compared(trainer: EngineFacts) -> None:
    assert trainer.model_config is not None
    config = {**trainer.model_config, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    other = facts_of_model(tiny_model(rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}))  # type: ignore[arg-type]
    found = seen(asked(trainer, model_config=config, modules=other.modules))
    assert ("model_config", "rope_parameters.rope_theta", "5000", "10000") in found
    assert ("model_config", "angles of the rotary embedding", "theta 5000", "theta 1e+04") in found and len(found) == 2
    # an override that the engine's modules do not follow is no difference of what it computes: only the entry shows
    assert len(seen(asked(trainer, model_config=config))) == 1
    ignored = {
        **trainer.model_config,
        "use_cache": False,
        "_name_or_path": "x",
        "pad_token_id": 77,
        "dtype": "bfloat16",
    }
    assert asked(trainer, model_config=ignored).seen == ()


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("norm_eps", 1e-3, "epsilon of the norm"),
        ("attention_scale", 0.1, "scale of attention"),
        ("attention_soft_cap", 50.0, "soft-cap of attention"),
        ("attention_window", 16, "attention window"),
    ],
)
def test_a_single_layer_with_another_number_is_named(trainer: EngineFacts, name: str, value: Any, label: str) -> None:
    assert trainer.modules is not None
    layers = dict(trainer.modules[name])
    last = list(layers)[-1]
    found = asked(trainer, modules={**trainer.modules, name: {**layers, last: value}})
    (one,) = found.seen
    assert one.cause == "model_config" and label in one.what and last in one.what and f"1 of {len(layers)}" in one.what


def test_a_window_longer_than_any_text_is_none(trainer: EngineFacts) -> None:
    assert trainer.modules is not None
    wide = dict.fromkeys(trainer.modules["attention_window"], 64)
    assert asked(trainer, modules={**trainer.modules, "attention_window": wide}).seen == ()


def test_angles_may_be_rounded_to_16_bits_but_not_turned(trainer: EngineFacts) -> None:
    assert trainer.modules is not None
    rope = trainer.modules["rope"]
    near = {"dtype": "bfloat16", "angles": [[value + 0.003 for value in row] for row in rope["angles"]]}
    assert asked(trainer, modules={**trainer.modules, "rope": near}).seen == ()
    far = {"dtype": "bfloat16", "angles": [[value + 0.02 for value in row] for row in rope["angles"]]}
    assert len(asked(trainer, modules={**trainer.modules, "rope": far}).seen) == 1
    assert theta_of(rope["angles"][0]) == pytest.approx(1e4, rel=1e-6)


def test_logits_over_other_tokens_or_with_a_cap_are_seen(trainer: EngineFacts) -> None:
    assert trainer.modules is not None
    for name, value in (("tokens", 192), ("soft_cap", 30.0), ("scale", 0.5)):
        changed = {**trainer.modules["logits"], name: value}
        assert [one[0] for one in seen(asked(trainer, modules={**trainer.modules, "logits": changed}))] == [
            "model_config"
        ]


def test_defaults_and_tokenizers_that_no_request_used_are_shown_without_effect(trainer: EngineFacts) -> None:
    engine = replace(
        trainer, settings=SETTINGS, defaults={"repetition_penalty": 1.3, "top_p": 1.0},
        tokenizer={"text": [9], "chat": None, "eos": 1, "size": 128},
    )  # fmt: skip
    requests = [{"prompt_token_ids": ids, "sampling": {}} for ids in PROMPTS]
    found = compare_facts(engine, trainer, Asking(prompts=PROMPTS, head=Head(), requests=requests))
    rows = {one.what.split(" (")[0]: one for one in found.rows if one.outcome == "no effect"}
    assert set(rows) == {"repetition_penalty of requests that leave it out", "ids of a test text"}
    assert (next(iter(rows.values())).engine, found.seen) == ("[9]", ())
    assert rows["repetition_penalty of requests that leave it out"].engine == "1.3"


def test_what_an_engine_does_not_say_is_not_compared(trainer: EngineFacts) -> None:
    found = compare_facts(EngineFacts(source="a server"), trainer, Asking(prompts=PROMPTS, head=Head()))
    assert found.seen == () and found.compared == frozenset()


def test_differences_that_move_more_come_first_and_each_has_its_cause(trainer: EngineFacts) -> None:
    found = asked(trainer, settings={"dtype": "bfloat16", "tensor_parallel_size": 2}, requests=sampled(temperature=0.5))
    causes = [one.cause for one in found.seen]
    assert causes == [
        "temperature",
        "precision",
        "precision",
        "parallelism",
    ]  # the cache is float32 and no longer "auto"
    known = {*CAUSES, "model_config", "logit_processors", "unreported_sampling", "parallelism"}
    assert set(causes) <= known


def test_defaults_are_read_from_the_models_folder(tmp_path: Any) -> None:
    assert folder_defaults(tmp_path / "absent") is None and folder_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.3, "eos_token_id": 2, "top_k": null}')
    assert folder_defaults(tmp_path) == {"repetition_penalty": 1.3}
    assert set(SAMPLING_DEFAULTS) >= {"temperature", "top_p"} and flat_config({"a": {"b": 1}}) == {"a.b": 1}


def test_a_run_keeps_what_its_engine_says_and_what_differs(trainer: EngineFacts) -> None:
    from trl_offpolicy.diagnosis.probe.proof import effective_settings
    from trl_offpolicy.engines.interview import Interview

    model, tokenizer = tiny_model(), tiny_tokenizer()
    said = replace(trainer, source="an engine", settings={**SETTINGS, "dtype": "bfloat16"}, defaults={"top_p": 0.9})
    found = effective_settings(Interview("an engine", known=said), model, tokenizer)
    assert found["engine"]["dtype"] == "bfloat16" and found["defaults"] == {"top_p": 0.9}
    outcomes = {one["what"].split(" ")[0]: one["outcome"] for one in found["differences"]}
    assert outcomes == {"dtype": "different", "keys": "different", "top_p": "no effect"}
    assert "weights" not in found["compared"] and "precision" in found["compared"]
    assert effective_settings(None, model, tokenizer) == {}
