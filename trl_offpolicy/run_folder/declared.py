"""Engine and trainer declare their settings in ``run.json``; the doctor compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trl_offpolicy.engines.kv_cache import KVCache, kv_cache_of, parse_kv_cache


def declared_sides(
    model: nn.Module,
    *,
    engine: Mapping[str, Any] | None,
    autocast: str | None,
    sampling: Mapping[str, Any],
    tools: bool | None = None,
) -> dict[str, dict[str, Any]]:
    """The settings of both sides, as fields of :class:`~trl_offpolicy.diagnosis.attribution.evidence.Declared`.

    Args:
        model: the trainer's model.
        engine: options of the engine; None = the trainer's model generates.
        autocast: the trainer's mixed precision; None = none.
        sampling: temperature, top_p, top_k, min_p of the engine, which this kit's trainer mirrors.
        tools: whether completions hold tool output; None = not known.
    """
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    options = engine or {}
    rounding = options.get("quantization") or options.get("weight_rounding")
    kind = rounding.get("type") if isinstance(rounding, Mapping) else rounding
    engine_dtype = options.get("dtype") or (None if torch.cuda.is_available() else dtype)
    same = {"temperature": sampling["temperature"], "weight_version": 0}
    same |= {"top_p": sampling["top_p"] or 1.0, "top_k": sampling["top_k"] or 0, "min_p": sampling["min_p"] or 0.0}
    config = getattr(model, "config", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    return {
        "engine": {
            **same,
            "dtype": engine_dtype,
            "quantization": kind or "none",
            "tools": tools,
            "kv_cache": options.get("kv_cache_dtype") or _text(parse_kv_cache(options.get("kv_cache"))),
        },
        "trainer": {
            **same,
            "dtype": autocast or dtype,
            "quantization": rounding_of_forward(model),
            "kv_cache": _text(kv_cache_of(model)),
            "dropout": largest_dropout(model),
            "experts": int(experts),
        },
    }


def _text(cache: KVCache | None) -> str:
    return "auto" if cache is None else cache.text


def tools_in_use(has_tools: bool, *, own_rollouts: bool) -> bool | None:
    """Whether completions hold tool output; None = not known, as a rollout function of the user's may call its own."""
    return None if own_rollouts and not has_tools else has_tools


def rounding_of_forward(model: nn.Module) -> str:
    """Type of the rounding in the forward of the model's linear layers, "none" without."""
    found = (getattr(module, "weight_rounding", None) for module in model.modules())
    return next((rounding.type for rounding in found if rounding is not None), "none")


def largest_dropout(model: nn.Module) -> float:
    """The largest dropout probability of a model: of its dropout modules, and of attention that applies its own.

    transformers keeps the latter as a number of the attention module. Switching off ``nn.Dropout`` does not touch it.
    """
    shares = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in model.modules():
        shares += [value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
    return max([0.0, *shares])
