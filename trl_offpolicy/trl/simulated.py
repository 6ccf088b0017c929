"""A simulated engine in the TRL trainer: :mod:`trl_offpolicy.rollouts.compressed_forward` with TRL's ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_offpolicy.rollouts.compressed_forward import SimulatedSampler


def check_simulated(args: Any, given: Mapping[str, Any]) -> None:
    """Raise if what samples cannot have the KV cache that the configuration asks for.

    Args:
        args: the configuration.
        given: arguments of the trainer by name.

    Raises:
        ValueError: the message names the option that does not go with it.
    """
    if args.use_vllm:
        if isinstance(args.engine, Mapping) and args.engine.get("kv_cache") is not None:
            raise ValueError(
                "engine.kv_cache must be left out with use_vllm: true, as vLLM cannot evict keys and values. Its own "
                "kv_cache_dtype: fp8 rounds them."
            )
        return
    simulated: SimulatedSampler | None = args.simulated
    if simulated is None:
        return
    refused = {
        "engine.logit_fusion: no test has run both": args.logit_fusion is not None,
        "use_transformers_continuous_batching: true": args.use_transformers_continuous_batching,
        "a rollout_func, which samples by itself": given.get("rollout_func") is not None,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"{simulated.options} must be left out with {what}.")


class TrainerSimulated:
    """Lets a trainer's generations sample as the simulated engine does. It does nothing without one.

    Args:
        trainer: the built trainer.
        simulated: the engine; None = the trainer's model samples as it is.

    Raises:
        NotImplementedError: the model is sharded; no test has run that.
    """

    def __init__(self, trainer: Any, simulated: SimulatedSampler | None) -> None:
        self._trainer, self._simulated = trainer, simulated
        if simulated is not None and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
            raise NotImplementedError(
                f"{simulated.options} must be left out with DeepSpeed and FSDP: no test has run that."
            )

    def turn(self, sample: Callable[..., Any], prompt_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        """TRL's ``_generate_single_turn``; with a simulated engine also the log-probs of what it sampled."""
        if self._simulated is None:
            return sample(prompt_ids, *args, **kwargs)
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        with self._simulated.sampling(model, len(prompt_ids)) as noted:
            completions, _ = sample(prompt_ids, *args, **kwargs)
        return completions, noted.rows(completions)
