"""Other frameworks' metric names as this kit's, so that their logs can be diagnosed.

Only numbers with the same meaning are translated (facts and sources: the frameworks' own code, read in 2026). Where
theirs is an approximation of ours, ``NOTES`` says how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_MISMATCH = {
    "kl": "mismatch/kl_k1",
    "k3_kl": "mismatch/kl_k3",
    "log_ppl_diff": "mismatch/log_ppl_diff",
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff",
    "ppl_ratio": "mismatch/ppl_ratio",
    "chi2_token": "mismatch/chi2_token",
    "chi2_seq": "mismatch/chi2_sequence",
    "training_ppl": "mismatch/ppl_old",
    "rollout_ppl": "mismatch/ppl_sampling",
}
_VERL_WEIGHTS = {f"rollout_is_{name}": f"weight_applied/{name}" for name in ("mean", "std")}

NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "verl": {
            **{f"rollout_corr/{theirs}": ours for theirs, ours in _MISMATCH.items()},
            **{f"rollout_corr/{theirs}": ours for theirs, ours in _VERL_WEIGHTS.items()},
            "rollout_corr/log_ppl_diff_max": "mismatch/log_ppl_diff_max",
            "rollout_corr/log_ppl_diff_min": "mismatch/log_ppl_diff_min",
            "rollout_corr/rollout_is_eff_sample_size": "weight_applied/ess_token",
            "rollout_corr/rollout_is_ratio_fraction_high": "weight/truncated_fraction",
            "rollout_corr/rollout_rs_masked_fraction": "keep/dropped_token_fraction",
            "rollout_corr/rollout_rs_seq_masked_fraction": "keep/dropped_sequence_fraction",
            "training/rollout_probs_diff_max": "mismatch/prob_diff_max",
            "training/rollout_probs_diff_mean": "mismatch/prob_diff_mean",
            "training/rollout_probs_diff_std": "mismatch/prob_diff_std",
            "training/rollout_actor_probs_pearson_corr": "mismatch/prob_pearson",
            "actor/pg_clipfrac": "loss/clip_region_fraction",
            "actor/ppo_kl": "staleness/kl_k1",
            "actor/entropy": "loss/entropy",
            "response_length/mean": "rollout/response_length_mean",
            "critic/score/mean": "reward",
            "actor/grad_norm": "grad_norm",
        },
        "TRL": {
            "sampling/sampling_logp_difference/mean": "mismatch/logp_diff_mean",
            "sampling/sampling_logp_difference/max": "mismatch/logp_diff_max",
            "sampling/importance_sampling_ratio/mean": "weight_applied/mean",
            "sampling/importance_sampling_ratio/min": "weight_applied/min",
            "sampling/importance_sampling_ratio/max": "weight_applied/max",
            "clip_ratio/region_mean": "loss/clip_region_fraction",
            "completions/mean_length": "rollout/response_length_mean",
            "entropy": "loss/entropy",
        },
        "SkyRL": {
            "policy/rollout_train_logprobs_abs_diff_mean": "mismatch/logp_diff_mean",
            "policy/rollout_train_logprobs_abs_diff_std": "mismatch/logp_diff_std",
            "policy/rollout_train_logprobs_abs_diff_max": "mismatch/logp_diff_max",
            "*/is_ratio_mean": "weight/mean",
            "*/is_ratio_max": "weight/max",
            "*/tis_token_clip_high_ratio": "weight/truncated_fraction",
            "*/tis_seq_clip_high_ratio": "weight/truncated_fraction",
            "*/geo_sequence_mask_masked_ratio": "keep/dropped_sequence_fraction",
            "*/product_sequence_mask_masked_ratio": "keep/dropped_sequence_fraction",
            "policy/clip_ratio": "loss/clip_region_fraction",
            "policy/ppo_clip_ratio": "loss/clip_region_fraction",
            "generate/avg_num_tokens": "rollout/response_length_mean",
            "reward/avg_raw_reward": "reward",
        },
        "slime": {
            **{f"train/{theirs}": ours for theirs, ours in _MISMATCH.items()},
            "train/train_rollout_logprob_abs_diff": "mismatch/logp_diff_mean",
            "train/ois": "weight/mean",
            "train/tis_clipfrac": "weight/truncated_fraction",
            "train/pg_clipfrac": "loss/clip_region_fraction",
            "train/ppo_kl": "staleness/kl_k1",
            "train/entropy_loss": "loss/entropy",
            "rollout/response_len/mean": "rollout/response_length_mean",
            "rollout/raw_reward": "reward",
            "train/grad_norm": "grad_norm",
        },
    }
)
"""Framework -> its name -> ours, without ``offpolicy/``. ``*/name`` stands for any prefix or none."""

NOTES: Mapping[str, str] = MappingProxyType(
    {
        "rollout_corr/rollout_rs_seq_masked_fraction": "counts responses with any rejected token",
        "rollout_corr/rollout_is_eff_sample_size": "over the original mask",
        "policy/clip_ratio": "the share where the clipped term was the larger loss",
    }
)
_OWN_KEYS = frozenset({"reward", "grad_norm"})
_PREFIX = "offpolicy/"


def translate(row: Mapping[str, float]) -> dict[str, float]:
    """The row with our names added where a framework's name says the same; what is there already stays.

    Example:
        >>> translate({"step": 3, "rollout_corr/k3_kl": 0.01})["offpolicy/mismatch/kl_k3"]
        0.01
    """
    added: dict[str, float] = {}
    for key, value in row.items():
        ours = _ours(key)
        if ours is not None and ours not in row:
            added.setdefault(ours, value)
    return {**row, **added}


def frameworks(keys: Iterable[str]) -> tuple[str, ...]:
    """The frameworks whose own names appear, those with the most first; this kit's first of all."""
    names = set(keys)
    own = ("trl-offpolicy",) if any(key.startswith(_PREFIX) for key in names) else ()
    found = {name: sum(_matches(key, table) is not None for key in names) for name, table in NAMES.items()}
    return own + tuple(sorted((name for name, count in found.items() if count), key=lambda name: -found[name]))


def _ours(key: str) -> str | None:
    if key.startswith(_PREFIX):
        return None
    for table in NAMES.values():
        name = _matches(key, table)
        if name is not None:
            return name if name in _OWN_KEYS else _PREFIX + name
    return None


def _matches(key: str, table: Mapping[str, str]) -> str | None:
    return table.get(key) or table.get("*/" + key.rsplit("/", 1)[-1])
