"""Describes a run with TRL for ``run.json``."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from trl_offpolicy.diagnosis.probe.proof import effective_settings
from trl_offpolicy.engines.sampling_states import described
from trl_offpolicy.presets import Preset
from trl_offpolicy.rollouts.sampler_stats import on_purpose
from trl_offpolicy.run_folder.base_model import BASE_MODEL, base_model
from trl_offpolicy.run_folder.declared import declared_sides, tools_in_use
from trl_offpolicy.run_folder.layout import SETTINGS
from trl_offpolicy.trl.checks import sampling_findings
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

RECORDED = (
    "engine", "bf16", "fp16", "use_cpu", "temperature", "top_p", "top_k", "min_p", "disable_dropout", "num_iterations",
    "steps_per_generation", "gradient_accumulation_steps", "learning_rate", "loss_type", "async_rollouts",
)  # fmt: skip
"""Settings by which the doctor fits its fix to the run."""


def settings_of(args: OffPolicyGRPOConfig) -> dict[str, Any]:
    """The run's :data:`RECORDED` settings as plain values, under their names in YAML."""
    found = {name: getattr(args, name, None) for name in RECORDED}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool | dict)}


def run_description(args: OffPolicyGRPOConfig, preset: Preset, trainer: Any) -> dict[str, Any]:
    """The entries of ``run.json`` that describe the method. The doctor reads them together with the metrics."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    config: Any = getattr(model, "config", None)
    server = getattr(getattr(trainer, "vllm_generation", None), "server", None)
    samples_apart = args.use_vllm or args.simulated is not None
    engine = cast("dict[str, Any] | None", args.engine) if samples_apart else None
    sampler = f"vllm {args.vllm_mode} {args.engine or ''}" if args.use_vllm else "transformers generate"
    if args.logit_fusion is not None:
        sampler += f" with a teacher, {args.logit_fusion}"
    if args.simulated is not None:
        sampler += f", {args.simulated}"
    findings = sampling_findings(args) if server is None else sampling_findings(args) + server.findings
    precisions = {"bfloat16": args.bf16, "float16": args.fp16}
    noise = getattr(getattr(trainer, "vllm_generation", None), "noise", None)
    wanted = on_purpose(args.logit_fusion, None if noise is None else noise.noise)
    asked = getattr(getattr(trainer, "vllm_generation", None), "interview", None)
    return {
        "model": getattr(config, "_name_or_path", ""),
        BASE_MODEL: base_model(getattr(config, "_name_or_path", ""), getattr(config, "_commit_hash", None)).described(),
        **preset.described(),
        "advantages": "TRL's" if preset.advantages is None else repr(preset.advantages),
        "engine": sampler,
        "async_rollouts": args.async_rollouts,
        "routing_replay": args.routing_replay,
        "control": repr(args.control_spec),
        "sampling_states": described(findings),
        SETTINGS: settings_of(args),
        "declared": declared_sides(
            model,
            engine=engine,
            autocast=next((name for name, used in precisions.items() if used), None),
            tools=tools_in_use(bool(trainer.tools), own_rollouts=trainer.rollout_func is not None),
            sampling={name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        ),
        "effective": effective_settings(
            None if asked is None else asked(), model, trainer.processing_class, on_purpose=wanted
        ),
    }
