"""Names of other frameworks: each formula, written down from their code, against this kit's metric on one batch.

Sources: verl 0.9.1 ``trainer/ppo/rollout_corr_helper.py``, ``trainer/ppo/core_algos.py``, ``utils/debug/metrics.py``;
TRL 1.16 ``trainer/grpo_trainer.py``; SkyRL ``skyrl/backends/skyrl_train/utils/{off_policy_correction,ppo}_utils.py``;
slime ``slime/backends/megatron_utils/loss.py``, ``examples/train_infer_mismatch_helper/mis.py`` (August 2026).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import trl_offpolicy as op
from trl_offpolicy.run_folder.names import LOSSES, NAMES, NOTES, frameworks, remarks, translate

CAP, LOW, HIGH = 1.5, 0.8, 1.2
"""Cap of the truncated weights; clip of the losses, and bounds of the band."""
TOLERANCE = 1e-4
SKIPPED = ("reward", "grad_norm")
"""Not this kit's own metrics."""


class Batch(NamedTuple):
    """Log-probs (B, T) of the three policies, mask, advantages (B, 1), entropies."""

    sampling: Tensor
    old: Tensor
    now: Tensor
    mask: Tensor
    advantages: Tensor
    entropies: Tensor

    def mean(self, values: Tensor) -> float:
        """Over the tokens."""
        return float(values.expand_as(self.mask)[self.mask].mean())

    @property
    def length(self) -> float:
        """Mean length of a response."""
        return float(self.mask.sum(1).float().mean())

    def rows(self, values: Tensor) -> Tensor:
        """(B,) means over each response's tokens."""
        return (values * self.mask).sum(1) / self.mask.sum(1)

    def total(self, values: Tensor) -> Tensor:
        """(B,) sums over each response's tokens."""
        return (values * self.mask).sum(1)


@cache
def batch(*, ragged: bool = True) -> Batch:
    """Eight responses; the ratios reach well beyond every bound above."""
    draw = torch.Generator().manual_seed(3)
    noise = torch.randn(4, 8, 12, generator=draw)
    sampling = -noise[0].abs() - 0.5
    old = (sampling + 0.3 * noise[1] + 0.1).clamp(max=-0.01)
    now = (old + 0.25 * (noise[2] + noise[2, :, -1:])).clamp(max=-0.01)
    lengths = torch.tensor([12, 2, 3, 9, 1, 6, 4, 11]) if ragged else torch.full((8,), 12)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1.0, -1.0]).unsqueeze(1)
    return Batch(sampling, old, now, torch.arange(12) < lengths.unsqueeze(1), advantages, noise[3].abs())


def ours(b: Batch, loss: Any = None, *, mode: str = "decoupled", **correction: Any) -> dict[str, float]:
    """This kit's metrics on the batch, without their prefix."""
    policy = op.PolicyBatch(
        per_token_logps=b.now.clone().requires_grad_(),
        old_per_token_logps=b.old,
        sampling_per_token_logps=b.sampling,
        completion_mask=b.mask,
        advantages=b.advantages.squeeze(1),
        rewards=b.advantages.squeeze(1),
        group_ids=torch.arange(8) // 2,
        entropies=b.entropies,
    )
    objective = op.Objective(policy_loss=loss or op.losses.PPOClip(), correction=op.Correction(**correction), mode=mode)
    return {key.removeprefix("offpolicy/"): value for key, value in objective(policy).stats.compute().items()}


# ------------------------------------------------------------------------------------------------- their formulas
def mismatch(b: Batch, trainer: Tensor) -> dict[str, float]:
    """verl's ``compute_offpolicy_metrics`` and slime's ``add_ppl_metrics`` (there by response)."""
    log_ratio, a, s = trainer - b.sampling, b.rows(trainer), b.rows(b.sampling)
    return {
        "kl": b.mean(-log_ratio),
        "k3_kl": b.mean(log_ratio.exp() - log_ratio - 1),
        "log_ppl_diff": float((s - a).mean()),
        "log_ppl_abs_diff": float((s - a).abs().mean()),
        "log_ppl_diff_max": float((s - a).max()),
        "log_ppl_diff_min": float((s - a).min()),
        "ppl_ratio": float((s - a).exp().mean()),
        "chi2_token": b.mean(log_ratio.exp().square()) - 1,
        "chi2_seq": float((2 * b.total(log_ratio)).exp().mean()) - 1,
        "training_ppl": float((-a).exp().mean()),
        "rollout_ppl": float((-s).exp().mean()),
    }


def surrogate_clipped(b: Batch, log_ratio: Tensor) -> Tensor:
    """Where PPO's clipped surrogate is the larger loss (verl vanilla, SkyRL regular, slime)."""
    ratio = log_ratio.exp()
    return (-b.advantages * ratio.clamp(LOW, HIGH) > -b.advantages * ratio).float()


def any_side(log_ratio: Tensor) -> Tensor:
    """CISPO: the ratio is not its clipped self, whatever the advantage."""
    ratio = log_ratio.exp()
    return ((ratio < LOW) | (ratio > HIGH)).float()


def dppo_out(b: Batch, kind: str, limit: float) -> Tensor:
    """verl's dppo_tv and dppo_kl: 1 - valid_mask."""
    now, old = b.now.exp(), b.old.exp()
    if kind == "tv":
        rising, falling = now - old > limit, now - old < -limit
    else:
        kl = old * (b.old - b.now) + (1 - old) * ((1 - old + 1e-8) / (1 - now + 1e-8)).log()
        rising, falling = (kl > limit) & (now > old), (kl > limit) & (now < old)
    return torch.where(b.advantages > 0, rising, falling).float()


def ess(b: Batch, weights: Tensor) -> float:
    """verl: 1 / E[(w / E w)^2]."""
    return 1 / b.mean((weights / b.mean(weights)).square())


def std(b: Batch, weights: Tensor) -> float:
    """verl: sqrt(E w^2 - (E w)^2)."""
    return float((b.mean(weights.square()) - b.mean(weights) ** 2) ** 0.5)


class Case(NamedTuple):
    """Their name and number, ours and its number; the loss that was told and what else the row holds."""

    key: str
    theirs: float
    name: str
    here: float
    loss: str | None = None
    row: tuple[str, ...] = ()


@cache
def agreeing() -> tuple[Case, ...]:
    """What is translated: one case at least of each name and meaning."""
    return (*_verl(), *_trl(), *_skyrl(), *_slime(), *_swift())


def _of(metrics: dict[str, float], name: str) -> tuple[str, float]:
    return name, metrics[name]


def _verl() -> list[Case]:
    b = batch()
    weighed = ours(b, weight=op.TruncateWeight(max_weight=CAP))
    rho, cases = (b.old - b.sampling).exp(), []
    for theirs, value in mismatch(b, b.old).items():
        name = f"mismatch/{OURS[theirs]}"
        cases.append(Case(f"rollout_corr/{theirs}", value, *_of(weighed, name)))
        cases.append(Case(f"rollout_corr/{theirs}", value, *_of(weighed, name), "vanilla"))
    for theirs, value in mismatch(b, b.now).items():
        name = f"total/{OURS[theirs]}"
        cases.append(Case(f"rollout_corr/{theirs}", value, *_of(weighed, name), "bypass_mode"))
        cases.append(Case(f"actor/rollout_corr/{theirs}", value, *_of(weighed, name)))
    capped, band = rho.clamp(max=CAP), torch.where((rho >= LOW) & (rho <= HIGH), rho, 0.0)
    cases += [
        Case("rollout_corr/rollout_is_mean", b.mean(capped), *_of(weighed, "weight_applied/mean")),
        Case("rollout_corr/rollout_is_std", std(b, capped), *_of(weighed, "weight_applied/std")),
        Case("rollout_corr/rollout_is_eff_sample_size", ess(b, capped), *_of(weighed, "weight_applied/ess_token")),
        Case(
            "rollout_corr/rollout_is_ratio_fraction_high",
            b.mean((rho > CAP).float()),
            *_of(weighed, "weight/truncated_fraction"),
        ),
    ]
    icepop = ours(b, weight=op.BandWeight(low=LOW, high=HIGH))
    cases += [
        Case("rollout_corr/rollout_is_eff_sample_size", ess(b, band), *_of(icepop, "weight_applied/ess_token")),
        Case("rollout_corr/rollout_is_std", std(b, band), *_of(icepop, "weight_applied/std")),
        Case(
            "rollout_corr/rollout_is_oob_ratio",
            b.mean(((rho < LOW) | (rho > HIGH)).float()),
            *_of(icepop, "weight/truncated_fraction"),
        ),
    ]
    product = b.total(b.old - b.sampling).exp().unsqueeze(1)
    by_response = ours(b, weight=op.TruncateWeight(level="sequence", max_weight=CAP))
    whole = product.clamp(max=CAP).expand_as(rho)
    cases += [
        Case("rollout_corr/rollout_is_mean", b.mean(whole), *_of(by_response, "weight_applied/mean")),
        Case("rollout_corr/rollout_is_eff_sample_size", ess(b, whole), *_of(by_response, "weight_applied/ess_token")),
        Case(
            "rollout_corr/rollout_is_ratio_fraction_high",
            float((product > CAP).float().mean()),
            *_of(by_response, "weight/truncated_fraction"),
        ),
    ]
    normed = ours(b, weight=op.TruncateWeight(max_weight=CAP), normalize="original")
    cases.append(Case("rollout_corr/rollout_is_batch_norm_factor", b.mean(capped), *_of(normed, "weight/normalizer")))
    geometric = b.rows(b.old - b.sampling).exp()
    out = (geometric < 0.9) | (geometric > 1 / 0.9)
    rejecting = ours(b, keep=(op.RatioBand(level="sequence_mean", low=0.9, high=1 / 0.9),))
    sequences = ("rollout_corr/rollout_rs_seq_mean_k1_masked_fraction",)
    cases += [
        Case(
            "rollout_corr/rollout_rs_masked_fraction",
            b.mean(out.float().unsqueeze(1)),
            *_of(rejecting, "keep/dropped_token_fraction"),
        ),
        Case(
            "rollout_corr/rollout_rs_seq_masked_fraction",
            float(out.float().mean()),
            *_of(rejecting, "keep/dropped_sequence_fraction"),
            row=sequences,
        ),
    ]
    difference = (b.old.exp() - b.sampling.exp()).abs()[b.mask]
    both = torch.stack([b.old.exp()[b.mask], b.sampling.exp()[b.mask]])
    n = len(difference)
    population = float(difference.std()) * ((n - 1) / n) ** 0.5  # theirs divides by n - 1, as NOTES says
    cases += [
        Case("training/rollout_probs_diff_max", float(difference.max()), *_of(weighed, "mismatch/prob_diff_max")),
        Case("training/rollout_probs_diff_mean", float(difference.mean()), *_of(weighed, "mismatch/prob_diff_mean")),
        Case("training/rollout_probs_diff_std", population, *_of(weighed, "mismatch/prob_diff_std")),
        Case(
            "training/rollout_actor_probs_pearson_corr",
            float(torch.corrcoef(both)[0, 1]),
            *_of(weighed, "mismatch/prob_pearson"),
        ),
    ]
    region = "loss/clip_region_fraction"
    bypass = ours(b, mode="bypass")
    cases += [
        Case("actor/pg_clipfrac", b.mean(surrogate_clipped(b, b.now - b.old)), *_of(weighed, region), "vanilla"),
        Case(
            "actor/pg_clipfrac", b.mean(surrogate_clipped(b, b.now - b.sampling)), *_of(bypass, region), "bypass_mode"
        ),
        Case("actor/ppo_kl", b.mean(b.sampling - b.now), *_of(weighed, "total/kl_k1"), "bypass_mode"),
        Case("actor/ppo_kl", b.mean((b.now - b.old).abs()), *_of(weighed, "staleness/logp_diff_mean"), "kl_cov"),
        *(
            Case("actor/ppo_kl", b.mean(b.old - b.now), *_of(weighed, "staleness/kl_k1"), loss)
            for loss in LOSSES["verl"]
            if loss not in ("kl_cov", "gpg", "bypass_mode")
        ),
        Case("actor/entropy", b.mean(b.entropies), *_of(weighed, "loss/entropy")),
        Case("actor/entropy_loss", b.mean(b.entropies), *_of(weighed, "loss/entropy")),
        Case("response_length/mean", b.length, *_of(weighed, "rollout/response_length_mean")),
    ]
    for kind, limit in (("tv", 0.05), ("kl", 0.005)):
        loss = op.losses.DPPO(divergence=kind, low=limit, high=limit)
        cases.append(
            Case("actor/pg_clipfrac", b.mean(dppo_out(b, kind, limit)), *_of(ours(b, loss), region), f"dppo_{kind}")
        )
    return cases


def _trl() -> list[Case]:
    b = batch()
    gap = (b.old - b.sampling).abs()[b.mask]
    cases = []
    for level, ratio in (
        ("token", (b.old - b.sampling).exp()[b.mask]),
        ("sequence", b.total(b.old - b.sampling).exp()),
    ):
        for weight, theirs in (
            (op.TruncateWeight(level=level, max_weight=CAP), ratio.clamp(max=CAP)),
            (op.BandWeight(level=level, low=LOW, high=HIGH), torch.where((ratio < LOW) | (ratio > HIGH), 0.0, ratio)),
        ):
            metrics = ours(b, weight=weight)
            for end in ("min", "max"):
                key = f"sampling/importance_sampling_ratio/{end}"
                cases.append(Case(key, float(getattr(theirs, end)()), *_of(metrics, f"weight_applied/{end}")))
    plain, gspo = ours(b), ours(b, op.losses.PPOClip(level="sequence_mean"))
    region, mean = "loss/clip_region_fraction", b.rows(b.now - b.old).unsqueeze(1)
    return [
        *cases,
        Case("sampling/sampling_logp_difference/mean", float(gap.mean()), *_of(plain, "mismatch/logp_diff_mean")),
        Case("sampling/sampling_logp_difference/max", float(gap.max()), *_of(plain, "mismatch/logp_diff_max")),
        Case("clip_ratio/region_mean", b.mean(surrogate_clipped(b, b.now - b.old)), *_of(plain, region)),
        Case("clip_ratio/region_mean", float(surrogate_clipped(b, mean).mean()), *_of(gspo, region)),
        Case("completions/mean_length", b.length, *_of(plain, "rollout/response_length_mean")),
        Case("completion_length", b.length, *_of(plain, "rollout/response_length_mean")),
        Case("entropy", b.mean(b.entropies), *_of(plain, "loss/entropy")),
    ]


def _skyrl() -> list[Case]:
    b = batch()
    log_ratio, token_tis = b.old - b.sampling, ("policy/loss_metrics/tis_token_clip_high_ratio",)
    rho, product, geometric = log_ratio.exp(), b.total(log_ratio).exp(), b.rows(log_ratio).exp()
    token = ours(b, weight=op.TruncateWeight(max_weight=CAP))
    whole = ours(b, weight=op.TruncateWeight(level="sequence", max_weight=CAP))
    kept = "keep/dropped_sequence_fraction"
    region, length = "loss/clip_region_fraction", "rollout/response_length_mean"
    cases = [
        Case("policy/loss_metrics/is_ratio_mean", b.mean(rho), *_of(token, "weight/mean"), row=token_tis),
        Case("policy/loss_metrics/is_ratio_max", float((rho * b.mask).max()), *_of(token, "weight/max"), row=token_tis),
        Case(token_tis[0], b.mean((rho > CAP).float()), *_of(token, "weight/truncated_fraction")),
        Case(
            "policy/loss_metrics/tis_seq_clip_high_ratio",
            float((product > CAP).float().mean()),
            *_of(whole, "weight/truncated_fraction"),
        ),
        Case("policy/policy_entropy", b.mean(b.entropies), *_of(token, "loss/entropy")),
        Case("generate/avg_assistant_tokens", b.length, *_of(token, length)),
        Case("generate/avg_num_tokens", b.length, *_of(token, length)),
    ]
    for name, ratio, level, half in (("geo", geometric, "sequence_mean", 1.1), ("product", product, "sequence", 2.0)):
        metrics = ours(b, keep=(op.RatioBand(level=level, low=1 / half, high=half),))
        out = float(((ratio < 1 / half) | (ratio > half)).float().mean())
        cases.append(Case(f"policy/loss_metrics/{name}_sequence_mask_masked_ratio", out, *_of(metrics, kept)))
    cases += _skyrl_masks(b)
    gap = (b.sampling - b.old).abs()[b.mask]
    for end, value in (("mean", gap.mean()), ("std", gap.std(correction=0)), ("max", gap.max())):
        name = f"mismatch/logp_diff_{end}"
        cases.append(Case(f"policy/rollout_train_logprobs_abs_diff_{end}", float(value), *_of(token, name)))
    for key in ("policy/loss_metrics/clip_ratio", "policy/clip_ratio", "policy/ppo_clip_ratio"):
        for loss in ("regular", "dual_clip"):
            cases.append(Case(key, b.mean(surrogate_clipped(b, b.now - b.old)), *_of(token, region), loss))
    return cases


def _skyrl_masks(b: Batch) -> list[Case]:
    """SkyRL's masks, each on what the earlier ones left: outliers or tokens first, then whole responses."""
    log_ratio, veto = b.old - b.sampling, op.OutlierVeto(low=0.6, high=1.8)
    rho = log_ratio.exp()
    vetoed = (((rho < 0.6) | (rho > 1.8)) & b.mask).any(1)
    by_token = ((rho < LOW) | (rho > HIGH)) & b.mask
    shares = {"outlier_seq": float(vetoed.float().mean()), "token_mask": float(by_token.sum() / b.mask.sum())}
    only = {
        "outlier_seq": (ours(b, keep=(veto,), measure_on="remaining"), "outlier_veto"),
        "token_mask": (ours(b, keep=(op.RatioBand(level="token", low=LOW, high=HIGH),)), "ratio_band_token"),
    }
    keys = {"outlier_seq": "outlier_seq_masked_ratio", "token_mask": "token_mask_ratio"}
    cases = [
        Case(f"policy/loss_metrics/{keys[name]}", shares[name], *_of(metrics, f"keep/{term}/dropped_fraction"))
        for name, (metrics, term) in only.items()
    ]
    left = b.mask & ~vetoed.unsqueeze(1)
    total = (log_ratio * left).sum(1)
    geometric, product = (total / left.sum(1).clamp(min=1)).exp(), total.exp()
    for name, ratio, level, half in (("geo", geometric, "sequence_mean", 1.1), ("product", product, "sequence", 2.0)):
        metrics = ours(b, keep=(veto, op.RatioBand(level=level, low=1 / half, high=half)), measure_on="remaining")
        cases.append(
            Case(
                f"policy/loss_metrics/{name}_sequence_mask_masked_ratio",
                float(((ratio < 1 / half) | (ratio > half)).float().mean()),
                *_of(metrics, f"keep/ratio_band_{level}/dropped_fraction"),
                row=("policy/loss_metrics/outlier_seq_masked_ratio",),
            )
        )
    return cases


def _swift() -> list[Case]:
    """ms-swift's ``_compute_rollout_offpolicy_metrics`` and ``_compute_is_correction_metrics``, token_truncate."""
    b = batch()
    weighed, rho = ours(b, weight=op.TruncateWeight(max_weight=CAP)), (b.old - b.sampling).exp()
    capped, cut = rho.clamp(max=CAP), (rho > CAP).float()
    cases = [
        Case(f"rollout_correction/{key}", value, *_of(weighed, f"mismatch/{OURS[key]}"))
        for key, value in mismatch(b, b.old).items()
        if key != "chi2_seq"  # of geometric means there
    ]
    return [
        *cases,
        Case("rollout_correction/is_weight_mean", b.mean(capped), *_of(weighed, "weight_applied/mean")),
        Case("rollout_correction/ess", ess(b, capped), *_of(weighed, "weight_applied/ess_token")),
        Case("rollout_correction/clipped_frac", b.mean(cut), *_of(weighed, "weight/truncated_fraction")),
    ]


def _slime() -> list[Case]:
    """Means over responses of their means: ours where these are equally long; exact where a response is the unit."""
    even, region = batch(ragged=False), "loss/clip_region_fraction"
    ragged, rho = batch(), (even.old - even.sampling).exp()
    plain = ours(even, weight=op.TruncateWeight(max_weight=CAP))
    of_ragged = ours(ragged)
    cases = []
    for key, value in mismatch(even, even.old).items():
        if key not in ("log_ppl_diff_max", "log_ppl_diff_min"):
            cases.append(Case(f"train/mis_{key}", value, *_of(plain, f"mismatch/{OURS[key]}")))
    for key in ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq", "training_ppl", "rollout_ppl"):
        value = mismatch(ragged, ragged.old)[key]
        cases.append(Case(f"train/mis_{key}", value, *_of(of_ragged, f"mismatch/{OURS[key]}")))
    mean = even.rows(even.now - even.old).unsqueeze(1)
    gspo = ours(even, op.losses.PPOClip(level="sequence_mean"))
    clipped = even.mean(surrogate_clipped(even, even.now - even.old))
    cases += [
        Case("train/pg_clipfrac", even.mean(surrogate_clipped(even, mean)), *_of(gspo, region), "gspo"),
        *(
            Case("train/pg_clipfrac", clipped, *_of(plain, region), loss)
            for loss in LOSSES["slime"]
            if loss not in ("gspo", "cispo")
        ),
        Case("train/tis", even.mean(rho), *_of(plain, "weight/mean")),
        Case("train/tis_clipfrac", even.mean((rho > CAP).float()), *_of(plain, "weight/truncated_fraction")),
        Case(
            "train/train_rollout_logprob_abs_diff", even.mean(rho.log().abs()), *_of(plain, "mismatch/logp_diff_mean")
        ),
        Case("train/ppo_kl", even.mean(even.old - even.now), *_of(plain, "staleness/kl_k1")),
        Case("train/entropy_loss", even.mean(even.entropies), *_of(plain, "loss/entropy")),
        Case(
            "rollout/response_len/mean",
            ragged.length,
            *_of(of_ragged, "rollout/response_length_mean"),
        ),
    ]
    return cases


OURS = {
    "kl": "kl_k1", "k3_kl": "kl_k3", "log_ppl_diff": "log_ppl_diff", "log_ppl_abs_diff": "log_ppl_abs_diff",
    "log_ppl_diff_max": "log_ppl_diff_max", "log_ppl_diff_min": "log_ppl_diff_min", "ppl_ratio": "ppl_ratio",
    "chi2_token": "chi2_token", "chi2_seq": "chi2_sequence", "training_ppl": "ppl_old", "rollout_ppl": "ppl_sampling",
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- they agree
def test_every_name_is_checked() -> None:
    """Each framework's name with each of its meanings."""
    checked = {(key, name) for key, _, name, *_ in agreeing()}
    checked |= {("*/" + key.rsplit("/", 1)[-1], name) for key, name in checked}
    for framework, table in NAMES.items():
        for key, names in table.items():
            for name in names:
                assert name.ours in SKIPPED or (key, name.ours) in checked, (framework, key, name.ours)
    for note in NOTES:
        assert any(note in table for table in NAMES.values()), note


def test_what_is_translated_is_the_same_number() -> None:
    for key, theirs, name, here, loss, others in agreeing():
        row = translate({key: theirs, **dict.fromkeys(others, 0.0)}, loss)
        assert row[f"offpolicy/{name}"] == pytest.approx(here, rel=TOLERANCE, abs=TOLERANCE), (key, loss)
        assert not 0 < abs(theirs) < 1e-3, key  # a number that says nothing agrees with everything


# ----------------------------------------------------------------------------- they do not, and are not translated
def disagreeing() -> list[Case]:
    """Their number, and ours of the name that it would have been given."""
    b, region, dropped = batch(), "loss/clip_region_fraction", "keep/dropped_sequence_fraction"
    step, log_ratio = b.now - b.old, b.old - b.sampling
    rho, product = log_ratio.exp(), b.total(log_ratio).exp()
    icepop = ours(b, weight=op.BandWeight(low=LOW, high=HIGH))
    by_token = ours(b, keep=(op.RatioBand(level="token", low=LOW, high=HIGH),))
    whole = ours(b, weight=op.TruncateWeight(level="sequence", max_weight=CAP))
    normed = ours(b, weight=op.TruncateWeight(max_weight=CAP), normalize="original")
    cispo = ours(b, op.losses.CISPO(low=LOW, high=HIGH))
    outside = (step < LOW - 1) | (step > HIGH - 1)  # GMPO clips the log-ratio
    covariance = (b.advantages - b.mean(b.advantages)) * (b.now - b.mean(b.now))
    candidates = (covariance > 1) & (covariance < 5) & b.mask & ~surrogate_clipped(b, step).bool()
    taken = min(max(int(0.0002 * int(b.mask.sum())), 1), int(candidates.sum())) / int(b.mask.sum())
    low, high = op.OutlierVeto(low=0.6, high=1.8), op.RatioBand(level="sequence_mean", low=0.9, high=1.1)
    vetoed = (((rho < 0.6) | (rho > 1.8)) & b.mask).any(1)
    geometric = b.rows(log_ratio).exp()
    geo = ((geometric < 0.9) | (geometric > 1.1)) & ~vetoed
    two_masks = ours(b, keep=(low, high), measure_on="remaining")
    any_dropped = float((((rho < LOW) | (rho > HIGH)) & b.mask).any(1).float().mean())
    sequence_mean = b.rows(step).unsqueeze(1).expand_as(step)
    mean_ratio = "sampling/importance_sampling_ratio/mean"
    token_rs = ("rollout_corr/rollout_rs_token_k1_masked_fraction",)
    return [
        Case("actor/pg_clipfrac", b.mean(any_side(step)), *_of(cispo, region), "cispo"),
        Case(
            "actor/pg_clipfrac",
            b.mean((outside & (b.advantages > 0)).float()),
            *_of(ours(b, op.losses.GMPO(low=1 - LOW, high=HIGH - 1)), region),
            "geo_mean",
        ),
        Case("actor/pg_clipfrac", taken, *_of(ours(b, op.losses.ClipCov()), region), "clip_cov"),
        Case(
            "actor/pg_clipfrac",
            b.mean(surrogate_clipped(b, sequence_mean)),
            *_of(ours(b, op.losses.PPOClip(level="sequence_mean")), region),
            "gspo",
        ),
        Case("actor/ppo_kl", b.mean(step.abs()), *_of(icepop, "staleness/kl_k1"), "kl_cov"),
        Case("actor/ppo_kl", b.mean(b.sampling - b.now), *_of(icepop, "staleness/kl_k1"), "bypass_mode"),
        Case("rollout_corr/k3_kl", mismatch(b, b.now)["k3_kl"], *_of(icepop, "mismatch/kl_k3"), "bypass_mode"),
        Case(
            "rollout_corr/rollout_is_ratio_fraction_high",
            b.mean((rho > HIGH).float()),
            *_of(icepop, "weight/truncated_fraction"),
            row=("rollout_corr/rollout_is_oob_ratio",),
        ),
        Case("rollout_corr/rollout_rs_seq_masked_fraction", any_dropped, *_of(by_token, dropped), row=token_rs),
        Case(
            "rollout_corr/rollout_is_mean",
            b.mean(rho.clamp(max=CAP)),
            *_of(normed, "weight_applied/mean"),
            row=("rollout_corr/rollout_is_batch_norm_factor",),
        ),
        Case(mean_ratio, float(product.clamp(max=CAP).mean()), *_of(whole, "weight_applied/mean")),
        Case("policy/loss_metrics/is_ratio_mean", b.mean(rho), *_of(whole, "weight/mean")),
        Case("policy/loss_metrics/is_ratio_max", float((rho * b.mask).max()), *_of(whole, "weight/max")),
        Case(
            "policy/loss_metrics/geo_sequence_mask_masked_ratio",
            float(geo.float().mean()),
            *_of(two_masks, dropped),
            row=("policy/loss_metrics/outlier_seq_masked_ratio",),
        ),
        Case("policy/loss_metrics/clip_ratio", b.mean(any_side(step)), *_of(cispo, region), "cispo"),
        Case("train/pg_clipfrac", b.mean(any_side(step)), *_of(cispo, region), "cispo"),
        Case("train/ois", b.mean(step.exp()), *_of(ours(b, weight=op.RawWeight()), "weight/mean")),
    ]


def test_what_is_another_number_is_not_translated() -> None:
    for key, theirs, name, here, loss, others in disagreeing():
        assert theirs != pytest.approx(here, rel=0.05, abs=0.005), key
        row = translate({key: theirs, **dict.fromkeys(others, 0.25)}, loss)
        assert row.get(f"offpolicy/{name}") != theirs, (key, loss)


def test_means_over_responses_are_remarked_on() -> None:
    """slime's token quantities, on responses of unequal length: near ours, not the same."""
    b = batch()
    theirs, here = float(b.rows(b.sampling - b.old).mean()), ours(b)["mismatch/kl_k1"]
    assert theirs != pytest.approx(here, rel=0.05) and theirs == pytest.approx(here, rel=0.5)
    assert "mean over responses" in remarks(["train/mis_kl"])[0]


def test_a_log_of_ms_swift_is_not_taken_for_trls() -> None:
    keys = ["rollout_correction/kl", "entropy", "completions/mean_length", "clip_ratio/region_mean"]
    assert frameworks(keys) == ("ms-swift", "TRL") and frameworks(keys[1:]) == ("TRL",)
    row = translate({"rollout_correction/chi2_seq": 3.0, "rollout_correction/k3_kl": 0.01})
    assert row["offpolicy/mismatch/kl_k3"] == 0.01
    assert "offpolicy/mismatch/chi2_sequence" not in row  # of geometric means there


def test_what_the_loss_decides_is_left_out_without_it() -> None:
    keys = ["actor/pg_clipfrac", "policy/loss_metrics/clip_ratio", "train/pg_clipfrac"]
    for key in keys:
        assert translate({key: 0.3}) == {key: 0.3}
        assert f"{key} is left out" in " ".join(remarks([key]))
    assert remarks(["actor/pg_clipfrac"], "cispo") == ()
    # what it is under nearly every loss is assumed, and said
    assert translate({"actor/ppo_kl": 0.3})["offpolicy/staleness/kl_k1"] == 0.3
    assert "actor/ppo_kl is read as staleness/kl_k1" in " ".join(remarks(["actor/ppo_kl"]))
    assert "offpolicy/staleness/kl_k1" not in translate({"actor/ppo_kl": 0.3}, "bypass_mode")
    assert "is read as" not in " ".join(remarks(["actor/ppo_kl"], "vanilla"))
    with pytest.raises(ValueError, match=r"loss must be among .*vanilla.*, but got 'ppo_clip'"):
        translate({}, "ppo_clip")


def test_remarks_name_the_keys_that_are_there() -> None:
    (text,) = remarks(["train/mis_kl", "train/mis_k3_kl", "train/mis_chi2_seq"])
    assert text.startswith("train/mis_k3_kl, train/mis_kl: the mean over responses") and "chi2_seq" not in text
    assert remarks(["offpolicy/mismatch/kl_k1", "loss"]) == ()
