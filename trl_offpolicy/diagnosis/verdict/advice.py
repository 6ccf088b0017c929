"""One configuration for all findings, in the keys of the framework that logged them.

Each cause asks for a change of a few things: correction, precision, steps per generation, learning rate. Two findings
may ask for different values of one thing. Then the more severe one decides (of equal ones the one that comes first in
the tree, because a system is repaired before its drift is corrected), and the other is kept for later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.fixes import fix_of

OURS = "trl-offpolicy"
Thing = Literal["measure", "token", "geometric", "band", "tis", "dtype", "steps", "rate", "routing"]
Settings = Mapping[str, Any]
_CORRECTIONS: tuple[Thing, ...] = ("measure", "token", "geometric", "band", "tis")
"""What contradicts each other: at most one of them can be set."""

ASKED: Mapping[str, tuple[Thing, ...]] = MappingProxyType(
    {
        "engine_mismatch": ("measure", "dtype"),
        "policy_staleness": ("steps", "token"),
        "token_drift": ("geometric",),
        "weight_variance": ("band",),
        "sequence_variance": ("geometric",),
        "rejection_limit": ("token",),
        "correction_limit": ("measure", "steps"),
        "clip_saturation": ("steps", "rate"),
        "length_surge": ("rate", "geometric"),
        "entropy_collapse": ("tis",),
        "collapse": ("rate",),
        "routing": ("routing", "band"),
    }
)
"""Cause -> what it asks another framework for. A cause that is missing has no setting there, only its fix in words."""

_VERL_CORRECTION, _VERL_ACTOR, _VERL_ROLLOUT = (
    "algorithm.rollout_correction", "actor_rollout_ref.actor", "actor_rollout_ref.rollout",
)  # fmt: skip
_SKYRL_CORRECTION = "trainer.algorithm.off_policy_correction"
_TRL_CORRECTION = "vllm_importance_sampling"


def _under(prefix: str, **values: object) -> dict[str, object]:
    return {f"{prefix}.{key}": value for key, value in values.items()}


def _under_score(**values: object) -> dict[str, object]:
    return {f"{_TRL_CORRECTION}_{key}": value for key, value in values.items()}


_VERL_LOGPS = _under(_VERL_ROLLOUT, calculate_log_probs=True)
_VERL: dict[Thing, Settings] = {
    "measure": {**_under(_VERL_CORRECTION, rollout_is=None, rollout_rs=None), **_VERL_LOGPS},
    "token": {
        **_under(
            _VERL_CORRECTION,
            rollout_is="token",
            rollout_is_threshold=2.0,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold="0.99_1.01",
        ),
        **_VERL_LOGPS,
    },
    "geometric": {
        **_under(_VERL_CORRECTION, rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.99_1.01"),
        **_VERL_LOGPS,
    },
    "band": {
        **_under(_VERL_CORRECTION, rollout_is="token", rollout_is_threshold="0.5_5.0", rollout_rs=None),
        **_VERL_LOGPS,
    },
    "tis": {
        **_under(_VERL_CORRECTION, rollout_is="token", rollout_is_threshold=2.0, rollout_rs=None),
        **_VERL_LOGPS,
    },
    "dtype": {f"{_VERL_ACTOR}.fsdp_config.dtype": "float16", f"{_VERL_ROLLOUT}.dtype": "float16"},
    "steps": {f"{_VERL_ACTOR}.ppo_epochs": 1},
    "rate": {f"{_VERL_ACTOR}.optim.lr": 5e-7},
    "routing": {
        f"{_VERL_ACTOR}.router_replay.mode": "R3",
        f"{_VERL_ROLLOUT}.enable_rollout_routing_replay": True,
    },
}
_GEOMETRIC = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.99, "geo_mask_high": 1.01}
_SKYRL: dict[Thing, Settings] = {
    "measure": _under(_SKYRL_CORRECTION, tis_ratio_type=None, sequence_mask_metric=None),
    "token": _under(_SKYRL_CORRECTION, tis_ratio_type="token", token_tis_ratio_clip_high=2.0, **_GEOMETRIC),
    "geometric": _under(_SKYRL_CORRECTION, tis_ratio_type=None, **_GEOMETRIC),
    "band": _under(
        _SKYRL_CORRECTION,
        tis_ratio_type="token",
        token_tis_ratio_clip_high=5.0,
        token_mask_is_threshold_low=0.5,
        token_mask_is_threshold_high=5.0,
    ),
    "tis": _under(_SKYRL_CORRECTION, tis_ratio_type="token", token_tis_ratio_clip_high=2.0),
    "dtype": {"trainer.bf16": False, "generator.inference_engine.model_dtype": "float32"},
    "steps": {"trainer.update_epochs_per_batch": 1, "trainer.fully_async.max_staleness_steps": 1},
    "rate": {"trainer.policy.optimizer_config.lr": 5e-7},
    "routing": {
        "trainer.policy.megatron_config.moe_enable_routing_replay": True,
        "generator.inference_engine.enable_return_routed_experts": True,
    },
}
_MIS = {"use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0}
_SLIME: dict[Thing, Settings] = {
    "measure": {"use_tis": False, "get_mismatch_metrics": True},
    "token": {**_MIS, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.99, "rs_upper_bound": 1.01},
    "geometric": {
        "use_tis": True,
        "use_rs": False,
        "tis_level": "geometric",
        "tis_mode": "mask",
        "tis_lower_bound": 0.99,
        "tis_upper_bound": 1.01,
    },
    "band": {
        "use_tis": True,
        "use_rs": False,
        "tis_level": "token",
        "tis_mode": "mask",
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 5.0,
    },
    "tis": {**_MIS, "use_rs": False},
    "dtype": {"fp16": True},
    "steps": {"num_steps_per_rollout": 1, "update_weights_interval": 1},
    "rate": {"lr": 5e-7},
    "routing": {"use_rollout_routing_replay": True},
}
_TRL_TRUNCATED = _under_score(correction=True, mode="token_truncate")
_TRL_MEASURED = {**_TRL_TRUNCATED, **_under_score(clip_min=0.999999, clip_max=1.0)}
"""Weights of 1 (TRL refuses two equal bounds): without its correction TRL logs no distance."""
_TRL_CAPPED = {**_TRL_TRUNCATED, **_under_score(clip_min=None, clip_max=2.0)}
_TRL: dict[Thing, Settings] = {
    "measure": {**_TRL_MEASURED, "off_policy_mask_threshold": None},
    "token": {**_TRL_CAPPED, "off_policy_mask_threshold": 0.01},
    "geometric": {**_TRL_MEASURED, "off_policy_mask_threshold": 0.01},
    "band": _under_score(correction=True, mode="token_mask", clip_min=0.5, clip_max=5.0),
    "tis": _TRL_CAPPED,
    "dtype": {"bf16": False, "fp16": True},
    "steps": {"num_iterations": 1},
    "rate": {"learning_rate": 5e-7},
    "routing": {},
}
_SWIFT_MODE, _SWIFT_LIMIT, _SWIFT_MASK = (
    "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold", "off_policy_sequence_mask_delta",
)  # fmt: skip
_SWIFT: dict[Thing, Settings] = {
    "measure": {_SWIFT_MODE: None, _SWIFT_MASK: None, "log_rollout_offpolicy_metrics": True},
    "token": {_SWIFT_MODE: "token_truncate", _SWIFT_LIMIT: 2.0, _SWIFT_MASK: 0.01},
    "geometric": {_SWIFT_MODE: None, _SWIFT_MASK: 0.01},
    "band": {_SWIFT_MODE: "token_mask", _SWIFT_LIMIT: 5.0, _SWIFT_MASK: None},
    "tis": {_SWIFT_MODE: "token_truncate", _SWIFT_LIMIT: 2.0, _SWIFT_MASK: None},
    "dtype": {"torch_dtype": "float16"},
    "steps": {"num_iterations": 1},
    "rate": {"learning_rate": 5e-7},
    "routing": {},
}
THEIRS: Mapping[str, Mapping[Thing, Settings]] = MappingProxyType(
    {"verl": _VERL, "SkyRL": _SKYRL, "slime": _SLIME, "TRL": _TRL, "ms-swift": _SWIFT}
)
"""Framework -> what is asked for -> its own keys. Read from verl 0.9.1, TRL 1.16, SkyRL, slime and ms-swift of August
2026."""
TO_LOG: Mapping[str, str] = MappingProxyType(
    {
        OURS: "offpolicy: measure",
        "verl": f"{_VERL_ROLLOUT}.calculate_log_probs=True",
        "SkyRL": "generator.sampling_params.logprobs=1",
        "slime": "--use-tis or --get-mismatch-metrics",
        "TRL": f"{_TRL_CORRECTION}_correction=True beside use_vllm=True",
        "ms-swift": "log_rollout_offpolicy_metrics: true beside use_vllm: true",
    }
)
"""Framework -> the setting with which it logs how far engine and trainer are apart."""
WHERE: Mapping[str, str] = MappingProxyType(
    {
        OURS: "config.yaml",
        "verl": "verl's configuration",
        "SkyRL": "SkyRL's configuration",
        "slime": "slime's --custom-config-path file, with its mis.py as --custom-tis-function-path; fp16 as a flag",
        "ms-swift": "ms-swift's arguments; its only mask by geometric mean is one-sided, for negative advantages",
        "TRL": "GRPOConfig; TRL has no two-sided geometric mask, its off_policy_mask_threshold is the nearest",
    }
)


@dataclass(frozen=True)
class Advice:
    """One configuration.

    Args:
        where: the file or object that takes it.
        yaml: the settings; empty if no finding has any.
        later: what contradicts them and can only come after, one sentence each.
        follows: causes left out because they may follow from the one that is repaired: judge again afterwards.
    """

    where: str
    yaml: str
    later: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()


ROUNDING_EXPLAINS = 0.1
"""KL k3 in nats per token up to which rounding, to 8 bits at the most, explains an engine mismatch."""
ROUNDED_CORRELATE = 0.9
"""Correlation of the two probabilities below which rounding to 8 bits does not explain it either."""


def advise(
    causes: Sequence[str],
    frameworks: Sequence[str] = (),
    info: Mapping[str, Any] | None = None,
    *,
    by_rounding: bool = True,
    rate: float | None = None,
) -> Advice:
    """The settings that these causes ask for together.

    Args:
        causes: keys of :data:`~trl_offpolicy.diagnosis.causes.CAUSES`, the most urgent first.
        frameworks: whose log it was, the main one first, as in
            :class:`~trl_offpolicy.run_folder.run_data.MetricsLog`.
        info: ``run.json`` of a run of this kit, so that the settings fit it.
        by_rounding: rounding may explain the engine mismatch (:data:`ROUNDING_EXPLAINS`). If not, no precision is
            advised for it: other prompts, positions or masks on the two sides are not mended by float16.
        rate: the run's learning rate, of which half is advised; None = not known: then another framework's settings
            hold none, and this kit's hold an example.

    Example:
        >>> print(advise(["policy_staleness", "engine_mismatch"], ["verl"]).later[0])
        engine mismatch: algorithm.rollout_correction.rollout_is: null, algorithm.rollout_correction.rollout_rs: null
        >>> print(advise(["clip_saturation"], ["slime"], rate=1e-6).yaml)
        num_steps_per_rollout: 1
        update_weights_interval: 1
        lr: 5.0e-07
    """
    unique = list(dict.fromkeys(causes))
    framework = frameworks[0] if frameworks and frameworks[0] in THEIRS else OURS
    if framework == OURS:
        return _ours(unique, info, by_rounding, rate)
    taken: dict[str, object] = {}
    corrected, later = "", []
    for cause in unique:
        for thing in ASKED.get(cause, ()):
            if cause == "engine_mismatch" and thing == "dtype" and not by_rounding:
                continue
            settings = THEIRS[framework][thing]
            if thing == "rate":
                settings = {} if rate is None else dict.fromkeys(settings, _half(rate))
                later += [f"{CAUSES[cause].title}: {_HALF}"] if rate is None else []
            if thing in _CORRECTIONS and corrected not in ("", thing):
                later.append(_sentence(cause, {key: v for key, v in settings.items() if taken.get(key, ...) != v}))
                continue
            corrected = thing if thing in _CORRECTIONS else corrected
            taken |= settings
    return Advice(WHERE[framework], _dump(_nested(taken)), tuple(later))


_RATE = re.compile(r"learning_rate: 5\.0e-0?7\b")
"""The example of the causes' snippets."""
_WITH_ENGINE = ("bf16", "fp16")
"""The trainer's precision, which a cause sets together with the engine's or not at all."""
_MAY_FOLLOW = ("C", "D")
"""Branches (drift and variance of the ratios) that a repaired mismatch may clear by itself."""


def advise_after(
    cause: str,
    found: Sequence[str],
    frameworks: Sequence[str] = (),
    info: Mapping[str, Any] | None = None,
    *,
    rate: float | None = None,
) -> Advice:
    """The settings for a cause that the tokens named, with those of the findings that do not follow from it.

    What any run with an engine mismatch, drift or variance is told to try has no place beside the answer.

    Args:
        cause: the answer, a key of :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        found: causes of the findings, the most urgent first.
        frameworks: as for :func:`advise`.
        info: as for :func:`advise`.
        rate: as for :func:`advise`.

    Example:
        >>> found = advise_after("temperature", ["engine_mismatch", "correction_limit", "clip_saturation"])
        >>> found.yaml.splitlines()[:2], found.follows
        (['temperature: 1.0', 'num_iterations: 1'], ('beyond correction',))
    """
    follows = [one for one in found if one != cause and CAUSES[one].branch in _MAY_FOLLOW]
    others = [one for one in found if one not in (*follows, "engine_mismatch")]
    titles = tuple(CAUSES[one].title for one in dict.fromkeys(follows))
    return replace(advise([cause, *others], frameworks, info, rate=rate), follows=titles)


def _is_precision(key: str, value: Any) -> bool:
    return key in _WITH_ENGINE or (key == "engine" and isinstance(value, dict) and set(value) == {"dtype"})


def _half(rate: float) -> float:
    return float(f"{rate / 2:.3g}")


_HALF = "half of your learning rate, which was not logged"


def _ours(causes: Iterable[str], info: Mapping[str, Any] | None, by_rounding: bool, rate: float | None) -> Advice:
    """The causes' own settings, line by line; ``engine: {...}`` is put together, any other key is set once."""
    import yaml

    lines: dict[str, str] = {}
    values: dict[str, Any] = {}
    later = []
    for cause in causes:
        fix, engine_waits = fix_of(cause, info), False
        for line in _with_half(fix.yaml, rate).splitlines() if fix is not None else ():
            settings = yaml.safe_load(line) or {}
            for key, value in settings.items():
                if cause == "engine_mismatch" and not by_rounding and _is_precision(key, value):
                    continue
                if engine_waits and key in _WITH_ENGINE:
                    later.append(_sentence(cause, {key: value}))
                elif key not in values:
                    lines[key], values[key] = line, value
                elif _joined(values[key], value) is not None:
                    values[key] = _joined(values[key], value)
                    lines[key] = f"{key}: {_flow(values[key])}"
                elif values[key] != value:
                    later.append(_sentence(cause, {key: value}))
                    engine_waits = engine_waits or key == "engine"
    return Advice(WHERE[OURS], "\n".join(lines.values()), tuple(later))


def _with_half(text: str, rate: float | None) -> str:
    """The settings with half of the run's learning rate in place of the example."""
    return text if rate is None else _RATE.sub(f"learning_rate: {_flow(_half(rate))}", text)


def _joined(one: Any, other: Any) -> dict[str, Any] | None:
    """Both maps as one, if no key has two values; None if they cannot be joined or are the same."""
    if not isinstance(one, dict) or not isinstance(other, dict) or one == other:
        return None
    return {**one, **other} if all(one[key] == other[key] for key in one.keys() & other.keys()) else None


def _sentence(cause: str, settings: Settings) -> str:
    return f"{CAUSES[cause].title}: {', '.join(f'{key}: {_flow(value)}' for key, value in settings.items())}"


def _flow(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False)).removesuffix("...\n").strip()


def _nested(settings: Settings) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *folders, last = key.split(".")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return nested


def _dump(settings: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(settings), sort_keys=False)).strip() if settings else ""
