"""The smallest change of this run's own settings that removes a cause, as text and YAML.

:data:`.causes.CAUSES` has a fix for any run. Where ``run.json`` holds the settings of the run, the fix here names them
and leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trl_offpolicy.diagnosis.attribution.evidence import EVICTING
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.engines.kv_cache import parse_kv_cache
from trl_offpolicy.run_folder.layout import SETTINGS

ROUNDED = ("weight_rounding", "quantization")


@dataclass(frozen=True)
class Fix:
    """What to change.

    Args:
        text: in words.
        yaml: the settings, to be put into the run's ``config.yaml`` in place of those with the same names; may be
            empty.
    """

    text: str
    yaml: str


def fix_of(cause: str, info: Mapping[str, Any] | None = None) -> Fix | None:
    """The fix of a cause for the run that ``info`` describes; None if the cause has none.

    Args:
        cause: name in :data:`.causes.CAUSES`; any other name has no fix.
        info: ``run.json``; without its entries ``settings`` and ``declared`` the fix is the one for any run.
    """
    if cause not in CAUSES:
        return None
    given = (info or {}).get(SETTINGS)
    settings = given if given and isinstance(given, Mapping) else _declared(info or {})
    found = _FITTED[cause](settings) if settings and cause in _FITTED else None
    if settings.get("framework") == LIGHTNING:
        if found is not None:
            return Fix(found.text, in_lightning(found.yaml))
        return Fix(CAUSES[cause].fix, in_lightning(CAUSES[cause].snippet, settings.get("engine")))
    return found or Fix(CAUSES[cause].fix, CAUSES[cause].snippet)


LIGHTNING = "lightning"
"""Framework of a run whose settings lie in the sections ``model``, ``data`` and ``trainer`` of its configuration."""
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "offpolicy": ("model", "correction"),
    "engine": ("model", "engine"),
    "control": ("model", "control"),
    "learner_kv_cache": ("model", "learner_kv_cache"),
    "learning_rate": ("model", "learning_rate"),
    "lora_dropout": ("model", "adapter", "lora_dropout"),
    "generation_kwargs": ("model", "sampling", "extra"),
    **{name: ("model", "sampling", name) for name in ("temperature", "top_p", "top_k", "min_p")},
    **{name: ("data", name) for name in ("num_iterations", "steps_per_generation")},
}
"""Setting of the TRL trainer -> where it lies in a configuration of Lightning."""
_ELSEWHERE = {"check_sync": ("model", "sync_check")}
"""The same of what the TRL trainer has in ``engine``. Its other options of an engine alone have no counterpart."""
_TRL_ENGINE = ("check_sync", "transfer", "logprobs_mode")


def in_lightning(text: str, engine: Any = None) -> str:
    r"""Settings of the TRL trainer as those of the Lightning trainer, a line for each section.

    Args:
        text: YAML.
        engine: options of the run's engine that stay as they are: a configuration replaces ``model.engine`` as a whole.

    Example:
        >>> in_lightning("offpolicy: paper/tis\nnum_iterations: 1\n")
        'model: {correction: paper/tis}\ndata: {num_iterations: 1}\n'
    """
    import yaml

    nested: dict[str, Any] = {}
    settings = dict(yaml.safe_load(text) or {})
    asked = settings.pop("engine", {})
    own = {name: asked.pop(name) for name in _TRL_ENGINE if name in asked}
    _put(nested, {_ELSEWHERE[name]: value for name, value in own.items() if name in _ELSEWHERE})
    if asked:
        settings["engine"] = {**(engine if isinstance(engine, dict) else {}), **asked}
    _put(nested, {_SECTIONS[name]: value for name, value in settings.items() if name in _SECTIONS})
    if settings.get("fp16"):
        nested["trainer"] = {"precision": "16-mixed"}
    return "".join(_yaml(section, nested[section]) for section in ("model", "data", "trainer") if section in nested)


def _put(nested: dict[str, Any], values: Mapping[tuple[str, ...], Any]) -> None:
    for path, value in values.items():
        place = nested
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value


def _declared(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a run without :data:`SETTINGS` declares of its precision, as settings; empty if it declares none."""
    sides = info.get("declared") or {}
    engine, trainer = sides.get("engine") or {}, sides.get("trainer") or {}
    if not engine.get("dtype") or not trainer.get("dtype"):
        return {}
    own = {"dtype": engine["dtype"]}
    if engine.get("quantization") not in (None, "none"):
        own["weight_rounding"] = engine["quantization"]
    if engine.get("kv_cache") not in (None, "auto") and EVICTING not in engine["kv_cache"]:
        own["kv_cache_dtype"] = engine["kv_cache"]
    return {"engine": own, "dtype": trainer["dtype"]}


def _precision(settings: Mapping[str, Any]) -> Fix | None:
    """Remove the rounding of the engine's weights or cache; else give both sides the same data type."""
    engine = dict(settings.get("engine") or {})
    rounded = {name: engine.pop(name) for name in ROUNDED if engine.get(name)}
    if str(engine.get("kv_cache_dtype", "auto")) not in ("auto", str(engine.get("dtype"))):
        rounded["kv_cache_dtype"] = engine.pop("kv_cache_dtype")
    if (cache := parse_kv_cache(engine.get("kv_cache"))) is not None and cache.rounding is not None:
        rounded["kv_cache"] = cache.text
        del engine["kv_cache"]
        if cache.evicts:  # which is no rounding, and stays
            engine["kv_cache"] = {"keep_first": cache.keep_first, "keep_last": cache.keep_last}
    if rounded:
        what = " and ".join(f"{name}: {value}" for name, value in rounded.items())
        return Fix(
            f"The engine rounds ({what}). Without it both sides hold the same numbers. If the engine must be "
            "quantised, keep it and correct with truncated token weights (paper/tis).",
            _yaml("engine", engine),
        )
    trainer = _trainer_dtype(settings)
    if engine.get("dtype", "auto") == trainer:
        return None
    before = engine.get("dtype", "auto")
    return Fix(
        f"The engine computes in {before} and the trainer in {trainer}. Use {trainer} in the engine.",
        _yaml("engine", {**engine, "dtype": trainer}),
    )


def _compressed(settings: Mapping[str, Any]) -> Fix | None:
    """The learner's forward repeats the cache that the configuration gives the engine, or none if it gives none."""
    engine = settings.get("engine")
    if not isinstance(engine, Mapping) or engine.get("kv_cache") is None:
        if settings.get("learner_kv_cache") is None:
            return None
        text = "The learner computes over a compressed KV cache, and the engine does not. Let both hold all tokens."
        return Fix(text, "learner_kv_cache: null\n")
    return Fix(
        "The learner computes over all keys and values, and the engine does not. Let the learner's forward repeat what "
        "the engine's cache holds.",
        "learner_kv_cache: engine\n",
    )


def _trainer_dtype(settings: Mapping[str, Any]) -> str:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if settings.get(name):
            return dtype
    return str(settings.get("dtype") or "float32")


def _dropout(settings: Mapping[str, Any]) -> Fix:
    adapter = bool(settings.get("lora_dropout"))
    yaml = "disable_dropout: true\n" + ("lora_dropout: 0.0\n" if adapter else "")
    text = "Switch dropout off in the model"
    return Fix(text + (" and in the adapter." if adapter else "."), yaml)


def _staleness(settings: Mapping[str, Any]) -> Fix | None:
    """One optimizer step per generation."""
    per_generation = int(settings.get("steps_per_generation") or 1)
    accumulated = int(settings.get("gradient_accumulation_steps") or 1)
    lines, said = [], []
    if int(settings.get("num_iterations") or 1) > 1:
        said.append(f"num_iterations is {settings['num_iterations']}")
        lines.append("num_iterations: 1")
    if per_generation > accumulated:
        said.append(f"{per_generation // accumulated} optimizer steps use one generation")
        lines.append(f"steps_per_generation: {accumulated}")
    if not said:
        return None
    return Fix(f"{' and '.join(said)}: use each generation once.", "\n".join(lines) + "\n")


_FITTED: Mapping[str, Callable[[Mapping[str, Any]], Fix | None]] = {
    "compressed_cache": _compressed,
    "precision": _precision,
    "dropout": _dropout,
    "policy_staleness": _staleness,
}


def _yaml(name: str, value: Mapping[str, Any]) -> str:
    import yaml

    flow = yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"{name}: {flow}\n"
