"""Logit fusion in the TRL trainer: :mod:`trl_offpolicy.engines.logit_fusion` with TRL's generation by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_offpolicy.engines.logit_fusion import OPTION, LogitFusion, TeacherMix, load_teacher
from trl_offpolicy.rollouts.sampler_stats import sampler_stats
from trl_offpolicy.stats import Stats


def check_fusion(args: Any, fusion: LogitFusion | None, given: Mapping[str, Any]) -> None:
    """Raise if a teacher cannot take part in what samples.

    Args:
        args: the configuration.
        fusion: its ``engine.logit_fusion``.
        given: arguments of the trainer by name.

    Raises:
        ValueError: the message names the option that does not go with it.
    """
    if fusion is None:
        return
    tools = bool(given.get("tools") or given.get("environment_factory"))
    refused = {
        "use_vllm: true (vLLM cannot run two models in lockstep)": args.use_vllm,
        "use_transformers_continuous_batching: true": args.use_transformers_continuous_batching,
        "a rollout_func, which samples by itself": given.get("rollout_func") is not None,
        "tools, because their turns have prompts of their own, beside logit_fusion.difficulty": (
            tools and fusion.difficulty is not None
        ),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"{OPTION} must be left out with {what}.")


class TrainerFusion:
    """Lets a teacher take part in a trainer's generations. It does nothing without ``engine.logit_fusion``.

    Args:
        trainer: the built trainer.
        fusion: the settings; None = no teacher.

    Raises:
        NotImplementedError: the model is sharded; no test has run that.
    """

    def __init__(self, trainer: Any, fusion: LogitFusion | None) -> None:
        self._trainer, self._mix = trainer, None
        if fusion is None:
            return
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise NotImplementedError(f"{OPTION} must be left out with DeepSpeed and FSDP: no test has run that.")
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._mix = TeacherMix(fusion, load_teacher(fusion, model, trainer._tokenizer))

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Set the teacher's shares for a generation batch; in an evaluation the student is alone."""
        if self._mix is not None:
            state = self._trainer.state
            learning = self._trainer.model.training
            share = self._mix.fusion.share(state.global_step, state.max_steps) if learning else 0.0
            self._mix.plan(rows, share=share)

    def turn(self, sample: Callable[..., Any], prompt_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        """TRL's ``_generate_single_turn``; with a teacher also the log-probs of the mixture."""
        if self._mix is None:
            return sample(prompt_ids, *args, **kwargs)
        images, fields, *_ = args
        if images is not None or fields:
            raise NotImplementedError(f"{OPTION} must be left out with images: the teacher is shown text alone.")
        with self._mix.sampling(self._trainer.accelerator.unwrap_model(self._trainer.model), prompt_ids) as noted:
            completions, _ = sample(prompt_ids, *args, **kwargs)
        return completions, noted.rows(completions)

    def stats(self) -> Stats:
        """What the sampler of this generation batch says of itself, the teacher's share among it."""
        engine = getattr(self._trainer, "vllm_generation", None)
        return sampler_stats(engine, self._trainer.accelerator.device, mix=self._mix)
