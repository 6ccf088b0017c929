"""``from_verl(loss_mode=...)``: what verl's losses become, their numbers in plain Python, what is said aloud."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from plain_parity import rows_of

from trl_offpolicy import losses, presets
from trl_offpolicy.presets.frameworks.options import UnknownOptionError
from trl_offpolicy.presets.frameworks.verl.losses import LOSS_MODES

DUAL = losses.PPOClip(low=0.2, high=0.2, dual_clip=3.0)


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="gspo is reduced by")
        return presets.from_verl(**options)


@pytest.mark.parametrize(
    ("mode", "options", "loss"),
    [
        ("vanilla", {}, DUAL),
        ("vanilla", {"clip_ratio": 0.1, "clip_ratio_low": None}, losses.PPOClip(low=0.1, high=0.2, dual_clip=3.0)),
        ("dppo_tv", {}, losses.DPPO(divergence="tv", low=0.2, high=0.2, max_ratio=3.0)),
        ("dppo_kl", {"clip_ratio_c": 20.0}, losses.DPPO(divergence="kl", low=0.2, high=0.2, max_ratio=20.0)),
        (
            "gspo",
            {"clip_ratio_low": 0.0003, "clip_ratio_high": 0.0004},
            losses.GSPOToken(low=0.0003, high=0.0004),
        ),
        ("sapo", {}, losses.SAPO(temperature_pos=1.0, temperature_neg=1.05)),
        ("gpg", {}, losses.GPG()),
        ("clip_cov", {}, losses.ClipCov(low=0.2, high=0.2, fraction=0.0002, cov_low=1.0, cov_high=5.0)),
        ("kl_cov", {}, losses.KLCov(fraction=0.0002, coef=0.1)),
        ("geo_mean", {"clip_ratio_high": 0.4}, losses.GMPO(low=0.2, high=0.4)),
        ("dro", {"dro_beta": 0.05}, losses.DRO(beta=0.05)),
        ("cispo", {"clip_ratio_high": 4.0}, losses.CISPO(low=0.8, high=5.0)),
        ("cispo", {"clip_ratio_low": 1.0}, losses.CISPO(low=None, high=1.2)),
    ],
)
def test_names_and_defaults(mode, options, loss):
    assert quiet(loss_mode=mode, **options).objective.policy_loss == loss


def test_all_of_verls_modes_are_there():
    assert set(LOSS_MODES) == {
        "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo",
    }  # fmt: skip


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_aggregations(mode):
    options = {"loss_mode": mode, **({"dro_beta": 0.1} if mode == "dro" else {})}
    fixed = mode in ("sapo", "geo_mean")
    assert quiet(**options).objective.aggregation == ("seq_mean_token_mean" if fixed else "token_mean")
    if fixed:
        with pytest.warns(UserWarning, match=r"^loss_agg_mode='token-sum' has no effect"):
            assert (
                presets.from_verl(**options, loss_agg_mode="token-sum").objective.aggregation == "seq_mean_token_mean"
            )
    else:
        assert quiet(**options, loss_agg_mode="seq-mean-token-sum").objective.aggregation == "seq_mean_token_sum"


# ------------------------------------------------------------------------------------------------------------- numbers


def gspo(row, low, high):
    s = math.exp(sum(a - b for a, b in zip(row.current, row.old, strict=True)) / len(row.at))
    value = max(-s * row.advantage, -min(max(s, 1 - low), 1 + high) * row.advantage)
    return [value] * len(row.at)


def dppo_tv(row, low, high, most):
    found = []
    for new, old in zip(row.current, row.old, strict=True):
        p, q = math.exp(new), math.exp(old)
        inside = p - q <= high if row.advantage > 0 else p - q >= -low
        found.append(-min(p / q, most) * row.advantage * new * inside)
    return found


def cispo(row, low, high):
    ratios = [math.exp(a - b) for a, b in zip(row.current, row.old, strict=True)]
    return [-min(max(r, 1 - low), 1 + high) * row.advantage * logp for r, logp in zip(ratios, row.current, strict=True)]


def geo_mean(row, low, high):
    logs = [a - b for a, b in zip(row.current, row.old, strict=True)]
    cut = [min(x, high) if row.advantage > 0 else max(x, -low) for x in logs]
    return [-row.advantage * math.exp(sum(cut) / len(cut))] * len(cut)


NUMBERS = {
    "gspo": (lambda row: gspo(row, 0.03, 0.02), {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02}),
    "dppo_tv": (lambda row: dppo_tv(row, 0.02, 0.01, 1.1), {
        "clip_ratio_low": 0.02, "clip_ratio_high": 0.01, "clip_ratio_c": 1.1,
    }),
    "cispo": (lambda row: cispo(row, 0.1, 0.15), {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "geo_mean": (lambda row: geo_mean(row, 0.1, 0.15), {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", NUMBERS)
def test_numbers(mode, seed, weighted, random_batch):
    formula, options = NUMBERS[mode]
    batch = random_batch(seed)
    if weighted:
        options = {**options, "rollout_is": "token", "rollout_is_threshold": 1.5}
    rows, total = rows_of(batch), 0.0
    for row in rows:
        weights = [min(math.exp(x), 1.5) if weighted else 1.0 for x in row.mismatch]
        if mode == "geo_mean":
            geometric = math.exp(sum(map(math.log, weights)) / max(len(weights), 1))
            total += geometric * sum(formula(row)) / len(row.at) / len(rows) if row.at else 0.0
        elif row.at:
            tokens = sum(len(one.at) for one in rows)
            total += sum(w * x for w, x in zip(weights, formula(row), strict=True)) / tokens

    loss = quiet(loss_mode=mode, **options).objective(batch).loss

    assert loss.item() == pytest.approx(total, rel=2e-5)
    assert torch.autograd.grad(loss, batch.per_token_logps)[0][batch.mask].abs().max() > 1e-4


# ------------------------------------------------------------------------------------------------------ KL and entropy

KL = {  # of x = log(pi / ref): value, slope
    "kl": (lambda x: x, lambda x: 1.0),
    "abs": (abs, lambda x: math.copysign(1.0, x)),
    "mse": (lambda x: x * x / 2, lambda x: x),
    "low_var_kl": (lambda x: min(math.exp(-x) - 1 + x, 10.0), lambda x: 0.0 if x < -2.6 else 1 - math.exp(-x)),
}
KL |= {"k1": KL["kl"], "k2": KL["mse"], "k3": KL["low_var_kl"]}
KL |= {f"{name}+": (KL[name][0], KL["k2"][1]) for name in ("kl", "k1", "mse", "k2", "low_var_kl", "k3")}


@pytest.mark.parametrize("kind", KL)
def test_kl_loss_types(kind, random_batch):
    batch = replace(random_batch(4), advantages=torch.zeros(8))
    x = torch.linspace(-4, 3, 7).expand(8, 7)  # k3 is above 10 nats at x = -4 (51) and -2.8 (13)
    batch = replace(batch, ref_per_token_logps=torch.where(batch.mask, batch.per_token_logps.detach() - x, torch.nan))
    value, slope = KL[kind]

    objective = quiet(use_kl_loss=True, kl_loss_type=kind, kl_loss_coef="3e-1").objective
    loss = objective(batch).loss

    tokens = int(batch.mask.sum())
    expected = 0.3 * sum(value(a) for a in x[batch.mask].tolist()) / tokens
    assert loss.item() == pytest.approx(expected, rel=2e-5)
    found = torch.autograd.grad(loss, batch.per_token_logps)[0][batch.mask]
    wanted = torch.tensor([0.3 * slope(a) / tokens for a in x[batch.mask].tolist()])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("bypass", [False, True])
def test_entropy_is_reduced_as_the_loss_over_the_tokens_that_verl_counts(bypass, random_batch):
    batch = random_batch(1)
    entropies = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, entropies=entropies.requires_grad_(), advantages=torch.zeros(8))
    options = {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 50}
    rejection = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.05}

    out = quiet(**options, **rejection, bypass_mode=bypass).objective(batch)

    counted = batch.mask if bypass else out.keep_mask
    assert 0 < int(out.keep_mask.sum()) < int(batch.mask.sum())
    assert out.loss.item() == pytest.approx(-0.1 * entropies[counted].sum().item() / 8 / 50, rel=2e-5)


# ----------------------------------------------------------------------------------------------------------- said aloud


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_ratio": 0.3}, r"^clip_ratio=0.3 has no effect unless clip_ratio_low or clip_ratio_high is None"),
        ({"loss_mode": "gpg", "clip_ratio_high": 0.3}, r"^clip_ratio_high=0.3 has no effect on the loss 'gpg'"),
        ({"loss_mode": "gspo", "clip_ratio_c": 5.0}, r"^clip_ratio_c=5.0 has no effect on the loss 'gspo'"),
        ({"loss_scale_factor": 9}, r"^loss_scale_factor=9 has no effect unless loss_agg_mode is 'seq-mean-token-"),
        ({"kl_loss_coef": 0.1}, r"^kl_loss_coef=0.1 has no effect without use_kl_loss"),
        ({"use_kl_loss": True, "kl_loss_coef": 0}, r"^use_kl_loss has no effect with kl_loss_coef=0"),
        ({"tau_pos": 2.0}, r"^tau_pos=2.0 has no effect on the loss 'vanilla'"),
        ({"dro_beta": 0.1}, r"^dro_beta=0.1 has no effect on the loss 'vanilla'"),
        ({"loss_mode": "gspo", "bypass_mode": True}, r"^loss_mode='gspo' has no effect in bypass_mode"),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "clip_ratio_high": 0.3},
            r"^clip_ratio_high=0.3 has no effect on the loss 'gpg'",
        ),
    ],
)
def test_what_verl_does_not_read_is_said(options, message):
    with pytest.warns(UserWarning, match=message):
        presets.from_verl(**options)


def test_whose_aggregation_gspo_has_is_said():
    said = r"^gspo is reduced by loss_agg_mode='token-mean', as in verl 0\.9\.1; verl up to 0\.9\.0 always took"
    with pytest.warns(UserWarning, match=said):
        presets.from_verl(loss_mode="gspo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        presets.from_verl(loss_mode="gspo", loss_agg_mode="seq-mean-token-mean")


def test_a_covariance_setting_of_none_is_verls_own_default():
    nothing = dict.fromkeys(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"))

    assert quiet(loss_mode="clip_cov", **nothing).objective.policy_loss == losses.ClipCov(
        low=0.2, high=0.2, fraction=0.0002, cov_low=1.0, cov_high=5.0
    )
    assert quiet(loss_mode="kl_cov", **nothing).objective.policy_loss == losses.KLCov(fraction=0.0002, coef=1.0)
    assert quiet(**nothing).objective == quiet().objective


@pytest.mark.parametrize(
    ("mode", "rejection", "said"),
    [
        ("gspo", "token_k1", True),
        ("geo_mean", "token_k1", True),
        ("kl_cov", "seq_mean_k1", True),
        ("gspo", "seq_mean_k1", False),
        ("vanilla", "token_k1", False),
    ],
)
def test_averages_over_rejected_tokens_are_said(mode, rejection, said):
    options = {"loss_mode": mode, "rollout_rs": rejection, "rollout_rs_threshold": 2.0}
    if said:
        with pytest.warns(UserWarning, match=rf"^{mode} averages over the tokens that rollout_rs rejects"):
            presets.from_verl(**options)
    else:
        quiet(**options)
    if mode == "vanilla":
        with pytest.warns(UserWarning, match=r"^seq-mean-token-mean averages over"):
            presets.from_verl(**options, loss_agg_mode="seq-mean-token-mean")


def test_bypass_mode_clips_with_the_actors_settings():
    preset = quiet(bypass_mode=True, clip_ratio_high=0.28, loss_agg_mode="seq-mean-token-mean")

    assert preset.objective.policy_loss == losses.PPOClip(low=0.2, high=0.28, dual_clip=3.0)
    assert (preset.objective.mode, preset.objective.aggregation) == ("bypass", "seq_mean_token_mean")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_mode": "gsp"}, ValueError, r"^loss_mode must be one of .*'gspo'"),
        ({"loss_agg_mode": "token_mean"}, ValueError, r"^loss_agg_mode must be one of .*Did you mean 'token-mean'"),
        ({"loss_mode": "dro"}, ValueError, r"^dro_beta must be a positive number with loss_mode='dro'"),
        ({"clip_ratio_hihg": 0.3}, UnknownOptionError, r"Did you mean 'clip_ratio_high'"),
        ({"loss_mode": "vanilla", "clip_ratio_c": 1.0}, ValueError, r"^dual_clip must be above 1"),
        ({"clip_ratio_c": None}, ValueError, r"^clip_ratio_c must be a number, but got None"),
        ({"clip_ratio": None, "clip_ratio_low": None}, ValueError, r"^clip_ratio must be a number"),
        ({"loss_mode": "bypass_mode"}, ValueError, r"^bypass_mode must be True with loss_mode 'bypass_mode'"),
        ({"use_kl_loss": True, "kl_loss_type": "k4"}, ValueError, r"^kl_loss_type must be one of"),
        ({"use_kl_loss": True, "kl_loss_type": "full"}, NotImplementedError, r"\(verl does not implement it either\)"),
        ({"use_kl_loss": True, "kl_loss_type": "abs+"}, NotImplementedError, r"^kl_loss_type must be one of"),
        ({"use_kl_loss": True, "kl_loss_coef": -0.1}, ValueError, r"^kl_loss_coef must be at least 0"),
        ({"kl_loss_coef": "a lot"}, ValueError, r"^kl_loss_coef must be a number, but got 'a lot'"),
        ({"use_kl_loss": True, "loss_mode": "sapo"}, NotImplementedError, r"^loss_agg_mode must .* 'sapo' and use_kl"),
        ({"entropy_coeff": 0.1, "loss_mode": "geo_mean"}, NotImplementedError, r"^loss_agg_mode must .* and entropy_c"),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 0},
            ValueError,
            r"^loss_scale_factor must be positive",
        ),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        presets.from_verl(**options)
