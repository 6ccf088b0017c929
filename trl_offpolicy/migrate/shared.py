"""Steps that the frameworks have in common: batch sizes, schedules, the KL term, adapters, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from trl_offpolicy.migrate.rules import Carried, Found, Left, Source, count, number, switch, text, whole

KL = "offpolicy.objective.kl"
MODEL = "how the framework places and runs the model; set accelerate's configuration here"
DATA = "set the data here: dataset_name, question_column, answer_column, or your own script's dataset"
REWARD = "set the reward function here"
REFERENCE = "the reference model is loaded where a KL term is set here, and scored with the micro-batches of the loss"
PROMPTS = "no prompt is filtered or cut here: take those that are too long out of the files"
TRACKED = "the tracker's own variables name the project here, e.g. WANDB_PROJECT"
SIZE_FIELDS = {
    "num_generations": "num_generations: responses of a prompt",
    "per_device_train_batch_size": "per_device_train_batch_size: responses of a forward pass on one device",
    "gradient_accumulation_steps": "gradient_accumulation_steps: forward passes of an optimizer step on one device",
    "steps_per_generation": "steps_per_generation: forward passes on one device that learn from a generation batch",
}
"""Our fields that hold the batch sizes, with what to write where they cannot be computed."""
LOGGING = "set logging here: report_to, logging_steps, log_completions"
EVALUATION = "set evaluation here: eval_strategy, eval_steps, per_device_eval_batch_size"
CHECKPOINTS = "set checkpoints here: save_steps, save_total_limit, resume"
CRITIC = "the trainers here have no critic"
ENGINE = "set the engine here: the mapping engine passes arguments to vLLM"
TOOLS = "set turns and tools here: tools, max_tool_calling_iterations, environment_factory"
ASYNC = "sampling ahead is set by async_rollouts here (docs/async.md), with vllm_mode: server"
LOSS_TO_SET = {
    "offpolicy.objective.policy_loss": "policy_loss: put it into offpolicy.objective (docs/objectives.md lists the "
    "losses), and take this line out; without it the loss is PPO's clip"
}
"""What the user must choose where a framework's loss has no counterpart: :func:`no_loss`."""
ADVANTAGES_TO_SET = {
    "offpolicy.advantages": "advantages: put them into offpolicy (docs/objectives.md lists the estimators), and take "
    "this line out; without it they are TRL's"
}
"""The same for advantages: :func:`no_estimator`."""
AGGREGATION_TO_SET = {
    "offpolicy.objective.aggregation": "aggregation: put it into offpolicy.objective (docs/objectives.md lists the "
    "means), and take this line out; without it the loss is a mean over tokens"
}
"""The same for the mean over tokens and responses."""
FIELDS_TO_SET = {
    **AGGREGATION_TO_SET,
    **SIZE_FIELDS,
    **LOSS_TO_SET,
    **ADVANTAGES_TO_SET,
    "max_completion_length": "max_completion_length: tokens of a response",
    "lora_target_modules": "lora_target_modules: as the model in transformers names them, or all-linear",
    "epsilon": "epsilon: the lower bound of PPO's clip, above 0 (epsilon_high: the upper one)",
    "question_column": "question_column: the column of the question, or of the messages of a chat",
    "answer_column": "answer_column: the column of the answer, or null",
}
"""Every field that may be ``TO_SET``, with what to write."""
MEGATRON_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Linear layers of a Llama-like model by Megatron's names."""
SIZES = "prompts, responses and devices are not all known; give them as overrides"
OTHER_MODELS = "the trainers here have no such model"


@dataclass(frozen=True)
class Batch:
    """Batch sizes in the framework's words, as (setting, value) where the file or a default gives one.

    Args:
        keys: all settings that were read.
        prompts: prompts of a generation batch.
        generations: responses of a prompt.
        step: responses of an optimizer step.
        micro: responses of a forward pass on one device; None = not given.
        processes: devices that train.
        where: how the number of devices was found, in words.
    """

    keys: tuple[str, ...]
    prompts: int
    generations: int
    step: int
    micro: int | None
    processes: int
    where: str


def batch(sizes: Batch) -> Iterable[Found]:
    """TRL's batch sizes: per device, accumulated, and micro-batches of a generation.

    The generation batch, the responses of an optimizer step and the number of responses per prompt stay the same.
    """
    responses = sizes.prompts * sizes.generations
    if sizes.step % sizes.processes or responses % sizes.step:
        yield Left(
            sizes.keys,
            f"a generation batch of {sizes.prompts} x {sizes.generations} responses and steps of {sizes.step} do not "
            f"divide among {sizes.processes} devices; set num_generations, per_device_train_batch_size, "
            "gradient_accumulation_steps and steps_per_generation",
            to_set=SIZE_FIELDS,
        )
        return
    share = sizes.step // sizes.processes
    micro = gcd(share, sizes.micro or 1)
    steps = responses // sizes.step
    fields = {
        "num_generations": sizes.generations,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": share // micro,
    }
    if steps > 1:
        fields["steps_per_generation"] = steps * fields["gradient_accumulation_steps"]
    why = (
        f"{sizes.prompts} prompts x {sizes.generations} responses a generation, {sizes.step} responses a step, on "
        f"{sizes.processes} device{'s' * (sizes.processes > 1)} ({sizes.where})"
    )
    if sizes.micro is None:
        why += "; the size of a forward pass is not given: 1 response, raise it and lower gradient_accumulation_steps"
    elif micro != sizes.micro:
        why += f"; {sizes.micro} responses a forward pass do not divide a step, {micro} do"
    if sizes.generations < 2:
        needed = to_set(*(name for name in SIZE_FIELDS if name != "steps_per_generation"))
        yield Left(sizes.keys, f"{why}; GRPO needs at least 2 responses of a prompt", to_set=needed)
        return
    yield Carried(sizes.keys, fields, why)


def sizes_unknown(source: Source, names: tuple[str, ...], generations: str, why: str) -> Iterable[Found]:
    """What is left of batch sizes that cannot be computed: the responses of a prompt alone are carried.

    Args:
        source: the configuration.
        names: all settings that were read.
        generations: the one that counts the responses of a prompt.
        why: the reason for all others.
    """
    yield from responses_of_a_prompt(source, generations)
    said = () if given_or(source, generations) is None else (generations,)
    keys = tuple(key for key in source.given(*names) if key not in said)
    if keys:
        yield Left(keys, why, to_set=SIZE_FIELDS)


def responses_of_a_prompt(source: Source, key: str) -> Iterable[Found]:
    """``num_generations`` alone, given or by the framework's default, where the batch sizes are not computed."""
    value = given_or(source, key)
    if value is None:
        return
    shown = source.settings.shown(key)
    if value == 1:
        why = "1 response of a prompt, and GRPO needs at least 2: set num_generations"
        yield Left(source.given(key), why, pattern=shown, to_set=to_set("num_generations"))
    else:
        why = "" if source.has(key) else f"the default of {shown}"
        yield Carried(source.given(key), {"num_generations": value}, why)


def reward_kl(keys: tuple[str, ...], coef: float, estimator: str, why: str, *, max_value: float | None = 10.0) -> Found:
    """``offpolicy.objective.kl`` with its place in the reward."""
    cap = {} if max_value is None else {"max_value": max_value}
    return Carried(keys, {KL: {"coef": coef, "estimator": estimator, **cap, "place": "reward"}}, why)


def kl_term(
    keys: tuple[str, ...], coef: float, estimator: str, *, max_value: float | None = None, ratio_weighted: bool = False
) -> Found:
    """``beta`` if TRL computes the same penalty, else ``offpolicy.objective.kl``, from which beta follows."""
    if coef == 0:
        return Carried(keys, {"beta": 0.0}, "no KL term")
    if estimator == "k3" and max_value is None:
        return Carried(keys, {"beta": coef, "use_bias_correction_kl": ratio_weighted}, "TRL's estimator is k3 too")
    penalty: dict[str, Any] = {"coef": coef}
    penalty |= {"estimator": estimator} if estimator != "k3" else {}
    penalty |= {"max_value": max_value} if max_value is not None else {}
    penalty |= {"ratio_weighted": True} if ratio_weighted else {}
    return Carried(keys, {KL: penalty}, "TRL's beta follows from it")


def clip(source: Source, low: str, high: str, dual: str | None = None) -> Iterable[Found]:
    """PPO's clip: TRL's epsilon, epsilon_high and, for the dual clip, delta."""
    shown, below = source.settings.shown, source.get(low)
    above, cap = source.get(high), source.get(dual) if dual else None
    keys = source.given(low, high, *([dual] if dual else []))
    if not keys or (below is None and above is None):  # 0.2 is the default everywhere
        return
    if 0 in (below, above):
        yield Left(keys, "a bound of 0 is refused here: set epsilon", to_set=to_set("epsilon"))
        return
    fields: dict[str, Any] = {"epsilon": number(shown(low), below if below is not None else above)}
    if above is not None and number(shown(high), above) != fields["epsilon"]:
        fields["epsilon_high"] = above
    if dual is not None and cap is not None:
        fields["delta"] = number(shown(dual), cap)
    yield Carried(keys, fields, "TRL's delta is the dual clip" if cap is not None else "")


def scheduler(
    source: Source, kind: str, steps: str | None = None, share: str | None = None, per_step: Steps | None = None
) -> Iterable[Found]:
    """``lr_scheduler_type`` and ``warmup_steps``; a share of all steps is a warmup below 1 in transformers.

    Args:
        source: the configuration.
        kind: key of the schedule's name.
        steps: key of the warmup in whole steps.
        share: key of the warmup as a share of all steps.
        per_step: where the framework moves the schedule once a generation; None = every optimizer step.
    """
    keys = source.given(kind, *(key for key in (steps, share) if key))
    name, shown = source.get(kind, "constant"), source.settings.shown
    if name is None and not keys:
        return
    warmup: float = 0
    if steps is not None and source.get(steps) is not None and number(shown(steps), source.get(steps)) > 0:
        warmup = whole(shown(steps), source.get(steps)) * (per_step.number if per_step else 1)
    elif share is not None and source.get(share) is not None:
        warmup = number(shown(share), source.get(share))
        if not 0 <= warmup < 1:
            raise ValueError(f"{shown(share)} must be a share in [0, 1), but got {warmup!r}.")
    names = {
        "constant": "constant_with_warmup" if warmup else "constant",
        "constant_with_warmup": "constant_with_warmup" if warmup else "constant",
        "cosine": "cosine",
        "linear": "linear",
        "cosine_with_min_lr": "cosine_with_min_lr",
    }
    name = text(shown(kind), name or "constant").lower()
    if name not in names:
        yield Left(keys, f"the schedule {name!r} has no counterpart here; set lr_scheduler_type and warmup_steps")
        return
    fields: dict[str, Any] = {"lr_scheduler_type": names[name]}
    why = "" if keys else f"the default of {kind}"
    if warmup:
        fields["warmup_steps"] = warmup
        why = times(per_step) if per_step and warmup >= 1 else why
    yield Carried(keys, fields, why)


def betas(source: Source, key: str) -> Iterable[Found]:
    """Adam's two betas."""
    given = source.get(key)
    if given is None:
        return
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ValueError(f"{source.settings.shown(key)} must be [beta1, beta2], but got {given!r}.")
    first, second = (number(source.settings.shown(key), one) for one in given)
    why = "" if source.has(key) else f"the default of {key}"
    yield Carried(source.given(key), {"adam_beta1": first, "adam_beta2": second}, why)


def to_set(*fields: str) -> dict[str, str]:
    """Fields of ours that the user must write, each with what to write."""
    return {name: FIELDS_TO_SET[name] for name in fields}


def no_loss(keys: tuple[str, ...], kind: str, *, pattern: str = "") -> Found:
    """A loss without a counterpart: the user must say which one to take."""
    why = f"the loss {kind!r} has no counterpart in this table; set offpolicy.objective.policy_loss"
    return Left(keys, why, pattern, LOSS_TO_SET)


def no_estimator(keys: tuple[str, ...], how: str, *, pattern: str = "", default: bool = True) -> Found:
    """Advantages without a counterpart: the user must say which ones to take."""
    why = f"the estimator {how} has no counterpart here; set offpolicy.advantages (docs/objectives.md)"
    return Left(keys, why, pattern, ADVANTAGES_TO_SET, default)


def mapping_fields(source: Source, fields: Iterable[str]) -> Iterable[Found]:
    """Fields of ours whose value is a mapping: ``{"name.a": 1, "name.b.c": 2}`` is ``name: {a: 1, b: {c: 2}}``."""
    for name in fields:
        keys = tuple(key for key in source.settings.values if key.startswith(f"{name}."))
        if not keys:
            continue
        value: dict[str, Any] = {}
        for key in keys:
            *sections, last = key.split(".")[1:]
            place = value
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = source.settings.values[key]
        yield Carried(keys, {name: value})


def lora(
    source: Source,
    rank: str,
    alpha: str,
    targets: str,
    dropout: str | None = None,
    on: str | None = None,
    *,
    every_linear: bool = False,
) -> Iterable[Found]:
    """Peft's LoRA; a rank of 0, or the switch ``on`` at false, is a full model.

    The framework's own alpha and modules are written out, because TRL's are others (32, and peft's for the model).
    Megatron's names of modules become those of transformers.

    Args:
        source: the configuration.
        rank: key of the adapter's rank.
        alpha: key of its alpha.
        targets: key of the modules that have one.
        dropout: key of its dropout.
        on: key of a switch; None = a rank above 0 is on.
        every_linear: no modules are all linear ones there.
    """
    keys = source.given(rank, alpha, targets, *(key for key in (dropout, on) if key))
    shown = source.settings.shown
    if on is not None and not switch(shown(on), source.get(on, False)):
        if keys:
            yield Left(keys, "no adapter is trained")
        return
    value = source.get(rank, 0)
    if on is None and (value is None or whole(shown(rank), value) == 0):
        if keys:
            yield Left(keys, "no adapter is trained")
        return
    fields: dict[str, Any] = {"use_peft": True, "lora_r": count(shown(rank), value)}
    if (strength := source.get(alpha)) is not None:
        fields["lora_alpha"] = whole(shown(alpha), strength)
    fields["lora_dropout"] = number(shown(dropout), source.get(dropout)) if dropout and source.get(dropout) else 0.0
    modules = source.get(targets) or ("all-linear" if every_linear else None)
    named, strange = _modules_here(modules)
    if named and not strange:
        fields["lora_target_modules"] = named
    unset = [key for key in (rank, alpha, targets) if source.get(key) and not source.has(key)]
    said = [f"the default{'s' * (len(unset) > 1)} of {', '.join(unset)}" if unset else ""]
    said.append("modules are Megatron's there" if named != modules else "")
    yield Carried(tuple(key for key in keys if key != targets or not strange), fields, "; ".join(filter(None, said)))
    if strange:
        why = f"Megatron's names of modules ({', '.join(strange)}); set lora_target_modules"
        yield Left(source.given(targets), why, pattern=shown(targets), to_set=to_set("lora_target_modules"))


def _modules_here(modules: Any) -> tuple[Any, list[str]]:
    """(Megatron's names as those of transformers, names of Megatron's that have no equal)."""
    if not isinstance(modules, list) or not any("linear_" in str(one) for one in modules):
        return modules, []
    strange = [str(one) for one in modules if "linear_" in str(one) and one not in MEGATRON_MODULES]
    named = [name for one in modules for name in MEGATRON_MODULES.get(one, (one,))]
    return list(dict.fromkeys(named)), strange


@dataclass(frozen=True)
class Steps:
    """How the framework's steps, one a generation batch, become TRL's, one an optimizer step.

    Args:
        number: optimizer steps of a generation, as the printed YAML has them.
        why: what else to say of a converted number.
        unit: what the framework counts by.
    """

    number: int
    why: str = ""
    unit: str = "a generation"


def steps_per_generation(sizes: Iterable[Found], epochs: Any = 1) -> Steps:
    """Optimizer steps that a generation batch serves.

    They are counted from the batch sizes that the YAML holds: without them TRL takes one step a generation, times
    ``num_iterations``, whatever the framework's own default sizes are.

    Args:
        sizes: what the framework's step makes of the batch sizes.
        epochs: passes over the batch, which become ``num_iterations``.
    """
    passes = epochs if isinstance(epochs, int) and epochs > 0 else 1
    for one in sizes:
        if isinstance(one, Carried) and "gradient_accumulation_steps" in one.fields:
            accumulated = one.fields["gradient_accumulation_steps"]
            return Steps(one.fields.get("steps_per_generation", accumulated) // accumulated * passes)
    return Steps(passes, "generations there; multiply it by the optimizer steps of a generation once you set the sizes")


def saving(source: Source, key: str, steps: Steps, what: str = "save_steps") -> Iterable[Found]:
    """Checkpoints every so many generations there, every so many optimizer steps here."""
    if not source.has(key):
        return
    value = source.settings.values[key]
    if value is None or value is False or whole(source.settings.shown(key), value) <= 0:
        yield Carried((key,), {"save_strategy": "no"})
        return
    yield Carried((key,), {what: value * steps.number}, times(steps))


def last_step(source: Source, key: str, steps: Steps) -> Iterable[Found]:
    """``max_steps``: generations there, optimizer steps here."""
    if not source.has(key):
        return
    value = source.settings.values[key]
    if value is None or value is False or whole(source.settings.shown(key), value) <= 0:
        yield Left((key,), "null: the number of epochs decides")
        return
    yield Carried((key,), {"max_steps": value * steps.number}, times(steps))


def times(steps: Steps) -> str:
    """How a number of steps was converted, in words."""
    counted = f"times {steps.number} optimizer steps {steps.unit}" if steps.number > 1 else ""
    return "; ".join(part for part in (counted, steps.why) if part)


def given_or(source: Source, key: str, otherwise: Any = None) -> Any:
    """The value of a setting, with the framework's default, checked to be a whole number of at least 1."""
    value = source.get(key, otherwise)
    return None if value is None else count(source.settings.shown(key), value)


def no_length(source: Source, key: str) -> Iterable[Found]:
    """Says that TRL ends responses where the framework, without that setting, lets them fill the context."""
    if key not in source.settings.values and key not in source.settings.unknown:
        why = "responses may fill the context there, and end at TRL's 512 tokens here: set max_completion_length"
        yield Left((), why, pattern=source.settings.shown(key), to_set=to_set("max_completion_length"))


def left(source: Source, reasons: Mapping[str, str]) -> Iterable[Found]:
    """Settings that a step has to explain itself."""
    for key, why in reasons.items():
        if source.has(key):
            yield Left((key,), why)


def names(section: str, words: str, why: str) -> dict[str, str]:
    """``{section.word: why}``: settings that are not carried, by their names, so that a misspelt one stays unknown."""
    prefix = f"{section}." if section else ""
    return {f"{prefix}{word}": why for word in words.split()}
