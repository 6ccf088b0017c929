"""Checks that the trainer makes before it loads anything."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any, cast

from trl_offpolicy.engines.sampling_states import SettingFinding, engine_findings, judge, request_findings
from trl_offpolicy.engines.server.contact import check_base_url
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.engines.sync import raised_on_all_ranks
from trl_offpolicy.engines.weights.files import require_writable
from trl_offpolicy.functional.advantages import ScaleRewards
from trl_offpolicy.objective.advantages import GRPO
from trl_offpolicy.objective.coefficients import check_horizon
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.staging import Stages, stage
from trl_offpolicy.packages import check_model, require, warn_about_builds
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.rollouts.ahead.checks import check_trainer
from trl_offpolicy.rollouts.compressed_forward import SIMULATED
from trl_offpolicy.run_folder.lock import RunFolderError, check_run_folder
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.fusion import check_fusion
from trl_offpolicy.trl.simulated import check_simulated
from trl_offpolicy.trl.token_rewards import check_token_rewards

logger = logging.getLogger(__name__)

_SAMPLING_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs")


def check_before_loading(args: OffPolicyGRPOConfig, objective: Objective, given: Mapping[str, Any]) -> None:
    """Make every check that needs neither a model nor an engine.

    Args:
        args: the configuration.
        objective: the objective that it describes.
        given: keyword arguments of the trainer (``rollout_func``, ``tools``, ``peft_config``, ...).

    Raises:
        RunFolderError: on all ranks, if ``output_dir`` cannot be written or another run has it.
        MissingPackageError: vLLM is not installed, but it samples.
        FileNotFoundError: the model's folder does not exist.
        ValueError: the engine's log-probs cannot be compared, tools would make ranks wait for ever, or the horizon of
            an adaptive KL is too short.
    """
    check_output(args)
    if args.use_vllm:
        require("vllm", by="use_vllm: true")
        check_address(args)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" or args.deepspeed:
        warn_about_builds()
    check_model("model", given.get("model"))
    check_fusion(args, args.logit_fusion, given)
    check_simulated(args, given)
    check_noise(args)
    check_sleep(args)
    check_token_rewards(args, given)
    warn_about_idle_options(args)
    check_engine(args, objective, has_rollout_func=given.get("rollout_func") is not None)
    check_tools(args, has_tools=bool(given.get("tools") or given.get("environment_factory")))
    check_trainer(args, given)
    check_horizon(
        objective.kl, args.per_device_train_batch_size * args.gradient_accumulation_steps * max(args.world_size, 1)
    )
    warn_about_dropout(given.get("peft_config"))


def check_address(args: OffPolicyGRPOConfig) -> None:
    """Check what can be known of a server and of the folder for its weights without asking it."""
    if args.vllm_mode != "server":
        return
    given = args.vllm_server_base_url
    name = "vllm_server_base_url" if given else "vllm_server_host and vllm_server_port"
    check_base_url(given or f"http://{args.vllm_server_host}:{args.vllm_server_port}", where=name)
    settings = EngineSettings.parse(args.engine if isinstance(args.engine, Mapping) else None)
    if settings.folder is not None and settings.transfer != "broadcast":
        with raised_on_all_ranks(ValueError):
            if args.process_index == 0:
                require_writable(settings.folder, where="engine.folder")


def check_output(args: OffPolicyGRPOConfig) -> None:
    """Check that the main process can write the run's folder and that no other run has it. All ranks call it.

    Raises:
        RunFolderError: on all ranks, if it cannot.
    """
    with raised_on_all_ranks(RunFolderError):
        if args.process_index == 0:
            check_run_folder(args.output_dir, name="output_dir")


def check_noise(args: OffPolicyGRPOConfig) -> None:
    """Raise if ``engine.norm_noise`` cannot reach the engine's weights.

    Raises:
        ValueError: no engine samples, it is a server, or TRL discards its weights between generations.
    """
    settings = EngineSettings.parse(cast("Mapping[str, Any] | None", args.engine))
    if settings.norm_noise is None:
        return
    if not args.use_vllm:
        raise ValueError(
            "engine.norm_noise is no option of 'transformers' (use_vllm: false): the noise is on the norms of an "
            "engine that has weights of its own in this process. Use use_vllm: true with vllm_mode: colocate."
        )
    if args.vllm_mode == "server":
        raise ValueError("engine.norm_noise must be left out with a server: it changes weights in this process.")
    if args.vllm_enable_sleep_mode:
        raise ValueError(
            "engine.norm_noise must be left out with vllm_enable_sleep_mode: the engine's weights are then discarded "
            "after every generation."
        )


def check_sleep(args: OffPolicyGRPOConfig) -> None:
    """Raise if a sync would not bring back what an engine that sleeps has thrown away.

    Raises:
        ValueError: adapters alone are sent, but the base weights are gone after each generation.
    """
    settings = EngineSettings.parse(cast("Mapping[str, Any] | None", args.engine))
    sleeps = args.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
    if sleeps and settings.transfer == "adapter":
        raise ValueError(
            "engine.transfer must be auto or memory with vllm_enable_sleep_mode: true, but got 'adapter': the engine "
            "throws its base weights away after each generation, and an adapter does not bring them back."
        )


def warn_about_idle_options(args: OffPolicyGRPOConfig) -> None:
    """Warn of options of ``engine`` that nothing reads, because transformers' ``generate`` samples."""
    idle = [] if args.use_vllm or not isinstance(args.engine, Mapping) else [*args.engine]
    if idle := [name for name in idle if name not in ("logit_fusion", *SIMULATED)]:
        warnings.warn(
            f"engine.{' and engine.'.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect with use_vllm: false: "
            "transformers' generate samples from the trainer's own model.",
            stacklevel=3,
        )


def check_engine(args: OffPolicyGRPOConfig, objective: Objective, *, has_rollout_func: bool) -> None:
    """Check that the correction has an engine whose log-probs can be compared with the trainer's."""
    if objective.needs_sampling and not (args.reports_logps or has_rollout_func):
        raise ValueError(
            "offpolicy must not read the sampling policy when use_vllm is False: transformers' generate samples from "
            "the trainer itself, so old/sampling is 1. Use offpolicy: measure, or use_vllm: true."
        )
    judge(sampling_findings(args), needs_sampling=objective.needs_sampling)


def sampling_findings(args: OffPolicyGRPOConfig) -> tuple[SettingFinding, ...]:
    """Settings in the configuration under which vLLM's policy differs from the trainer's. A server is asked later."""
    options = {name: getattr(args, name) for name in _SAMPLING_OPTIONS}
    if not args.use_vllm:  # the trainer itself: its log-probs are compared with none, unless it samples otherwise
        found = request_findings(options, device_type=args.device.type)
        return found if args.reports_logps else ()
    options["structured_outputs_regex"] = args.vllm_structured_outputs_regex
    engine = EngineSettings.parse(cast("Mapping[str, Any] | None", args.engine)).arguments
    return request_findings(options, device_type=args.device.type) + engine_findings(engine)


def check_tools(args: OffPolicyGRPOConfig, *, has_tools: bool) -> None:
    """Check that ranks with tools sample each for itself: TRL's tool loop runs longer on one rank than on another.

    Raises:
        ValueError: several ranks share an engine, or each of theirs sleeps and is woken by a sync that is collective.
            Ranks that are done would leave the others waiting.
    """
    if not (has_tools and args.use_vllm and args.world_size > 1):
        return
    shared = args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1
    if shared:
        raise ValueError(
            f"tools must have an engine on each rank, but got vllm_mode {args.vllm_mode!r} with "
            f"vllm_tensor_parallel_size {args.vllm_tensor_parallel_size} and {args.world_size} ranks: TRL's tool loop "
            "calls it as often as a rank's rows need, and the ranks would wait for each other. Use vllm_mode colocate "
            "with tensor parallel size 1, a single rank, or a rollout_func."
        )
    if args.vllm_enable_sleep_mode:
        raise ValueError(
            f"vllm_enable_sleep_mode must be false with tools and {args.world_size} ranks, but got True: TRL's tool "
            "loop wakes the engine by a sync as often as a rank's rows need, and the ranks would wait for each other."
        )


def warn_about_dropout(peft_config: Any) -> None:
    """Warn if LoRA dropout is above 0: the trainer's log-probs are then random and look like mismatch."""
    if (dropout := getattr(peft_config, "lora_dropout", 0.0)) > 0:
        warnings.warn(
            f"lora_dropout is {dropout}: the trainer's log-probs become random and look like engine mismatch; use 0.",
            stacklevel=3,
        )


def stages_of(args: OffPolicyGRPOConfig, preset: Preset) -> Stages | None:
    """What must be decided on the whole generation batch, or None; logs what that costs."""
    objective, advantages = preset.objective, preset.advantages
    kept = objective.correction is not None and objective.correction.baseline == "kept"
    in_reward = objective.kl is not None and objective.kl.in_reward
    if (kept or in_reward or args.token_rewards) and advantages is None:
        if args.multi_objective_aggregation != "sum_then_normalize":
            reasons = {"baseline='kept'": kept, "kl.place 'reward'": in_reward, "token_rewards": True}
            why = next(name for name, given in reasons.items() if given)
            raise ValueError(
                f"multi_objective_aggregation must be 'sum_then_normalize' with {why} (advantages are made "
                f"again from the total reward), but got {args.multi_objective_aggregation!r}. advantages: gdpo "
                "normalises each function over the kept responses."
            )
        advantages = GRPO(scale=cast("ScaleRewards", args.scale_rewards))  # TRL's, over what is kept
    stages = stage(objective, advantages, token_rewards=args.token_rewards)
    if stages is not None and stages.needs_old:
        reader = "the KL in the reward" if in_reward else f"advantages of {type(advantages).__name__}"
        if stages.early is not None:
            reader = f"scope {objective.scope}"
        logger.warning(
            "offpolicy needs the whole generation batch (%s): the old policy is scored once per generation, "
            "one more forward.",
            reader,
        )
    return stages


def leaves_out_old(objective: Objective, stages: Stages | None, *, has_sampler: bool) -> bool:
    """True if TRL should skip its pass for the old log-probs: the kit makes it, or nothing reads them."""
    made_here = stages is not None and stages.needs_old
    return made_here or (has_sampler and not objective.proximal.reads_old)
