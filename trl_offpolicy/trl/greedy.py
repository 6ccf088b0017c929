"""ReMax's greedy completions in the TRL trainer: one for each prompt of a generation batch, by the same engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from trl import GRPOTrainer
from trl.data_utils import is_conversational

from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.greedy import NO_IMAGES, baseline_of_rows, check_greedy
from trl_offpolicy.trl.agents import read_reply
from trl_offpolicy.trl.rebinding import rebound

_OWN = ("temperature", "top_k", "top_p", "min_p", "n", "do_sample")
"""Options of a request that would override what makes it greedy."""


def check_trainer_greedy(args: Any, stages: Stages | None, given: Mapping[str, Any]) -> None:
    """Raise if advantages read greedy completions that this trainer cannot sample.

    Args:
        args: the configuration.
        stages: with the estimator of the advantages.
        given: keyword arguments of the trainer.

    Raises:
        NotImplementedError: an option does not go with them; the message names it.
    """
    rows = args.per_device_train_batch_size * args.steps_per_generation
    refused = {name: bool(given.get(name)) for name in ("rollout_func", "tools", "environment_factory")}
    refused |= {"async_rollouts": args.async_rollouts is not None, "logit_fusion": args.logit_fusion is not None}
    refused["groups that are spread over ranks"] = rows % args.num_generations != 0
    held_out = args.num_generations_eval or args.num_generations
    evaluates = args.eval_strategy != "no"
    refused["groups of evaluations that are spread over ranks"] = (
        evaluates and args.per_device_eval_batch_size % held_out != 0
    )
    check_greedy(stages, refused)


def greedy_rewards(trainer: Any, inputs: Sequence[Mapping[str, Any]]) -> Tensor:
    """(B,) total reward of the greedy completion of each row's prompt, at the weights that sampled the batch.

    Nothing of the completions is logged, recorded, counted or learned from. All ranks call it.

    Args:
        trainer: the trainer; its engine has the weights already.
        inputs: B rows of the data set, whole groups after each other.

    Raises:
        NotImplementedError: the prompts have images, or rows of one prompt are on several ranks.
    """
    count = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    if len(inputs) % count:  # in an evaluation that the configuration does not announce
        raise NotImplementedError(
            f"per_device_eval_batch_size must be a multiple of num_generations_eval ({count}) with advantages 'remax', "
            f"but got {len(inputs)}: a prompt's rows must be on one rank."
        )
    rows = list(inputs[::count])
    prompts = copy.deepcopy([row["prompt"] for row in rows])
    ids, images, fields = trainer._tokenize_prompts(prompts)
    if images is not None or any(row.get(name) is not None for row in rows for name in ("image", "images")):
        raise NotImplementedError(NO_IMAGES)
    engine = trainer.vllm_generation if trainer.use_vllm else None
    seen = len(getattr(engine, "calls", ()))
    sample = partial(GRPOTrainer._generate_single_turn, trainer)
    counted = trainer.model.training
    with trainer._clock.part("generation", counted=counted), _greedy(trainer, engine):
        completion_ids, _ = trainer._simulated.turn(sample, ids, None, fields, 1)
    if engine is not None:  # what it reports belongs to rows that are learned from
        del engine.calls[seen:]
        for store in (engine.kept, engine.routes):
            if store is not None:
                store.clear()
    completions = _texts(trainer, prompts, ids, completion_ids)
    quiet = {"_log_completion_extra": _ignore, "_log_metric": _ignore}
    with trainer._clock.part("rewards", counted=counted), rebound(trainer, **quiet):
        by_function = GRPOTrainer._calculate_rewards(trainer, rows, prompts, completions, completion_ids)
    first = trainer.accelerator.process_index * len(rows)  # of all ranks
    return baseline_of_rows(by_function[first : first + len(rows)], trainer.reward_weights, count)


def _greedy(trainer: Any, engine: Any) -> AbstractContextManager[None]:
    """A context in which the trainer's engine takes the most likely token."""
    if engine is not None:
        extra = {name: value for name, value in (engine.generation_kwargs or {}).items() if name not in _OWN}
        return rebound(engine, top_k=1, top_p=1.0, min_p=None, generation_kwargs=extra, screen=None)
    config = copy.deepcopy(trainer.generation_config)
    config.top_k, config.top_p, config.min_p = 1, 1.0, None
    return rebound(trainer, generation_config=config)


def _texts(trainer: Any, prompts: Sequence[Any], ids: Sequence[Any], completion_ids: Sequence[Any]) -> list[Any]:
    """The completions as the reward functions get them, made as TRL makes those of the batch."""
    if not is_conversational({"prompt": prompts[0]}):
        return list(trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True))
    tokenizer = trainer._tokenizer
    templates = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
    if any(one is not None for one in templates):
        pairs = zip(ids, completion_ids, strict=True)
        return [[read_reply(tokenizer, completion, prefix=prompt, tools=None)] for prompt, completion in pairs]
    texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]


def _ignore(*_: Any, **__: Any) -> None:
    """In the place of what logs from within a reward function."""
