"""``from_verl`` against verl 0.9.1 itself: weights, masks and losses of every option, the 19 named presets, and every
policy loss with its gradient.
"""

import itertools
import json
import os
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_verl import MODES

from trl_offpolicy import Reduction, presets
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.presets.frameworks.verl.losses import KL_TYPES

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("VERL_PYTHON")
HOW = (
    "VERL_PYTHON does not name the Python of an environment with verl. Make one: python3.11 -m venv verlvenv; "
    "verlvenv/bin/pip install torch==2.13.0; verlvenv/bin/pip install --no-deps verl==0.9.1; verlvenv/bin/pip install "
    "ray 'tensordict>=0.8,<=0.10,!=0.9.0' 'transformers>=5.5.3,<5.11' omegaconf hydra-core codetiming pandas packaging "
    "numpy; then VERL_PYTHON=verlvenv/bin/python pytest -m slow tests/presets/frameworks/test_verl_oracle.py"
)
NAMED = [name.removeprefix("verl/") for name in presets.names() if name.startswith("verl/")]


def cases():
    """Every option with every other that it meets."""
    found = []
    for level, threshold, normalize in itertools.product(("token", "sequence"), (2.0, "1.3", "0.5_2.0"), (False, True)):
        found.append({"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize})
    rejections = [{"rollout_rs": mode, "rollout_rs_threshold": bound} for mode, bound in MODES.items()]
    rejections.append({"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.7_1.6,0.12"})
    rejections.append({"rollout_rs": "token_k2,seq_max_k3", "rollout_rs_threshold": "0.3"})
    decoupled = [*found, *rejections, *({**found[i % len(found)], **r} for i, r in enumerate(rejections))]
    decoupled += [{**r, "use_v1": False} for r in rejections]
    bypass = [{**r, "bypass_mode": True, "loss_type": "ppo_clip"} for r in rejections]
    bypass += [{**f, "bypass_mode": True, "loss_type": "reinforce"} for f in found]
    bypass += [
        {**found[i % len(found)], **r, "bypass_mode": True, "loss_type": "reinforce"} for i, r in enumerate(rejections)
    ]
    return {json.dumps(options): options for options in decoupled + bypass}


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TIGHT = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
LOSSES = {  # settings of each loss_mode, so that what it does is seen on batches this small
    "vanilla": ({}, {**TIGHT, "clip_ratio_c": 1.2}, {"clip_ratio": 0.05, "clip_ratio_low": None}),
    "dppo_tv": ({}, {"clip_ratio_low": 0.02, "clip_ratio_high": 0.01, "clip_ratio_c": 1.1}),
    "dppo_kl": ({}, {"clip_ratio_low": 0.002, "clip_ratio_high": 0.001, "clip_ratio_c": 20.0}),
    "gspo": ({}, {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02}),
    "sapo": ({}, {"tau_pos": 2.0, "tau_neg": 3.0}),
    "gpg": ({},),
    # all candidates are taken: fewer would be drawn at random
    "clip_cov": ({"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0, **TIGHT},),
    "kl_cov": ({}, {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}),
    "geo_mean": ({}, TIGHT),
    "dro": ({"dro_beta": 0.3},),
    "cispo": ({}, TIGHT),
}
BY_SEQUENCE = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.12}


def loss_cases():
    """Every loss with its settings, with weights and rejected responses, in every aggregation that it reads."""
    found = []
    for mode, settings in LOSSES.items():
        plain = [{"loss_mode": mode, **options} for options in settings]
        weighted = [{"rollout_is": level, "rollout_is_threshold": 1.5, **plain[-1]} for level in ("token", "sequence")]
        modes = () if mode in ("sapo", "geo_mean") else AGGREGATIONS
        reduced = [{"loss_agg_mode": name, **plain[-1]} for name in modes]
        rejected = [] if mode in ("clip_cov", "kl_cov") else [{**BY_SEQUENCE, **weighted[0]}]
        found += [*plain, *weighted, *reduced, *rejected]
    return {f"loss {json.dumps(options)}": options for options in [*found, *rank_cases(), *beside_cases()]}


def rank_cases():
    """One rank of two or four, advantages by response and by token: what verl calls dp_size is our world_size."""
    found = []
    for mode, settings in LOSSES.items():
        modes = ("token-mean",) if mode in ("sapo", "geo_mean") else AGGREGATIONS
        for (i, name), by_token in itertools.product(enumerate(modes), (False, True)):
            size = (2, 4)[i % 2]
            shared = {"dp_size": size, "tokens": 37 * size, "sequences": 8 * size, "by_token": by_token}
            found.append({"loss_mode": mode, **settings[-1], "loss_agg_mode": name, **shared})
    return found


def beside_cases():
    """KL and entropy terms, reduced in every way, in one process and on one rank of two, some responses rejected."""
    kinds = itertools.cycle(KL_TYPES)
    found = []
    for name, ranks, rejection in itertools.product(AGGREGATIONS, (1, 2), ({}, BY_SEQUENCE)):
        shared = {} if ranks == 1 else {"dp_size": 2, "tokens": 90, "sequences": 16}
        for _ in range(3):
            kl = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": next(kinds)}
            found.append({"loss_agg_mode": name, **kl, "entropy_coeff": 0.05, **rejection, **shared})
    norm = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 50, "entropy_coeff": 0.05}
    return [*found, norm]


ADVANTAGES = [
    {"adv_estimator": "grpo"},
    {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    {"adv_estimator": "grpo_vectorized"},
    {"adv_estimator": "rloo"},
    {"adv_estimator": "rloo_vectorized"},
    {"adv_estimator": "opo"},
    {"adv_estimator": "reinforce_plus_plus_baseline"},
    {"adv_estimator": "gpg"},
    {"adv_estimator": "grpo_passk"},
    {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False},
    {"adv_estimator": "reinforce_plus_plus"},
    {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9},
    *(
        {"adv_estimator": name, "handle_zero_tail": tail, "weighted": weighted}
        for name, tail, weighted in itertools.product(
            ("optimal_token_baseline", "tir_optimal_token_baseline"), (True, False), (False, True)
        )
    ),
]


def advantage_cases():
    """Every estimator; gaps between turns only where verl counts trainable tokens, not positions.

    Groups of four, and groups of five, two and one, which verl's grpo_passk refuses. Without ``handle_zero_tail`` a
    group of one gets its return in verl all the same, which the estimator here does not have.
    """
    masks = {True: ("mask", "filled"), False: ("filled",)}
    found = [{**case, "mask": mask} for case in ADVANTAGES for mask in masks[case["adv_estimator"][:3] != "opt"]]
    one = [case for case in found if case["adv_estimator"] != "grpo_passk" and case.get("handle_zero_tail", True)]
    found += [{**case, "groups": "uneven"} for case in one]
    return {json.dumps(case): case for case in found}


def ask_verl(batch, more):
    """What verl answers for all cases on one batch; ``more`` are tensors beside it."""
    fields = {
        "current": batch.per_token_logps.detach(),
        "old": batch.old_per_token_logps,
        "sampling": batch.sampling_per_token_logps,
        "ref": batch.ref_per_token_logps,
        "entropies": batch.entropies,
    }
    padded = {name: torch.where(batch.mask, values, 0.0) for name, values in fields.items()}
    padded |= {"mask": batch.mask.float(), "advantages": batch.advantages, **more}
    request = {
        "batch": {name: values.tolist() for name, values in padded.items()},
        "cases": cases(),
        "named": NAMED,
        "losses": loss_cases(),
        "advantages": advantage_cases(),
    }
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("run_verl.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ORACLE "))
    return json.loads(line.removeprefix("ORACLE "))


def tensors_beside(batch, seed):
    """Advantages by token; rewards, groups and the rest that advantages are made from."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = batch.mask.shape
    ends = batch.mask.float().cumsum(-1).argmax(-1)
    rewards = torch.where(batch.mask.any(-1), torch.randn(rows, generator=generator), 0.0)
    by_token = torch.randn(rows, length, generator=generator)
    by_token[0, 0] = 0.0
    p = torch.where(batch.mask, batch.old_per_token_logps.exp(), 0.5)  # the sum of squares is at least its square
    return {
        "token_advantages": by_token,
        "token_rewards": torch.zeros(rows, length).scatter_(1, ends.unsqueeze(1), rewards.unsqueeze(1)),
        "groups": torch.arange(rows) // 4,
        "uneven": torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]),
        "filled": (torch.arange(length) <= ends.unsqueeze(1)).float() * batch.mask.any(-1, keepdim=True),
        "filled_old": p.log(),
        "squares": p.square() + torch.rand(p.shape, generator=generator) * (1 - p).square(),
        "weights": torch.rand(rows, length, generator=generator) + 0.5,
    }


def with_fields(batch, seed):
    """With a reference and entropies."""
    generator = torch.Generator().manual_seed(seed)
    ref = batch.old_per_token_logps + 1.5 * torch.randn(batch.mask.shape, generator=generator)
    return replace(batch, ref_per_token_logps=ref, entropies=torch.rand(batch.mask.shape, generator=generator))


@pytest.mark.skipif(PYTHON is None, reason=HOW)
@pytest.mark.parametrize(("seed", "spread"), [(0, 0.3), (1, 0.3), (2, 1.0), (3, 0.01)])
def test_verl_itself_computes_the_same(seed, spread, random_batch):
    batch = with_fields(random_batch(seed, spread=spread, drift=spread), seed)
    more = tensors_beside(batch, seed)
    answers = ask_verl(batch, more)
    advantages = answers.pop("advantages")
    built = {name: presets.from_verl(**options) for name, options in cases().items()}
    built |= {f"verl/{name}": presets.get(f"verl/{name}") for name in NAMED}

    assert set(answers) == set(built) | set(loss_cases())
    for name, preset in built.items():
        answer, out = answers[name], preset.objective(batch)
        assert torch.equal(out.keep_mask, torch.tensor(answer["mask"]) > 0), name
        if preset.correction.weights:
            torch.testing.assert_close(
                out.weights, torch.tensor(answer["weights"]), rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        if out.keep_mask.any():
            assert out.loss.item() == pytest.approx(answer["loss"], rel=2e-5, abs=1e-6), name
    for name, options in loss_cases().items():
        assert_same_loss(name, options, batch, more["token_advantages"], answers[name])
    assert set(advantages) == set(advantage_cases())
    for name, options in advantage_cases().items():
        assert_same_advantages(name, options, batch, more, advantages[name])


def assert_same_loss(name, options, batch, token_advantages, answer):
    options = dict(options)
    size, by_token = options.pop("dp_size", 1), options.pop("by_token", False)
    step = Reduction(tokens=options.pop("tokens", None), sequences=options.pop("sequences", None), world_size=size)
    batch = replace(
        batch,
        per_token_logps=batch.per_token_logps.detach().clone().requires_grad_(),
        entropies=batch.entropies.clone().requires_grad_(),
        advantages=token_advantages if by_token else batch.advantages,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = presets.from_verl(**options).objective(batch, step).loss
    slopes = torch.autograd.grad(loss, (batch.per_token_logps, batch.entropies), allow_unused=True)

    assert loss.item() == pytest.approx(answer["loss"], rel=5e-5, abs=2e-6), name
    for slope, expected in zip(slopes, (answer["gradient"], answer["entropy_gradient"]), strict=True):
        found = torch.zeros(batch.mask.shape) if slope is None else slope
        wanted = torch.tensor(expected)[batch.mask]
        torch.testing.assert_close(found[batch.mask], wanted, rtol=2e-4, atol=2e-6, msg=lambda m: f"{name}: {m}")


def assert_same_advantages(name, options, batch, more, answer):
    options = dict(options)
    mask, weighted = more.get(options.pop("mask"), batch.mask) != 0, options.pop("weighted", False)
    group_ids = more[options.pop("groups", "groups")]
    correction = {"rollout_is": "token"} if weighted else {}
    estimator = presets.from_verl(**options, **correction).advantages
    inputs = AdvantageInputs(
        rewards=more["token_rewards"].sum(-1),
        group_ids=group_ids,
        mask=mask,
        per_token_logps=more["filled_old"],
        sum_sq_probs=more["squares"],
        weights=more["weights"],
    )
    found = estimator(inputs)
    found = torch.where(mask, found if found.dim() == 2 else found.unsqueeze(1), 0.0)
    torch.testing.assert_close(found, torch.tensor(answer), rtol=1e-4, atol=2e-5, msg=lambda m: f"{name}: {m}")
