"""What is read of vLLM's worker; the worker is a stand-in with the parts that are read, the real one is in
tests/diagnosis/probe/test_probe_engine.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.weights.summary import checksum
from trl_offpolicy.engines.worker import module_facts, pieces_of, shared_names, watch_requests, weights_of


class Layer(nn.Module):
    """A linear layer as vLLM has it: fused, and on a CPU packed into a kernel, the weight deleted."""

    def __init__(self, sizes: list[int], *, packed: bool = False, width: int = 6) -> None:
        super().__init__()
        self.output_partition_sizes, self.input_size_per_partition, self.params_dtype = sizes, width, torch.float32
        matrix = torch.randn(sum(sizes), width)
        self.matrix = matrix
        self.weight = nn.Parameter(torch.empty(0) if packed else matrix.clone())
        if packed:
            self.cpu_linear = lambda x, weight, bias: x @ matrix.T


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 6)
        self.embed_tokens.shard_indices = SimpleNamespace(num_org_elements=7, org_vocab_start_index=0)
        self.qkv_proj = Layer([4, 2, 2])
        self.gate_up_proj = Layer([5, 5], packed=True)
        self.o_proj = nn.Module()  # wrapped, as for an adapter
        self.o_proj.base_layer = Layer([6])
        self.lm_head = nn.Embedding(8, 6)
        self.lm_head.weight = self.embed_tokens.weight
        self.norm = SimpleNorm()


class SimpleNorm(nn.Module):
    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))


def worker(model: nn.Module) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1), model_config=SimpleNamespace(dtype=torch.float32)
    )
    return SimpleNamespace(model_runner=SimpleNamespace(model=model), vllm_config=config, rank=0)


def test_fused_and_packed_weights_come_apart_under_the_trainers_names() -> None:
    model = Model()
    found = {piece.name: piece.tensor for piece in pieces_of(model)}
    matrix = model.qkv_proj.matrix
    assert torch.equal(found["q_proj.weight"], matrix[:4]) and torch.equal(found["v_proj.weight"], matrix[6:])  # type: ignore[arg-type]
    # an identity through the kernel gives the packed matrix back, bit for bit
    assert torch.equal(found["up_proj.weight"], model.gate_up_proj.matrix[5:])  # type: ignore[arg-type]
    assert torch.equal(found["o_proj.weight"], model.o_proj.base_layer.matrix)  # type: ignore[arg-type,union-attr]
    assert found["embed_tokens.weight"].shape == (7, 6)  # type: ignore[union-attr]  # without padding
    assert "lm_head.weight" not in found and shared_names(model) == {"lm_head.weight": "embed_tokens.weight"}


def test_a_packed_weight_without_a_kernel_is_unreadable() -> None:
    model = Model()
    del model.gate_up_proj.cpu_linear
    found = {piece.name: piece.tensor for piece in pieces_of(model)}
    assert found["gate_proj.weight"] is None and found["up_proj.weight"] is None


def test_summaries_travel_not_tensors() -> None:
    model = Model()
    answer = weights_of(worker(model))
    assert answer["pieces"]["k_proj.weight"]["checksum"] == checksum(model.qkv_proj.matrix[4:6])
    closer = weights_of(worker(model), ["k_proj.weight"], sample=5)
    assert list(closer["pieces"]) == ["k_proj.weight"] and len(closer["pieces"]["k_proj.weight"]["sample"]) == 5


def test_modules_say_their_numbers() -> None:
    assert module_facts(Model())["norm_eps"] == {"norm": 1e-6}


def test_requests_are_noted_as_they_reach_the_worker_and_only_while_watched() -> None:
    class Runner:
        model = Model()
        ran = 0

        def execute_model(self, scheduled: Any) -> None:
            self.ran += 1

    class Options:
        __struct_fields__ = ("temperature", "logit_bias", "_hidden")

        def __init__(self, temperature: float = 1.0, logit_bias: Any = None) -> None:
            self.temperature, self.logit_bias, self._hidden = temperature, logit_bias, 1

    def step(prompt: list[int]) -> Any:
        request = SimpleNamespace(prompt_token_ids=prompt, sampling_params=Options(0.7, {3: 1.0}), lora_request=None)
        return SimpleNamespace(scheduled_new_reqs=[request])

    one = SimpleNamespace(model_runner=Runner())
    watch_requests(one, True)
    one.model_runner.execute_model(step([1, 2]))
    (noted,) = watch_requests(one, False)["requests"]
    assert noted["prompt_token_ids"] == [1, 2] and noted["sampling"] == {"temperature": 0.7, "logit_bias": {"3": 1.0}}
    one.model_runner.execute_model(step([5]))
    assert one.model_runner.ran == 2 and watch_requests(one, False)["requests"] == []


def test_a_question_that_fails_is_answered_by_nothing_and_a_reason() -> None:
    def ask(question: str, **arguments: Any) -> Any:
        raise AttributeError("no such part")

    interview = Interview("an engine", ask=ask)
    assert interview.weights() is None and "AttributeError: no such part" in interview.why
    assert interview.facts().settings == {}
    with interview.watch() as requests:
        pass
    assert requests == []
