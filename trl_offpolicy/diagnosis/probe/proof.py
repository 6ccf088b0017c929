"""Compares what engine and trainer say of themselves: settings, model configuration, prompts, sampling, log-probs.

Nothing here is inferred from log-probs. What one side does not say is "not compared".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trl_offpolicy.diagnosis.attribution.evidence import Compared
from trl_offpolicy.diagnosis.probe.asked import Asked, Proof, information, not_compared, row
from trl_offpolicy.engines.effective import (
    SAMPLING_DEFAULTS,
    EngineFacts,
    facts_of_model,
    flat_config,
    tokenizer_facts,
)
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.kept import EVERY

_UNIMPORTANT = (
    "architectures", "transformers_version", "use_cache", "dtype", "torch_dtype", "initializer_range", "pretraining_tp",
    "model_type", "max_position_embeddings", "return_dict", "id2label", "label2id", "problem_type", "chunk_size",
    "is_encoder_decoder", "quantization_config", "auto_map", "name_or_path", "gradient_checkpointing",
)  # fmt: skip
"""Entries of a model's configuration that the log-probs do not depend on, or that have a row of their own."""
_UNIMPORTANT_PARTS = ("_token_id", "dropout", "output_", "router_aux", "router_z", "_experts_implementation")
_CAUSES = {"temperature": "temperature", "top_p": "truncated_sampling", "top_k": "truncated_sampling",
           "min_p": "truncated_sampling"}  # fmt: skip
_NEUTRAL: dict[str, Any] = {
    **SAMPLING_DEFAULTS, "logit_bias": None, "bad_words": None, "min_tokens": 0, "allowed_token_ids": None,
    "structured_outputs": None, "ignore_eos": False, "thinking_token_budget": None, "extra_args": None,
}  # fmt: skip
"""Options of a request that change the distribution, and their values without effect."""
_OFF: dict[str, tuple[Any, ...]] = {"top_k": (0, -1, EVERY), "bad_words": ([],), "logit_bias": ({},)}
_LABELS = {
    "norm_eps": "epsilon of the norm", "attention_scale": "scale of attention", "attention_window": "attention window",
    "attention_soft_cap": "soft-cap of attention",
}  # fmt: skip
_LOGITS = {"scale": "scale of the logits", "soft_cap": "soft-cap of the logits", "tokens": "tokens of the softmax"}
ROPE_TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3}
"""Rounding of cosines and sines by the dtype that they are kept in; others: 2e-4."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What the probe asked of, and told, the engine.

    Args:
        prompts: token ids of the prompts that the trainer scores.
        head: temperature and truncation under which the trainer scores.
        requests: the requests as they reached the engine: ``prompt_token_ids`` and ``sampling`` each; empty = unknown.
    """

    prompts: Sequence[Sequence[int]]
    head: Head
    requests: Sequence[Mapping[str, Any]] = ()


def compare_facts(engine: EngineFacts, trainer: EngineFacts, asking: Asking | None = None) -> Proof:
    """Everything but the weights.

    Args:
        engine: what the engine says.
        trainer: what the trainer's model says.
        asking: the requests of a probe; None = nothing was sampled yet.
    """
    rows = [*_precision(engine, trainer), *_model_config(engine, trainer), *_tokenizer(engine, trainer, asking)]
    rows += _parallelism(engine)
    if asking is not None:
        rows += [*_prompts(asking), *_sampling(asking)]
    rows += [*_defaults(engine), *_logprobs_mode(engine, asking)]
    return Proof(tuple(rows))


def effective_settings(
    interview: Interview | None, model: Any, tokenizer: Any, *, on_purpose: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a run's engine really runs with, and how that differs from its trainer, for ``run.json``.

    Args:
        interview: the run's engine; None = it cannot be asked.
        model: the trainer's model.
        tokenizer: the trainer's tokenizer.
        on_purpose: what makes the rollouts off-policy on purpose, by its name.

    Returns:
        ``source``, ``engine`` (its settings), ``defaults`` (of requests), ``compared`` (the topics) and ``differences``
        (rows as :class:`~trl_offpolicy.diagnosis.probe.asked.Asked`); without an engine nothing.
    """
    wanted = [
        asdict(row("sampling", what, value, "none", "on_purpose", equal=False))
        for what, value in (on_purpose or {}).items()
    ]
    if interview is None:
        return {"differences": wanted} if wanted else {}
    facts = interview.facts()
    try:
        trainer = replace(facts_of_model(model), tokenizer=tokenizer_facts(tokenizer))
    except (AttributeError, TypeError, ValueError) as error:  # a model that is not built as those of transformers
        known = {"source": facts.source, "engine": dict(facts.settings), "compared": []}
        return {**known, "why": str(error), "differences": wanted}
    proof = compare_facts(facts, trainer)
    unequal = [asdict(one) for one in proof.rows if one.outcome in ("different", "no effect")]
    return {
        "source": facts.source,
        "engine": dict(facts.settings),
        "defaults": None if facts.defaults is None else dict(facts.defaults),
        "compared": sorted(proof.compared),
        "differences": unequal + wanted,
    }


# ------------------------------------------------------------------------------------------------------- precision


def _precision(engine: EngineFacts, trainer: EngineFacts) -> list[Asked]:
    rows = []
    of_engine, of_trainer = engine.settings, trainer.settings
    dtype, own = of_engine.get("dtype"), of_trainer.get("dtype")
    if dtype is None or own is None:
        rows.append(not_compared("precision", "dtype", "the engine does not say"))
    else:
        rows.append(row("precision", "dtype", dtype, own, "precision", equal=dtype == own))
    if "quantization" in of_engine:
        kind, same = of_engine["quantization"] or "none", of_trainer.get("quantization") or "none"
        rows.append(row("precision", "quantisation of the weights", kind, same, "precision", equal=kind == same))
    kept = of_engine.get("kv_cache_torch_dtype")
    if (cache := of_engine.get("kv_cache_dtype")) is not None:
        kept = kept if cache == "auto" and kept is not None else cache
        same_as_computed = kept in ("auto", dtype)
        what = "keys and values stored as"
        rows.append(row("precision", what, kept, f"{own} (not stored)", "precision", equal=same_as_computed))
    return rows


# --------------------------------------------------------------------------------------------- model configuration


def _model_config(engine: EngineFacts, trainer: EngineFacts) -> list[Asked]:
    rows = []
    if engine.model_config is None or trainer.model_config is None:
        rows.append(not_compared("model_config", "configuration of the model", "the engine does not show it"))
    else:
        rows += config_rows(engine.model_config, trainer.model_config)
    if engine.modules is None or trainer.modules is None:
        rows.append(not_compared("model_config", "numbers of its modules", "the engine does not show them"))
        return rows
    window = engine.settings.get("max_model_len")
    for name, label in _LABELS.items():
        rows += _by_layer(label, engine.modules.get(name) or {}, trainer.modules.get(name) or {}, longest=window)
    for name, label in _LOGITS.items():
        one, other = ((side.modules or {}).get("logits", {}).get(name) for side in (engine, trainer))
        if one is not None and other is not None:
            rows.append(row("model_config", label, one, other, "model_config", equal=_close(one, other)))
    return rows + _rope(engine.modules.get("rope"), trainer.modules.get("rope"))


def config_rows(engine: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Asked]:
    """The entries of the model's configuration that both sides have: those that differ, and how many are equal."""
    one, other = flat_config(engine), flat_config(trainer)
    shared = [name for name in one if name in other and _important(name)]
    differing = [name for name in shared if not _close(one[name], other[name])]
    rows = [row("model_config", name, one[name], other[name], "model_config", equal=False) for name in differing]
    if equal := len(shared) - len(differing):
        rows.append(row("model_config", f"{equal} entries of the configuration", "equal", "equal", "", equal=True))
    return rows


def _important(name: str) -> bool:
    leaf = name.rsplit(".", 1)[-1]
    return not (leaf.startswith("_") or leaf in _UNIMPORTANT or any(part in leaf for part in _UNIMPORTANT_PARTS))


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    numbers = all(isinstance(value, int | float) for value in (one, other))
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12) if numbers else bool(one == other)


def _by_layer(label: str, engine: Mapping[str, Any], trainer: Mapping[str, Any], *, longest: int | None) -> list[Asked]:
    """One row: the first layer that differs, or that all are equal. Windows beyond the longest text count as none."""
    shared = [name for name in engine if name in trainer]
    if not shared:
        return []
    windows = "window" in label
    if windows:
        engine, trainer = ({name: _window(side[name], longest) for name in shared} for side in (engine, trainer))
    differing = [name for name in shared if not _close(engine[name], trainer[name])]
    name = (differing or shared)[0]
    counted = f"{len(differing)} of {len(shared)} differ, e.g. {name}" if differing else f"{len(shared)} layers"
    what, equal = f"{label} ({counted})", not differing
    return [row("model_config", what, engine[name], trainer[name], "model_config", equal=equal)]


def _window(value: int | None, longest: int | None) -> int | None:
    return None if value is None or value <= 0 or (longest is not None and value >= longest) else value


def _rope(engine: Mapping[str, Any] | None, trainer: Mapping[str, Any] | None) -> list[Asked]:
    """Compares cosines and sines at a few positions, and says them as the base frequency (theta) that they have."""
    if engine is None or trainer is None:
        return []
    rows = list(zip(engine["angles"], trainer["angles"], strict=False))
    if not rows or len(rows[0][0]) != len(rows[0][1]):
        return []
    gap = max(abs(a - b) for one, other in rows for a, b in zip(one, other, strict=True))
    equal = gap <= ROPE_TOLERANCE.get(engine["dtype"], 2e-4)
    what = "angles of the rotary embedding" + ("" if equal else f" (cosines and sines differ by up to {gap:.2g})")
    one, other = (f"theta {theta_of(side['angles'][0]):.4g}" for side in (engine, trainer))
    return [row("model_config", what, one, other, "model_config", equal=equal)]


def theta_of(angles: Sequence[float]) -> float:
    """The base frequency of a plain rotary embedding, from cosines and sines at position 1.

    The pair in the middle turns by theta ** -1/2 per position.
    """
    half = len(angles) // 2
    middle = half // 2
    return math.atan2(angles[half + middle], angles[middle]) ** -2 if angles[half + middle] else math.inf


# ------------------------------------------------------------------------------------------- tokenizer and prompts


def _tokenizer(engine: EngineFacts, trainer: EngineFacts, asking: Asking | None) -> list[Asked]:
    """Token ids of a test text and a test chat. A probe sends ids, so a difference shows only in requests of text."""
    if engine.tokenizer is None or trainer.tokenizer is None:
        return [not_compared("tokenizer", "tokenizer and chat template", "the engine does not show it")]
    rows = []
    for name, label in {"text": "ids of a test text", "chat": "ids of a test chat (template)"}.items():
        one, other = engine.tokenizer.get(name), trainer.tokenizer.get(name)
        equal, matters = one == other, asking is None
        rows.append(row("tokenizer", label, one, other, "prompt_difference", equal=equal, matters=matters))
    return rows


def _prompts(asking: Asking) -> list[Asked]:
    """The ids that reached the engine, against those that the trainer scores."""
    sent = {tuple(ids) for ids in asking.prompts}
    used = [tuple(request["prompt_token_ids"]) for request in asking.requests]
    if not used:
        return [not_compared("prompts", "ids of the prompts", "the engine does not show them")]
    strange = [ids for ids in used if ids not in sent]
    if not strange:
        text = f"{len(set(used))} prompts"
        return [row("prompts", "ids of the prompts", text, text, "", equal=True)]
    nearest = min(sent, key=lambda ids: (_unlike(ids, strange[0]), abs(len(ids) - len(strange[0]))))
    what = f"ids of the prompts ({len(strange)} of {len(used)} requests differ; {_how(strange[0], nearest)})"
    return [row("prompts", what, list(strange[0]), list(nearest), "prompt_difference", equal=False)]


def _unlike(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of ids that are not in a common beginning or end."""
    ahead = _common(one, other)
    behind = _common(one[::-1], other[::-1])
    return 1 - min(ahead + behind, len(one), len(other)) / max(len(one), len(other), 1)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _how(engine: tuple[int, ...], trainer: tuple[int, ...]) -> str:
    if engine[1:] == trainer:
        return f"the engine has {engine[0]} in front"
    if trainer[1:] == engine:
        return f"the engine lacks {trainer[0]} in front"
    if len(engine) < len(trainer) and engine == trainer[-len(engine) :]:
        return f"the engine lacks the first {len(trainer) - len(engine)}"
    if len(engine) < len(trainer) and engine == trainer[: len(engine)]:
        return f"the engine lacks the last {len(trainer) - len(engine)}"
    return f"the first difference is at {_common(engine, trainer)}"


# -------------------------------------------------------------------------------------------------------- sampling


def _sampling(asking: Asking) -> list[Asked]:
    """The options of the requests as they reached the engine, against the trainer's temperature and truncation."""
    if not asking.requests:
        return [not_compared("sampling", "options of the requests", "the engine does not show them")]
    cut = asking.head.truncation
    wanted = {**_NEUTRAL, "temperature": asking.head.temperature, "top_p": cut.top_p, "top_k": cut.top_k,
              "min_p": cut.min_p}  # fmt: skip
    rows = []
    equal = 0
    for name, value in wanted.items():
        found = [request["sampling"].get(name, _NEUTRAL[name]) for request in asking.requests]
        strange = [one for one in found if not _close(_plain(name, one), value)]
        if strange:
            cause = _CAUSES.get(name, "logit_processors")
            rows.append(row("sampling", name, strange[0], value, cause, equal=False))
        else:
            equal += 1
    return [*rows, row("sampling", f"{equal} options of the requests", "equal", "equal", "", equal=True)]


def _plain(name: str, value: Any) -> Any:
    """The value, or the one that this kit uses for "off"."""
    return _NEUTRAL[name] if value is None or value in _OFF.get(name, ()) else value


def _defaults(engine: EngineFacts) -> list[Asked]:
    """Options that the engine gives to requests which leave them out, and code that changes logits."""
    rows = []
    if (processors := engine.settings.get("logits_processors")) is not None:
        own = ", ".join(map(str, processors)) or "none"
        rows.append(row("sampling", "logits processors", own, "none", "logit_processors", equal=not processors))
    if engine.defaults is None:
        what = "defaults of requests (generation_config)"
        return [*rows, information("sampling", what, "not shown (this kit's requests set every option)")]
    for name, value in engine.defaults.items():
        if name in SAMPLING_DEFAULTS and not _close(_plain(name, value), SAMPLING_DEFAULTS[name]):
            what = f"{name} of requests that leave it out (generation_config)"
            cause = _CAUSES.get(name, "logit_processors")
            # This kit's requests set every option, so the default acts only on requests of others.
            rows.append(row("sampling", what, value, SAMPLING_DEFAULTS[name], cause, equal=False, matters=False))
    return rows


def _logprobs_mode(engine: EngineFacts, asking: Asking | None) -> list[Asked]:
    """Raw log-probs are those before temperature, truncation and penalties; without these they are the same."""
    mode = engine.settings.get("logprobs_mode")
    if mode is None:
        return [not_compared("logprobs_mode", "which log-probs it reports", "the engine does not say")]
    plain = asking is not None and _samples_plainly(asking)
    equal = mode == "processed_logprobs"
    matters = not (mode == "raw_logprobs" and plain)
    return [row("logprobs_mode", "which log-probs it reports", mode, "processed_logprobs", "unreported_sampling",
                equal=equal, matters=matters)]  # fmt: skip


def _samples_plainly(asking: Asking) -> bool:
    neutral = all(
        _close(_plain(name, request["sampling"].get(name)), value)
        for request in asking.requests
        for name, value in _NEUTRAL.items()
    )
    return neutral and bool(asking.requests)


# ----------------------------------------------------------------------------------------- parallelism and the rest


def _parallelism(engine: EngineFacts) -> list[Asked]:
    settings = engine.settings
    if "tensor_parallel_size" not in settings:
        rows = [not_compared("parallelism", "tensor parallel size", "the engine does not say")]
    else:
        size = settings["tensor_parallel_size"]
        rows = [row("parallelism", "tensor parallel size", size, 1, "parallelism", equal=size == 1)]
        experts = bool(settings.get("enable_expert_parallel"))
        rows.append(row("parallelism", "expert parallel", experts, False, "parallelism", equal=not experts))
    for name, topic in _SHOWN.items():
        if name in settings:
            rows.append(information(topic, name.replace("_", " "), settings[name]))
    return rows


_SHOWN: dict[str, Compared] = {
    "pipeline_parallel_size": "parallelism",
    "data_parallel_size": "parallelism",
    "batch_invariant": "parallelism",
    "tp_invariant": "parallelism",
    "enable_prefix_caching": "parallelism",
    "enable_chunked_prefill": "parallelism",
    "speculative": "sampling",
    "attention_backend": "precision",
    "max_model_len": "model_config",
}
"""Settings of the engine that have no counterpart in a trainer."""
