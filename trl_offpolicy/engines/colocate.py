"""vLLM in the trainer's process: weights are passed in memory, an adapter through a small folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.cpu_bugs import cpu_reload, quiet_part
from trl_offpolicy.engines.drafts import drafts_in_process, with_counters
from trl_offpolicy.engines.engine import EngineError, Rollouts, Sampling, SyncError, SyncReport
from trl_offpolicy.engines.environment import EXTERNAL_LAUNCHER, beside_policy, launched, prepare_environment
from trl_offpolicy.engines.exact import Exact
from trl_offpolicy.engines.images import PromptImages, image_token
from trl_offpolicy.engines.interview import Interview, interview_llm
from trl_offpolicy.engines.kept import built_with_mask, kept_of
from trl_offpolicy.engines.norm_noise import NoisyNorms, NormNoise, parse_noise
from trl_offpolicy.engines.rounding import parse_rounding, round_weights
from trl_offpolicy.engines.routing.reported import RoutedLLM, routing_arguments
from trl_offpolicy.engines.screen import quiet_start
from trl_offpolicy.engines.server.answers import require_room
from trl_offpolicy.engines.sync_watch import Precision, torch_dtype
from trl_offpolicy.engines.weights.changed import ChangedWeights
from trl_offpolicy.engines.weights.lora import LORA_MODULES, AdapterFolder, lora_arguments
from trl_offpolicy.engines.weights.shapes import with_place
from trl_offpolicy.engines.weights.source import WeightSource
from trl_offpolicy.engines.worker import names_of
from trl_offpolicy.packages import require


class ColocateEngine:
    """A vLLM engine in the process of the model, one on each rank.

    Args:
        model: folder or Hub name of the weights that the trainer starts from.
        dtype: the trainer's dtype, e.g. "float32"; vLLM's "auto" would load float32 weights as bfloat16.
        adapter_rank: adapters up to this rank are synced alone; 0 = they are merged into the weights.
        adapter_modules: last names of the modules that they may be on; vLLM drops what an adapter has on others.
        weight_rounding: see :func:`~trl_offpolicy.engines.rounding.round_weights`; adapters are then merged.
        norm_noise: noise that rollouts of a training are sampled with, see
            :func:`~trl_offpolicy.engines.norm_noise.parse_noise`.
        return_routing: for a mixture of experts: rollouts say to which experts each token was sent.
        truncated: whether it will sample from a part of the distribution. Rollouts then say which tokens it kept, where
            vLLM can report that (:attr:`no_mask` says why not).
        seed: seed of the engine (a seed per request stops vLLM's CPU engine).
        **arguments: further arguments of ``vllm.LLM``. On a GPU, ``gpu_memory_utilization`` is 0.3 by default, because
            the policy is on it as well.

    Raises:
        EngineError: vLLM has started its core in another process, where weights cannot be passed in memory.
    """

    version: int | None = None
    exact: Exact | None = None
    """What ``exact`` has set in its arguments; whoever built the engine fills it in."""
    no_mask: str | None
    """Why rollouts do not say which tokens truncated sampling kept; None = they do."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        adapter_rank: int = 0,
        adapter_modules: Sequence[str] = LORA_MODULES,
        weight_rounding: Any = None,
        norm_noise: Any = None,
        return_routing: bool = False,
        truncated: bool = False,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        prepare_environment()
        require("vllm", by="an engine in this process")
        from vllm import LLM

        self.adapters = AdapterFolder() if adapter_rank and weight_rounding is None else None
        self.weight_rounding = weight_rounding
        self._source: WeightSource | None = None
        self._changed = ChangedWeights()
        own = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1, "seed": seed, "dtype": dtype}
        self._merged = False
        lora = lora_arguments(adapter_rank, adapter_modules) if self.adapters is not None else {}
        routing = routing_arguments() if return_routing else {}
        whole = with_counters({"model": model, **own, **lora, **beside_policy(arguments), **routing, **arguments})
        external = whole.get("distributed_executor_backend") == EXTERNAL_LAUNCHER
        with quiet_start(), launched() if external else nullcontext():
            llm, self.no_mask = built_with_mask(LLM, whole, truncated=truncated)
        require_in_process(llm)
        self.llm: Any = RoutedLLM(llm) if return_routing else llm
        self.drafts = drafts_in_process(self.llm, whole)
        """Counts the tokens of a speculative draft; None = there is none."""
        noise = parse_noise(norm_noise)
        self.noise = None if noise is None else noise_in_process(lambda: self.llm, noise)

    def bind(self, source: WeightSource) -> None:
        """Set the source whose weights :meth:`sync_weights` takes.

        Raises:
            EngineError: the engine's model is in other processes, where they cannot be passed in memory.
        """
        require_worker(self.llm)
        self._source = source

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        n: int = 1,
        images: Sequence[PromptImages] | None = None,
    ) -> Rollouts:
        """``n`` completions of each prompt, prompt-major; ``images`` are those of each prompt.

        Raises:
            EngineError: vLLM puts other image tokens into a prompt than the trainer does.
        """
        from vllm import SamplingParams

        options = sampling.vllm_options()
        if images is None:
            answers = self._run(prompt_ids, SamplingParams(**options, n=n))
        else:
            short = [one.short_ids if one.pictures else ids for one, ids in zip(images, prompt_ids, strict=True)]
            parameters = SamplingParams(**self._without_image_token(options), n=n)
            answers = self._run(short, parameters, [one.pictures for one in images])
            _check_prompts(answers, prompt_ids)
        outputs = [output for answer in answers for output in answer.outputs]
        completions = [list(output.token_ids) for output in outputs]
        version = -1 if self.version is None else self.version
        return Rollouts(
            prompt_ids=[list(ids) for ids in prompt_ids for _ in range(n)],
            completion_ids=completions,
            sampling_per_token_logps=[
                [float(place[token].logprob) for token, place in zip(output.token_ids, output.logprobs, strict=True)]
                for output in outputs
            ],
            policy_versions=[[version] * len(ids) for ids in completions],
            finish_reasons=[str(output.finish_reason) for output in outputs],
            routed_experts=self._routing(answers),
            sampling_mask=[kept_of(one) for one in outputs] if sampling.truncated and self.no_mask is None else None,
        )

    def _routing(self, answers: list[Any]) -> list[Any] | None:
        if not isinstance(self.llm, RoutedLLM):
            return None
        rows = [[*answer.prompt_token_ids, *output.token_ids] for answer in answers for output in answer.outputs]
        found = [self.llm.store.find(row) for row in rows]
        self.llm.store.clear()
        return [None if item is None else item.routes for item in found]

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence."""
        return score_in_process(self.llm, ids, adapter=None if self.adapters is None else self.adapters.request)

    def _without_image_token(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options under which the token that stands for a part of an image is not sampled, as in HF generate."""
        token = image_token(self.llm.llm_engine.model_config.hf_config)
        return options if token is None else {**options, "logit_bias": {**options.get("logit_bias", {}), token: -100.0}}

    def _run(
        self, prompt_ids: Sequence[Sequence[int]], parameters: Any, pictures: Sequence[list[Any]] | None = None
    ) -> list[Any]:
        prompts: list[dict[str, Any]] = [{"prompt_token_ids": list(ids)} for ids in prompt_ids]
        for prompt, seen in zip(prompts, pictures or [], strict=pictures is not None):
            if seen:  # vLLM replaces each image's one token by as many as it needs
                prompt["multi_modal_data"] = {"image": seen if len(seen) > 1 else seen[0]}
        adapter = None if self.adapters is None else self.adapters.request
        outputs: list[Any] = self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapter)
        return outputs

    def sync_weights(self, version: int) -> SyncReport:
        """Pass the weights to the engine. Collective: every rank calls it for its own engine."""
        if self._source is None:
            raise EngineError("bind(source) must be called before sync_weights, but no source is bound.")
        start = time.monotonic()
        if self.noise is not None:
            self.noise.off()
        # On top of weights into which it was merged, an adapter would be applied twice.
        alone = self.adapters is not None and not self._merged
        adapter, whole = self._source.adapter() if alone else None, True
        if adapter is not None and self.adapters is not None:
            size = self.adapters.load(adapter, version)
        else:
            weights = self._source.merged()
            weights = weights if self.weight_rounding is None else round_weights(weights, self.weight_rounding)
            selected = self._changed.select(weights)
            whole = not self._changed.sent_part
            size = reload_in_process(self.llm, selected, part=not whole)
            self._merged = True
            if self.adapters is not None:
                self.adapters.request = None
        self.version = version
        kind = "memory" if adapter is None else "adapter"
        return SyncReport(version=version, kind=kind, bytes=size, seconds=time.monotonic() - start, whole=whole)

    def confirm(self, proven: bool) -> bool:
        """See :meth:`~trl_offpolicy.engines.weights.changed.ChangedWeights.confirm`."""
        return self._changed.confirm(proven)

    def interview(self) -> Interview:
        """Ask the engine what it really runs with."""
        return interview_llm(self.llm, weight_rounding=self.weight_rounding)

    @property
    def precision(self) -> Precision:
        """How the engine holds its weights."""
        rounding = None if self.weight_rounding is None else parse_rounding(self.weight_rounding)
        return Precision(held_dtype(self.llm), rounding)

    def close(self) -> None:
        """Delete the engine and free its memory."""
        if self.adapters is not None:
            self.adapters.close()
        self.llm = None


def _check_prompts(answers: Sequence[Any], prompt_ids: Sequence[Sequence[int]]) -> None:
    for answer, ids in zip(answers, prompt_ids, strict=True):
        if list(answer.prompt_token_ids) != list(ids):
            raise EngineError(
                f"vLLM must see the prompt of the trainer, but puts another number of image tokens into it: "
                f"{len(answer.prompt_token_ids)} tokens, where the trainer has {len(ids)}. Give both the same options "
                "of the image processor (engine.mm_processor_kwargs)."
            )


def require_in_process(llm: Any) -> None:
    """Check that an engine's core is in this process.

    Raises:
        EngineError: it is in another one.
    """
    if not hasattr(llm.llm_engine, "model_executor"):
        raise EngineError(
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0 for an engine in this process, but vLLM has started its core in "
            "another one, where weights cannot be passed in memory. Unset it, or set it to 0."
        )


def require_worker(llm: Any) -> None:
    """Check that an engine's model is in this process, too.

    Raises:
        EngineError: it has several devices, and vLLM has started a process for each.
    """
    if not hasattr(llm.llm_engine.model_executor, "driver_worker"):
        raise EngineError(
            "engine.tensor_parallel_size and engine.pipeline_parallel_size must be 1 for an engine in this process "
            "that gets the trainer's weights, but vLLM has started a process for each device, where they cannot be "
            "passed in memory. Use an engine on each rank, or a server (trl-offpolicy serve)."
        )


def held_dtype(llm: Any) -> torch.dtype | None:
    """The dtype of the weights of an engine in this process; None if a kernel holds them quantised."""
    config = llm.llm_engine.vllm_config.model_config
    return torch_dtype(config.dtype) if config.quantization is None else None


@torch.no_grad()
def reload_in_process(llm: Any, weights: Iterable[tuple[str, Tensor]], *, part: bool = False) -> int:
    """Replace an engine's weights and forget what it cached with the old ones; returns the bytes.

    Args:
        llm: vLLM's ``LLM``.
        weights: names and tensors.
        part: it keeps what is not among them.

    Raises:
        SyncError: it would drop a weight (:func:`~trl_offpolicy.engines.weights.shapes.with_place`).
    """
    from vllm.config import set_current_vllm_config

    size = 0

    def counted() -> Iterable[tuple[str, Tensor]]:
        nonlocal size
        for name, tensor in weights:
            size += tensor.nbytes
            yield name, tensor

    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    config = set_current_vllm_config(llm.llm_engine.vllm_config)  # layers look for it, as in a reload by vLLM's worker
    with config, cpu_reload(runner.model), quiet_part() if part else nullcontext():
        runner.reload_weights(weights_iterator=with_place(counted(), *names_of(runner.model)))
    reset_prefix_cache(llm)
    llm.llm_engine.reset_encoder_cache()  # of images: reloading clears the worker's half alone, and requests then fail
    return size


def noise_in_process(llm: Callable[[], Any], noise: NormNoise) -> NoisyNorms:
    """Noise on the norms of an engine in this process.

    Args:
        llm: returns it; it is called each time.
        noise: the settings.
    """

    def model() -> Any:
        return llm().llm_engine.model_executor.driver_worker.model_runner.model

    return NoisyNorms(noise, model, lambda: reset_prefix_cache(llm()))


def reset_prefix_cache(llm: Any) -> None:
    """Forget keys and values of the old weights, also those that a connector keeps elsewhere.

    Raises:
        SyncError: the engine refuses, because requests are still running.
    """
    if llm.reset_prefix_cache(reset_connector=True) is False:
        raise SyncError(
            "The engine's prefix cache must be reset after a sync, but it declined: requests are still running. What "
            "they and later ones return would come from keys and values of the old weights. Wait for them, then sync."
        )


def score_in_process(llm: Any, ids: Sequence[Sequence[int]], *, adapter: Any = None) -> list[list[float]]:
    """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence under an engine in this process."""
    from vllm import SamplingParams

    config = getattr(getattr(llm, "llm_engine", None), "vllm_config", None)
    require_room(ids, None if config is None else config.model_config.max_model_len, "the engine in this process")
    prompts = [{"prompt_token_ids": list(row)} for row in ids]
    parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    answers = llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapter)
    return [
        [float(place[token].logprob) for token, place in zip(row[1:], answer.prompt_logprobs[1:], strict=True)]
        for row, answer in zip(ids, answers, strict=True)
    ]
