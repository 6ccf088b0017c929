"""Options of older versions of verl that have no equal among the present ones.

Read at verl b8dc5377c (August 2025), 21271aabb (October), 97eac9048 (January 2026).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trl_offpolicy.checks import check_choice
from trl_offpolicy.migrate.frameworks.verl.paths import ACTOR, CORRECTION
from trl_offpolicy.migrate.rules import Carried, Found, Left, Source, number

LEVELS = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean"}
"""Levels of the older ``rollout_rs`` and ``rollout_is_level``: their names here."""


WHOLE_MICRO = f"{ACTOR}.ppo_micro_batch_size"
"""Responses of a forward pass over all devices, to verl 0.2; a sign of such a file."""


def older_options(source: Source) -> Iterable[Found]:
    """What they mean here; those that are only renamed are read under the newer name."""
    yield from _first_versions(source)
    yield from _tis_cap(source)
    yield from _flat_options(source)
    yield from _old_rejection(source)
    veto = f"{CORRECTION}.rollout_token_veto_threshold"
    if source.has(veto):
        yield _veto(veto, source.settings.values[veto])
    for key, why in {
        f"{CORRECTION}.bypass_old_logprob_for_rollout": "older name of bypass_mode; give that",
        f"{CORRECTION}.use_pure_rollout_correction": "older form of bypass_mode with loss_type=reinforce; give these",
        f"{CORRECTION}.use_policy_gradient": "older form of loss_type=reinforce (with bypass_mode); give that",
    }.items():
        if source.has(key):
            yield Left((key,), why) if source.settings.values[key] else Carried((key,), {}, "off", older=True)


def _first_versions(source: Source) -> Iterable[Found]:
    """To verl 0.2: one clip, an entropy bonus by default, and the KL in the reward unless ``use_kl_loss``.

    A file is one of these if it counts micro-batches over all devices and gives the coefficient of a KL in the reward
    without switching one of the two KL terms on.
    """
    coef, in_reward, in_loss = "algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if not source.has(WHOLE_MICRO) or source.has(in_reward) or source.unknown(in_reward, in_loss):
        return
    clip, entropy = f"{ACTOR}.clip_ratio", f"{ACTOR}.entropy_coeff"
    if source.has(clip) and not source.has(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
        both = dict.fromkeys(("option.clip_ratio_low", "option.clip_ratio_high"), source.settings.values[clip])
        yield Carried((clip,), both, "the one bound of verl to 0.2, on both sides", older=True)
    if not source.has(entropy) and not source.unknown(entropy):
        yield Carried((), {"option.entropy_coeff": 0.001}, "the default of verl to 0.2, which this file is of")
    if source.settings.values.get(in_loss) is not True and source.settings.values.get(coef):
        kind = "algorithm.kl_ctrl.type"
        control = {key.rpartition(".")[2]: source.settings.values[key] for key in source.given(coef, kind)}
        fields = {"option.use_kl_in_reward": True, "option.kl_ctrl": control}
        penalty = "algorithm.kl_penalty"
        fields |= {"option.kl_penalty": source.settings.values[penalty]} if source.has(penalty) else {}
        why = "to verl 0.2 the KL is in the reward unless use_kl_loss; now with use_kl_in_reward"
        yield Carried(source.given(coef, kind, penalty), fields, why, older=True)


def _veto(key: str, value: Any) -> Found:
    why = "verl has no successor of the same meaning (rollout_rs: seq_max_k2 bounds both sides)"
    if value is None:
        return Carried((key,), {}, "off", older=True)
    term = {"type": "outlier_veto", "low": number(key, value), "high": None}
    return Carried((key,), {"offpolicy.correction.keep": [term]}, why, older=True)


def _tis_cap(source: Source) -> Iterable[Found]:
    key = f"{ACTOR}.tis_imp_ratio_cap"
    if not source.has(key):
        return
    cap = source.settings.values[key]
    if cap is None or number(key, cap) <= 0:
        yield Carried((key,), {}, "off", older=True)
    else:
        successor = "now algorithm.rollout_correction.rollout_is: token with rollout_is_threshold"
        yield Carried((key,), {"option.rollout_is": "token", "option.rollout_is_threshold": cap}, successor, older=True)


def _truncate(level: str, cap: float) -> dict[str, Any]:
    return {"type": "truncate", "max_weight": cap, **({} if level == "token" else {"level": level})}


def _flat_options(source: Source) -> Iterable[Found]:
    """``algorithm.rollout_is: true`` with level, mode, threshold and veto (October 2025)."""
    prefix = "algorithm.rollout_is"
    names = [f"{prefix}{end}" for end in ("", "_threshold", "_threshold_lower", "_level", "_mode", "_veto_threshold")]
    keys = source.given(*names)
    if not keys:
        return
    values = source.settings.values
    on, cap = values.get(prefix, False), values.get(f"{prefix}_threshold")
    if not on or cap is None:
        yield Carried(keys, {}, "off: metrics only, which are always measured here", older=True)
        return
    level, mode = values.get(f"{prefix}_level", "token"), values.get(f"{prefix}_mode", "truncate")
    check_choice(f"{prefix}_level", level, LEVELS)
    check_choice(f"{prefix}_mode", mode, ("truncate", "clip", "mask"))
    high = number(f"{prefix}_threshold", cap)
    low = values.get(f"{prefix}_threshold_lower")
    low = 1 / high if low is None else number(f"{prefix}_threshold_lower", low)
    weight = _truncate(LEVELS[level], high)
    if mode == "clip":
        weight = {"type": "band", "low": low, "high": high, "level": LEVELS[level]}
    fields: dict[str, Any] = {"offpolicy.correction.weight": weight}
    keep: list[Any] = []
    if mode == "mask":
        fields = {"offpolicy.correction.weight": {"type": "raw", "level": LEVELS[level]}}
        keep.append({"type": "ratio_band", "low": low, "high": high, "level": LEVELS[level]})
    veto = values.get(f"{prefix}_veto_threshold", 1e-4)
    if veto is not None:
        keep.append({"type": "outlier_veto", "low": number(f"{prefix}_veto_threshold", veto), "high": None})
    if keep:
        fields["offpolicy.correction.keep"] = keep
    default = "" if f"{prefix}_veto_threshold" in values else "; the veto at 1e-4 was verl's default"
    yield Carried(keys, fields, f"now algorithm.rollout_correction.*{default}", older=True)


def _old_rejection(source: Source) -> Iterable[Found]:
    """``rollout_rs: token | sequence | geometric`` with an upper and a lower threshold (to January 2026)."""
    names = [f"{CORRECTION}.rollout_rs{end}" for end in ("", "_threshold", "_threshold_lower")]
    level, upper, lower = (source.get(name) for name in names)
    if level not in LEVELS:
        if source.has(names[2]):
            now = 'now in rollout_rs_threshold: "low_high"'
            yield Left((names[2],), now) if lower is not None else Carried((names[2],), {}, "off", older=True)
        return
    cap = upper if upper is not None else source.get(f"{CORRECTION}.rollout_is_threshold", 2.0)
    high = number(names[1], cap)
    low = 1 / high if lower is None else number(names[2], lower)
    newer = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    term = {"type": "ratio_band", "low": low, "high": high, "level": LEVELS[level]}
    why = f'now rollout_rs: {newer} with rollout_rs_threshold: "{1 / high:g}_{1 / low:g}", which verl inverts'
    yield Carried(source.given(*names), {"offpolicy.correction.keep": [term]}, why, older=True)
