"""Translates other frameworks' metric names into this kit's, so that their logs can be diagnosed.

A name is translated if it means the same. Some names change their meaning with the policy loss, or with other keys in
the row. Those are translated only if that is known (``loss``, ``beside``, ``without``). If theirs is an approximation
of ours, ``NOTES`` says how. We read the frameworks' code in 2026: verl 0.9.1 (0.7 where it differs), TRL 1.16, and
SkyRL, slime and ms-swift of August. ``tests/run_folder/test_names.py`` recomputes each formula.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Name:
    """This kit's name for a framework's name, and the conditions under which it holds.

    Args:
        ours: this kit's name, without ``offpolicy/``.
        losses: holds only under these policy losses, as the framework names them; empty = under any.
        but: does not hold under these policy losses.
        beside: holds only in a row that also has this key (``*`` = anything).
        without: holds only in a row that does not have this key.
        assumed: holds also if the policy loss is not known, because it does so under nearly all of them.
    """

    ours: str
    losses: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    beside: str = ""
    without: str = ""
    assumed: bool = False

    def holds(self, keys: Collection[str], loss: str | None) -> bool:
        """True if the translation holds in a row with these keys, under this policy loss (None = unknown)."""
        taken = not self.losses or loss in self.losses or (self.assumed and loss is None)
        if not taken or loss in self.but:
            return False
        if self.without and _any_fits(keys, self.without):
            return False
        return not self.beside or _any_fits(keys, self.beside)


LOSSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "verl": (
            "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo",
            "bypass_mode",
        ),
        "SkyRL": (
            "regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "clip_cov", "kl_cov",
            "importance_sampling", "cross_entropy",
        ),
        "slime": ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    }
)  # fmt: skip
"""Policy losses as the frameworks name them: verl's ``policy_loss.loss_mode``, SkyRL's ``policy_loss_type``, slime's
``advantage_estimator``."""

_BYPASS = ("bypass_mode",)
_KL_IS_MEAN = tuple(one for one in LOSSES["verl"] if one not in ("kl_cov", "gpg", "bypass_mode"))
_MISMATCH = {
    "kl": "kl_k1",
    "k3_kl": "kl_k3",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff",
    "ppl_ratio": "ppl_ratio",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
    "training_ppl": "ppl_old",
    "rollout_ppl": "ppl_sampling",
}
_VERL_MISMATCH = {**_MISMATCH, **{f"log_ppl_diff_{end}": f"log_ppl_diff_{end}" for end in ("max", "min")}}
_OOB = "rollout_corr/rollout_is_oob_ratio"
ZEROED = _OOB
"""verl's name of the share of weights that a band sets to 0; only a band logs it."""
_NORMALIZED = "rollout_corr/rollout_is_batch_norm_factor"

_VERL: dict[str, tuple[Name, ...]] = {
    **{
        f"rollout_corr/{theirs}": (Name(f"mismatch/{ours}", but=_BYPASS), Name(f"total/{ours}", losses=_BYPASS))
        for theirs, ours in _VERL_MISMATCH.items()
    },
    **{f"actor/rollout_corr/{theirs}": (Name(f"total/{ours}"),) for theirs, ours in _VERL_MISMATCH.items()},
    **{
        f"rollout_corr/rollout_is_{name}": (Name(f"weight_applied/{name}", but=_BYPASS, without=_NORMALIZED),)
        for name in ("mean", "std")
    },
    "rollout_corr/rollout_is_eff_sample_size": (Name("weight_applied/ess_token", but=_BYPASS),),
    _NORMALIZED: (Name("weight/normalizer"),),
    _OOB: (Name("weight/truncated_fraction"),),
    "rollout_corr/rollout_is_ratio_fraction_high": (Name("weight/truncated_fraction", without=_OOB),),
    "rollout_corr/rollout_rs_masked_fraction": (Name("keep/dropped_token_fraction"),),
    "rollout_corr/rollout_rs_seq_masked_fraction": (
        Name("keep/dropped_sequence_fraction", without="rollout_corr/rollout_rs_token_*"),
    ),
    "training/rollout_probs_diff_max": (Name("mismatch/prob_diff_max"),),
    "training/rollout_probs_diff_mean": (Name("mismatch/prob_diff_mean"),),
    "training/rollout_probs_diff_std": (Name("mismatch/prob_diff_std"),),
    "training/rollout_actor_probs_pearson_corr": (Name("mismatch/prob_pearson"),),
    "actor/pg_clipfrac": (Name("loss/clip_region_fraction", losses=("vanilla", "dppo_tv", "dppo_kl", "bypass_mode")),),
    "actor/ppo_kl": (
        Name("staleness/kl_k1", losses=_KL_IS_MEAN, assumed=True),
        Name("staleness/logp_diff_mean", losses=("kl_cov",)),
        Name("total/kl_k1", losses=_BYPASS),
    ),
    "actor/entropy": (Name("loss/entropy"),),
    "actor/entropy_loss": (Name("loss/entropy", without="actor/entropy"),),
    "response_length/mean": (Name("rollout/response_length_mean"),),
    "critic/score/mean": (Name("reward"),),
    "actor/grad_norm": (Name("grad_norm"),),
}
_TRL = {
    "sampling/sampling_logp_difference/mean": (Name("mismatch/logp_diff_mean"),),
    "sampling/sampling_logp_difference/max": (Name("mismatch/logp_diff_max"),),
    "sampling/importance_sampling_ratio/min": (Name("weight_applied/min"),),
    "sampling/importance_sampling_ratio/max": (Name("weight_applied/max"),),
    "clip_ratio/region_mean": (Name("loss/clip_region_fraction"),),
    "completions/mean_length": (Name("rollout/response_length_mean"),),
    "completion_length": (Name("rollout/response_length_mean", without="completions/mean_length"),),
    "entropy": (Name("loss/entropy"),),
}
_TOKEN_TIS, _OUTLIERS = "*tis_token_clip_high_ratio", "*outlier_seq_masked_ratio"
_SKYRL_CLIP = (Name("loss/clip_region_fraction", losses=("regular", "dual_clip")),)
_SKYRL = {
    "policy/rollout_train_logprobs_abs_diff_mean": (Name("mismatch/logp_diff_mean"),),
    "policy/rollout_train_logprobs_abs_diff_std": (Name("mismatch/logp_diff_std"),),
    "policy/rollout_train_logprobs_abs_diff_max": (Name("mismatch/logp_diff_max"),),
    "*/is_ratio_mean": (Name("weight/mean", beside=_TOKEN_TIS),),
    "*/is_ratio_max": (Name("weight/max", beside=_TOKEN_TIS),),
    "*/tis_token_clip_high_ratio": (Name("weight/truncated_fraction"),),
    "*/tis_seq_clip_high_ratio": (Name("weight/truncated_fraction"),),
    "*/token_mask_ratio": (Name("keep/ratio_band_token/dropped_fraction", without=_OUTLIERS),),
    "*/outlier_seq_masked_ratio": (Name("keep/outlier_veto/dropped_fraction"),),
    "*/geo_sequence_mask_masked_ratio": (
        Name("keep/dropped_sequence_fraction", without=_OUTLIERS),
        Name("keep/ratio_band_sequence_mean/dropped_fraction"),
    ),
    "*/product_sequence_mask_masked_ratio": (
        Name("keep/dropped_sequence_fraction", without=_OUTLIERS),
        Name("keep/ratio_band_sequence/dropped_fraction"),
    ),
    "policy/loss_metrics/clip_ratio": _SKYRL_CLIP,
    "policy/clip_ratio": _SKYRL_CLIP,
    "policy/ppo_clip_ratio": _SKYRL_CLIP,
    "generate/avg_assistant_tokens": (Name("rollout/response_length_mean"),),
    "generate/avg_num_tokens": (Name("rollout/response_length_mean", without="generate/avg_assistant_tokens"),),
    "reward/avg_raw_reward": (Name("reward"),),
    "policy/policy_entropy": (Name("loss/entropy"),),
    "policy/grad_norm": (Name("grad_norm"),),
    "policy/raw_grad_norm": (Name("grad_norm", without="policy/grad_norm"),),
}
_SLIME = {
    **{f"train/mis_{theirs}": (Name(f"mismatch/{ours}"),) for theirs, ours in _MISMATCH.items()},
    "train/train_rollout_logprob_abs_diff": (Name("mismatch/logp_diff_mean"),),
    "train/tis": (Name("weight/mean"),),
    "train/tis_clipfrac": (Name("weight/truncated_fraction"),),
    "train/pg_clipfrac": (
        Name("loss/clip_region_fraction", losses=tuple(one for one in LOSSES["slime"] if one != "cispo")),
    ),
    "train/ppo_kl": (Name("staleness/kl_k1"),),
    "train/entropy_loss": (Name("loss/entropy"),),
    "rollout/response_len/mean": (Name("rollout/response_length_mean"),),
    "rollout/raw_reward": (Name("reward"),),
    "train/grad_norm": (Name("grad_norm"),),
}
_SWIFT = {
    **{
        f"rollout_correction/{theirs}": (Name(f"mismatch/{ours}"),)
        for theirs, ours in _VERL_MISMATCH.items()
        if theirs != "chi2_seq"  # of geometric means in ms-swift
    },
    "rollout_correction/is_weight_mean": (Name("weight_applied/mean"),),
    "rollout_correction/ess": (Name("weight_applied/ess_token"),),
    "rollout_correction/clipped_frac": (Name("weight/truncated_fraction"),),
}
NAMES: Mapping[str, Mapping[str, tuple[Name, ...]]] = MappingProxyType(
    {"ms-swift": _SWIFT, "verl": _VERL, "TRL": _TRL, "SkyRL": _SKYRL, "slime": _SLIME}
)
"""Framework -> its name -> ours, with conditions. ``*/name`` means any prefix or none."""

OTHER_WEIGHT_MEANS = ("sampling/importance_sampling_ratio/mean",)
"""Means of weights over tokens or over responses, which the log does not tell: not ours, but 1 in either case."""

_ACTOR = "up to verl 0.7 the actor logs current/sampling over it, averaged over the updates of a batch"
_BY_RESPONSE = "the mean over responses of their means over tokens; ours is the mean over all tokens"
_WITH_TOOLS = "tool output, if there is any, counts as length"
NOTES: Mapping[str, str] = MappingProxyType(
    {
        **{f"rollout_corr/{name}": _ACTOR for name in _VERL_MISMATCH},
        **{f"rollout_corr/rollout_is_{name}": "up to verl 0.7 before the cap" for name in ("mean", "std")},
        "rollout_corr/rollout_is_eff_sample_size": "up to verl 0.7 of weights raised to at least 1 / cap",
        _OOB: "counts tokens also where the weight is one of whole responses",
        "training/rollout_probs_diff_std": "divided by n - 1; ours by n",
        "actor/pg_clipfrac": "under rejection over the kept tokens; ours over all",
        "actor/ppo_kl": "under rejection over the kept tokens; ours over all",
        "actor/entropy": "aggregated as the loss is: a mean over tokens with loss_agg_mode token-mean, verl's default",
        "response_length/mean": f"{_WITH_TOOLS}, and aborted responses count",
        "sampling/sampling_logp_difference/mean": "the mean of the micro-batches' means",
        "completions/mean_length": _WITH_TOOLS,
        "completion_length": _WITH_TOOLS,
        "generate/avg_num_tokens": _WITH_TOOLS,
        "rollout/response_len/mean": _WITH_TOOLS,
        "rollout_correction/ess": "of weights raised to at least 1 / threshold",
        "rollout_correction/clipped_frac": "of tokens, or of responses with a mode of whole responses",
        "*/tis_token_clip_high_ratio": "of the tokens that the outlier and token masks left",
        **{f"train/mis_{name}": _BY_RESPONSE for name in ("kl", "k3_kl", "chi2_token")},
        "train/ppo_kl": f"{_BY_RESPONSE}; with --use-rollout-logprobs of current/sampling",
        **{
            f"train/{name}": _BY_RESPONSE
            for name in ("train_rollout_logprob_abs_diff", "tis", "tis_clipfrac", "pg_clipfrac", "entropy_loss")
        },
    }
)
"""Framework's name -> how it differs from ours."""
_OWN_KEYS = frozenset({"reward", "grad_norm"})
_PREFIX = "offpolicy/"


def translate(row: Mapping[str, float], loss: str | None = None) -> dict[str, float]:
    """The row with our names added if a framework's name means the same. Existing entries are kept.

    Args:
        row: framework's name -> number.
        loss: the run's policy loss, one of :data:`LOSSES`; None = unknown, and names that depend on it are left out.

    Raises:
        ValueError: ``loss`` is not a policy loss of these frameworks.

    Example:
        >>> translate({"step": 3, "rollout_corr/k3_kl": 0.01})["offpolicy/mismatch/kl_k3"]
        0.01
        >>> [len(translate({"actor/pg_clipfrac": 0.1}, loss)) for loss in (None, "cispo", "vanilla")]
        [1, 1, 2]
    """
    _check_loss(loss)
    added: dict[str, float] = {}
    for key, value in row.items():
        for ours in _ours(key, row.keys(), loss):
            if ours not in row:
                added.setdefault(ours, value)
    return {**row, **added}


def remarks(keys: Iterable[str], loss: str | None = None) -> tuple[str, ...]:
    """Sentences about names that differ slightly from ours, and about names whose meaning depends on the loss."""
    _check_loss(loss)
    names = set(keys)
    noted: dict[str | None, list[str]] = {}
    left_out = []
    for key in sorted(names):
        note = _lookup(key, NOTES)
        if loss is None and (read_as := next((name.ours for name in _candidates(key) if name.assumed), "")):
            left_out.append(
                f"{key} is read as {read_as}: so it is under most policy losses, and which it is is not known."
            )
        if any(_ours(key, names, loss)):
            noted.setdefault(note, []).append(key)
        elif loss is None and any(name.losses for name in _candidates(key)):
            left_out.append(f"{key} is left out: what it counts depends on the policy loss, which is not known.")
    return (*(f"{', '.join(same)}: {note}." for note, same in noted.items() if note), *left_out)


def frameworks(keys: Iterable[str]) -> tuple[str, ...]:
    """The frameworks whose names appear: this kit first, then those with the most names.

    ms-swift logs TRL's names too, so it comes before TRL where any of its own appears.
    """
    names = set(keys)
    own = ("trl-offpolicy",) if any(key.startswith(_PREFIX) for key in names) else ()
    found = {name: sum(_lookup(key, table) is not None for key in names) for name, table in NAMES.items()}
    order = {name: (name != "ms-swift", -count) for name, count in found.items() if count}
    return own + tuple(sorted(order, key=order.__getitem__))


def _check_loss(loss: str | None) -> None:
    known = sorted({one for losses in LOSSES.values() for one in losses})
    if loss is not None and loss not in known:
        raise ValueError(f"loss must be among {', '.join(known)}, but got {loss!r}.")


def _ours(key: str, keys: Collection[str], loss: str | None) -> Iterator[str]:
    for name in _candidates(key):
        if name.holds(keys, loss):
            yield name.ours if name.ours in _OWN_KEYS else _PREFIX + name.ours


def _candidates(key: str) -> tuple[Name, ...]:
    if key.startswith(_PREFIX):
        return ()
    return next((found for table in NAMES.values() if (found := _lookup(key, table)) is not None), ())


def _lookup(key: str, table: Mapping[str, T]) -> T | None:
    return table.get(key, table.get("*/" + key.rsplit("/", 1)[-1]))


def _any_fits(keys: Collection[str], pattern: str) -> bool:
    return any(fnmatchcase(key, pattern) for key in keys)
