"""What an engine reports that it kept: read from vLLM's outputs and JSON, noted in transformers' generate, joined."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_images import tiny_processor
from tiny_models import PAD, save_tiny_model, tiny_model
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from trl_offpolicy.engines import kept as module
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.kept import ARGUMENT, EVERY, KeptStore, MaskedLLM, built_with_mask, kept_of
from trl_offpolicy.engines.server.answers import as_completion, sampled_logps, sampled_mask
from trl_offpolicy.engines.server.checks import GENERATE, why_no_mask
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.engines.truncation import truncation_of
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation, truncated_support
from trl_offpolicy.rollouts.kept import announce
from trl_offpolicy.trl.engine import TRLEngine

# -------------------------------------------------------------------------------------------------------------- joined


def test_a_row_of_several_turns_gets_those_of_each() -> None:
    store = KeptStore()
    store.add([1, 2], [5, 6], KeptIds.of([[5, 9], [6]]))
    store.add([1, 2, 5, 6, 80, 81], [7, 8], KeptIds.of([[7], [8, 9, 10]]))
    store.add([1, 2], [5, 7], KeptIds.of([[5, 9], [7]]))
    completion, sampled = [5, 6, 80, 81, 7], [True, True, False, False, True]  # the last turn was cut
    assert store.of_row([1, 2], completion, sampled).tolist() == [[5, 9], [6], [80], [81], [7]]
    assert store.of_row([1, 2], [5, 7], [True, True]).tolist() == [[5, 9], [7]]
    assert store.of_row([1, 3], [5, 7], [True, True]).tolist() == [[], []]  # another context
    assert store.of_row([1, 2], [6], [True]).tolist() == [[]]  # another completion
    assert len(store) == 3
    store.clear()
    assert store.of_row([1, 2], [5, 6], [True, True]).tolist() == [[], []]


def test_equal_completions_get_each_its_own_in_order() -> None:
    store = KeptStore()
    for other in (11, 12, 13):
        store.add([1], [5], KeptIds.of([[5, other]]))
    store.add([1], [6], None)
    assert [store.of_row([1], [5], [True]).tolist() for _ in range(4)] == [[[5, n]] for n in (11, 12, 13, 11)]
    with pytest.raises(ValueError, match=r"^kept must have 2 positions, one a token, but got 1\.$"):
        store.add([1], [5, 6], KeptIds.of([[5]]))


# ---------------------------------------------------------------------------------------------------------------- vLLM


def completion(ids: list[int], mask: list[list[int]] | None) -> Any:
    return SimpleNamespace(token_ids=ids, sampling_mask=None if mask is None else SimpleNamespace(token_ids=mask))


class LLM:
    """Takes requests as ``vllm.LLM`` does and answers each with token 5."""

    refusal = ""

    def __init__(self, **arguments: Any) -> None:
        if arguments.get(ARGUMENT) and self.refusal:
            raise ValueError(f"1 validation error for VllmConfig\n  Value error, {self.refusal}")
        self.arguments, self.seen = arguments, []

    def generate(self, prompts: Any, parameters: Any, **kwargs: Any) -> Any:
        self.seen += parameters if isinstance(parameters, list) else [parameters]
        scored = None if self.seen[-1].prompt_logprobs is None else [None]
        return [
            SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=scored, outputs=[completion([5], [[5, 6]])])
            for ids in prompts
        ]


class Parameters(SimpleNamespace):
    def clone(self) -> Parameters:
        return Parameters(**vars(self))


def test_a_request_without_top_k_gets_one_that_cuts_nothing() -> None:
    llm = MaskedLLM(LLM())
    llm.kept = KeptStore()
    own = Parameters(top_k=0, prompt_logprobs=None)
    llm.generate([[1]], own)
    llm.generate([[2]], [Parameters(top_k=-1, prompt_logprobs=None), Parameters(top_k=20, prompt_logprobs=None)])
    assert [one.top_k for one in llm.seen] == [EVERY, EVERY, 20] and own.top_k == 0
    llm.generate([[3]], Parameters(top_k=0, prompt_logprobs=0))  # a probe
    assert len(llm.kept) == 2 and llm.kept.of_row([2], [5], [True]).tolist() == [[5, 6]]


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Triton and a vLLM that knows the argument."""
    monkeypatch.setattr(module, "engine_has_triton", lambda: True)
    monkeypatch.setattr(module, "_vllm_knows_it", lambda: True)


@pytest.mark.usefixtures("able")
def test_the_mask_is_asked_for_where_something_is_cut_and_vllm_can_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built, reason = built_with_mask(LLM, {"seed": 1}, truncated=True)
    assert isinstance(built, MaskedLLM) and reason is None and built.arguments == {"seed": 1, ARGUMENT: True}
    built, reason = built_with_mask(LLM, {}, truncated=False)
    assert isinstance(built, LLM) and built.arguments == {} and reason == "nothing is cut"
    refused = ({"logits_processors": ["x"]}, {"speculative_config": {"a": 1}}, {"logprobs_mode": "raw_logprobs"})
    for arguments in refused:
        built, reason = built_with_mask(LLM, arguments, truncated=True)
        assert isinstance(built, LLM) and reason is not None and next(iter(arguments)) in reason
    built, reason = built_with_mask(LLM, {ARGUMENT: False}, truncated=True)
    assert isinstance(built, LLM) and reason == "engine.return_sampling_mask is false"
    monkeypatch.setattr(module, "_vllm_knows_it", lambda: False)
    assert "(0.28 does)" in (built_with_mask(LLM, {}, truncated=True)[1] or "")
    monkeypatch.setattr(module, "engine_has_triton", lambda: False)
    assert "needs Triton" in (built_with_mask(LLM, {}, truncated=True)[1] or "")


@pytest.mark.usefixtures("able")
def test_where_vllm_refuses_it_is_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "refusal", "sampling distribution replay requires Model Runner V2")
    built, reason = built_with_mask(LLM, {"seed": 1}, truncated=True)
    assert built.arguments == {"seed": 1} and reason is not None and "requires Model Runner V2" in reason
    monkeypatch.setattr(LLM, "refusal", "no such model")
    with pytest.raises(ValueError, match="no such model"):
        built_with_mask(LLM, {}, truncated=True)


def test_an_option_that_vllm_does_not_have_is_named() -> None:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match=r"engine must have options .* but got 'dtpye'. Did you mean 'dtype'"):
        built_with_mask(EngineArgs, {"dtpye": "float32"}, truncated=False)
    with pytest.raises(TypeError, match="missing"):  # another mistake keeps its words
        built_with_mask(lambda needed: needed, {}, truncated=False)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("seed", "a", "seed='a': .* integer"), ("dtype", "float23", "dtype='float23': .* 'float32'")],
)
def test_a_value_that_vllm_does_not_take_is_one_line(option: str, value: str, says: str, tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    save_tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match=f"engine must have options that vLLM takes, but got .*{says}") as refused:
        built_with_mask(ModelConfig, {"model": str(tmp_path / "model"), option: value}, truncated=False)
    assert "\n" not in str(refused.value)


def test_a_mask_of_another_number_of_tokens_is_not_known() -> None:
    kept = kept_of(completion([5, 6], [[5, 7], [6]]))
    assert kept is not None and kept.tolist() == [[5, 7], [6]]
    assert kept_of(completion([5, 6], [[5]])) is None and kept_of(completion([5], None)) is None


def test_a_choice_of_the_route_that_reports_masks() -> None:
    places = [{"token": "token_id:5", "logprob": -0.5}, {"token": "token_id:6", "logprob": -1.5}]
    choice = {"token_ids": [5, 6], "logprobs": {"content": places}, "sampling_mask": [[5, 7], [6]]}
    found = as_completion({**choice, "finish_reason": "stop"})
    assert sampled_logps(found) == [-0.5, -1.5] and found["finish_reason"] == "stop"
    kept = sampled_mask(found)
    assert kept is not None and kept.tolist() == [[5, 7], [6]]
    assert sampled_mask({"token_ids": [5]}) is None


def test_a_server_says_why_it_reports_no_masks() -> None:
    assert "--return-sampling-mask" in (why_no_mask({"model_config": {}}, [GENERATE]) or "")
    assert "--enable-scale-out" in (why_no_mask({"model_config": {ARGUMENT: True}}, ["/v1/completions"]) or "")
    assert why_no_mask({"model_config": {ARGUMENT: True}}, [GENERATE]) is None


def test_requests_that_cut_nothing_are_known() -> None:
    assert not truncation_of(Sampling(max_tokens=1).vllm_options())
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert truncation_of(Sampling(max_tokens=1, **cut).vllm_options())


# -------------------------------------------------------------------------------------------------------- transformers


def engine(model: Any) -> TransformersEngine:
    return TransformersEngine(lambda: model, pad_token_id=PAD, eos_token_ids=(1,))


def by_processors(logits: Tensor, sampling: Sampling) -> list[int]:
    """The ids that transformers' own warpers leave, in its order: top-k, top-p, min-p."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores, none = logits[None] / 1.0, torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(sampling.temperature)(none, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(none, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(none, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(none, scores)
    found: list[int] = (scores[0] > -torch.inf).nonzero()[:, 0].tolist()
    return found


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.7, "min_p": 0.1}], ids=str)
def test_generate_reports_exactly_what_it_sampled_from(cut: dict[str, float], adapted: bool) -> None:
    torch.manual_seed(0)
    model = tiny_model()
    if adapted:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    sampling = Sampling(max_tokens=6, temperature=0.9, **cut)
    found = engine(model).generate([[5, 6, 7], [8]], sampling, n=2)
    for prompt, ids, kept in zip(found.prompt_ids, found.completion_ids, found.sampling_mask or [], strict=True):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        assert kept.tolist() == [by_processors(row, sampling) for row in logits]
        assert all(token in place for token, place in zip(ids, kept.tolist(), strict=True))
    base = model.get_base_model() if adapted else model
    assert "_get_logits_processor" not in vars(base)
    assert engine(model).generate([[5]], Sampling(max_tokens=2)).sampling_mask is None


def test_top_p_beside_min_p_keeps_other_tokens_than_vllms_order() -> None:
    """Why the report is worth having: transformers cuts by top-p first, the rule of the trainer by min-p."""
    torch.manual_seed(0)
    model, sampling = tiny_model(), Sampling(max_tokens=6, temperature=0.9, top_p=0.7, min_p=0.1)
    found = engine(model).generate([[5, 6, 7]], sampling, n=8)
    differ = 0
    for prompt, ids, kept in zip(found.prompt_ids, found.completion_ids, found.sampling_mask or [], strict=True):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float() / 0.9
        ruled = truncated_support(logits, Truncation(top_p=0.7, min_p=0.1)).weights(logits) > 0
        differ += sum(row.nonzero()[:, 0].tolist() != own for row, own in zip(ruled, kept.tolist(), strict=True))
    assert differ > 5


# ------------------------------------------------------------------------------------------------------------ log line


def test_one_line_says_which_tokens_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        announce(Truncation(top_p=0.9), reason=None)
        announce(Truncation(top_p=0.9), reason="it is old")
    first, second = (record.getMessage() for record in caplog.records)
    assert "renormalises over exactly these" in first and "Truncation(top_p=0.9" in first
    assert "cuts its own by the same rules" in second and "(it is old)" in second


@pytest.mark.parametrize(
    ("options", "images", "transfer", "ours"),
    [({"top_p": 0.9}, False, "auto", True), ({"generation_kwargs": {"min_p": 0.1}}, False, "auto", True),
     ({}, False, "auto", False), ({"top_p": 0.9}, True, "auto", False), ({"top_k": 5}, False, "nccl", False)],
)  # fmt: skip
def test_on_a_gpu_auto_takes_the_path_that_brings_the_masks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], images: bool, transfer: str, ours: bool
) -> None:
    """Not where prompts may have images, which only TRL's client sends to a server."""
    taken: list[str] = []
    monkeypatch.setattr(TRLEngine, "_connect", lambda self: taken.append("ours"))
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: taken.append("TRL's"))
    TRLEngine(
        torch.nn.Linear(1, 1),
        SimpleNamespace(device=torch.device("cuda"), state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)),
        tiny_processor() if images else None,
        settings=EngineSettings.parse({"transfer": transfer}),
        folder=Path("not_written"),
        mode="server",
        **options,
    )
    assert taken == ["ours" if ours else "TRL's"]


def test_generation_kwargs_win_over_the_fields_of_their_name_with_a_server_too() -> None:
    engine = SimpleNamespace(
        repetition_penalty=1.0, generation_kwargs={"top_k": 5, "min_p": 0.1, "stop": ["x"]}, max_completion_length=8,
        temperature=0.7, top_p=0.9, top_k=0, min_p=None, structured_outputs_regex=None,
    )  # fmt: skip
    asked = TRLEngine._sampling(engine)  # type: ignore[arg-type]
    assert (asked.top_k, asked.min_p, asked.top_p, asked.max_tokens) == (5, 0.1, 0.9, 8)
    assert asked.extra == {"repetition_penalty": 1.0, "stop": ["x"]}
    assert engine.generation_kwargs["top_k"] == 5
