"""verl's configuration as users paste it: nested sections, with much that is not about the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from trl_offpolicy.checks import near
from trl_offpolicy.presets.frameworks.options import UnknownOptionError, tell
from trl_offpolicy.presets.frameworks.verl.losses import VerlLossOptions

POLICY_LOSS = (
    "loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta",
)  # fmt: skip
"""The options of ``actor.policy_loss``. The rest of :class:`VerlLossOptions` belongs to ``actor``."""

STEPS = "set batches, epochs and the optimizer in the trainer here"
MODEL = "how verl places and runs the model"
SAMPLING = "set sampling and data in the trainer here"
REWARDS = "set reward functions, their weights and filters in the trainer here"
OVERWRITTEN = "of policy_loss; verl's trainers read algorithm.rollout_correction"
UNREAD = "GAE, REINFORCE++, the KL in the reward or PF-PPO alone read it"
REDUCTION = "the trainer's own counts: op.Reduction(world_size=dp_size, tokens=batch_num_tokens, ...)"
_HYDRA = ("_target_", "defaults")

_STEPS = (
    "optim", "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
    "ppo_infer_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu",
    "ppo_infer_max_token_len_per_gpu", "ppo_epochs", "shuffle", "data_loader_seed", "grad_clip", "rollout_n",
)  # fmt: skip
_MODEL = (
    "strategy", "fsdp_config", "megatron", "torchtitan", "veomni", "engine", "model_config", "checkpoint", "profiler",
    "profile", "qat", "router_replay", "freeze_vision_tower", "use_torch_compile", "use_fused_kernels",
    "use_prefix_grouper", "use_remove_padding", "use_rollout_log_probs", "ulysses_sequence_parallel_size",
    "pad_to_length", "calculate_entropy", "calculate_sum_pi_squared", "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size", "entropy_checkpointing",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A mapping of verl's configuration.

    Args:
        options: names that are read.
        sections: mappings inside it, by name.
        unused: names that do not concern the loss, with the reason.
        whole: True if all its names are listed here.
    """

    options: tuple[str, ...] = ()
    sections: Mapping[str, Section] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


def configuration(correction: tuple[str, ...], algorithm: tuple[str, ...]) -> Section:
    """All of verl's configuration; ``correction`` and ``algorithm`` are the options of these two sections."""
    rollout_correction = Section(correction)
    policy_loss = Section(POLICY_LOSS, unused={"rollout_correction": OVERWRITTEN})
    own = tuple(item.name for item in fields(VerlLossOptions) if item.name not in POLICY_LOSS)
    actor = Section(
        own,
        {"policy_loss": policy_loss},
        dict.fromkeys(_STEPS, STEPS) | dict.fromkeys(_MODEL, MODEL) | {"global_batch_info": REDUCTION},
    )
    of_algorithm = Section(
        algorithm,
        {"rollout_correction": rollout_correction},
        dict.fromkeys(("gdpo_reward_keys", "gdpo_reward_weights", "filter_groups"), REWARDS)
        | dict.fromkeys(("lam", "pf_ppo"), UNREAD),
    )
    trainer = Section(("use_v1",), whole=False)
    beside = dict.fromkeys(("model", "rollout", "ref", "hybrid_engine", "nccl_timeout"), MODEL) | {"rollout": SAMPLING}
    return Section(
        (*correction, *own, *POLICY_LOSS, *algorithm, "use_v1"),
        {
            "actor_rollout_ref": Section(sections={"actor": actor}, unused=beside),
            "actor": actor,
            "policy_loss": policy_loss,
            "algorithm": of_algorithm,
            "rollout_correction": rollout_correction,
            "trainer": trainer,
        },
        {
            **actor.unused,
            **of_algorithm.unused,
            **beside,
            **dict.fromkeys(("data", "transfer_queue"), SAMPLING),
            **dict.fromkeys(("reward", "reward_model", "reward_manager", "custom_reward_function"), REWARDS),
            **dict.fromkeys(("critic", "distillation"), "the trainers here have none"),
            **dict.fromkeys(("ray_kwargs", "global_profiler", "model_engine", "sandbox_fusion", "skip"), MODEL),
        },
    )


def flatten(given: Mapping[str, object], known: Section) -> dict[str, object]:
    """The options of all sections by name. One warning lists what is not about the loss, with the reason.

    Raises:
        UnknownOptionError: a name that verl does not have; the message lists its path and near matches.
        ValueError: an option that is given twice with different values, or a section that is not a mapping.
    """
    found: dict[str, tuple[str, object]] = {}
    unused: dict[str, dict[str, None]] = {}  # names by reason, in their order
    for path, name, value, why in _walk(given, known, ""):
        if why is not None:
            unused.setdefault(why, {})[name] = None
        elif name in found and found[name][1] != value:
            first, before = found[name]
            raise ValueError(f"{first} and {path} must be the same, but got {before!r} and {value!r}.")
        else:
            found[name] = path, value
    if unused:
        reasons = [f"{', '.join(names)} ({why})" for why, names in unused.items()]
        tell(f"Not about the loss, and not used here: {'; '.join(reasons)}.")
    return {name: value for name, (_, value) in found.items()}


def _walk(given: Mapping[str, object], known: Section, where: str) -> Iterator[tuple[str, str, object, str | None]]:
    """Yields (path, name, value, the reason why it is not used or None) of every option."""
    for name, value in given.items():
        path = f"{where}{name}"
        if name in known.sections:
            if not isinstance(value, Mapping | None):
                raise ValueError(f"{path} must be a mapping of verl's options, but got {value!r}.")
            yield from _walk(value or {}, known.sections[name], f"{path}.")
        elif name in known.options:
            yield path, name, value, None
        elif name in known.unused:
            yield path, name, value, known.unused[name]
        elif not known.whole:  # only some names of this section matter: the warning lists the rest as one
            yield path, f"the rest of {where.rstrip('.')}", value, STEPS
        elif name not in _HYDRA:  # Hydra adds these names to every configuration: skip them
            section = f"verl's {where.rstrip('.') or 'configuration'}"
            names = [*known.options, *known.sections, *known.unused]
            raise UnknownOptionError(
                f"{path} is not an option of {section}, which has {[*known.options, *known.sections]} for the loss."
                f"{near(name, names)}"
            )
