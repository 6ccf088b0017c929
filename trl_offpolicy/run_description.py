"""What ``run.json`` says: the method, and what engine and trainer declare about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.presets import Preset


def run_description(args: OffPolicyGRPOConfig, preset: Preset, model: nn.Module) -> dict[str, Any]:
    """The entries of ``run.json`` that describe the method; the doctor reads them beside the metrics."""
    config: Any = getattr(model, "config", None)
    return {
        "model": getattr(config, "_name_or_path", ""),
        "preset": preset.name,
        "correction": repr(preset.correction),
        "objective": repr(replace(preset.objective, correction=None)),
        "advantages": "TRL's" if preset.advantages is None else repr(preset.advantages),
        "engine": f"vllm {args.vllm_mode} {args.engine or ''}" if args.use_vllm else "transformers generate",
        "control": repr(args.control_spec),
        "declared": declared_sides(
            model,
            engine=cast("dict[str, Any] | None", args.engine) if args.use_vllm else None,
            autocast="bfloat16" if args.bf16 else "float16" if args.fp16 else None,
            sampling={name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        ),
    }


def declared_sides(
    model: nn.Module, *, engine: Mapping[str, Any] | None, autocast: str | None, sampling: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What both sides say of themselves, as fields of :class:`~.diagnosis.attribution.evidence.Declared`.

    Args:
        model: the trainer's.
        engine: options of the engine; None = the trainer's own model generates.
        autocast: the trainer's mixed precision, None without.
        sampling: temperature, top_p, top_k, min_p of the engine, which this kit's trainer mirrors.
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
        },
        "trainer": {
            **same,
            "dtype": autocast or dtype,
            "quantization": "none",
            "dropout": max([0.0, *(one.p for one in model.modules() if isinstance(one, nn.Dropout))]),
            "experts": int(experts),
        },
    }
