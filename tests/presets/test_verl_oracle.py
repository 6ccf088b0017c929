"""``from_verl`` against verl 0.9.1 itself: weights, masks and losses of every option, the 19 named presets, and every
policy loss with its gradient.
"""

import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_verl import MODES

from trl_offpolicy import presets

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("VERL_PYTHON")
HOW = (
    "VERL_PYTHON does not name the Python of an environment with verl. Make one: python3.11 -m venv verlvenv; "
    "verlvenv/bin/pip install torch==2.13.0; verlvenv/bin/pip install --no-deps verl==0.9.1; verlvenv/bin/pip install "
    "ray 'tensordict>=0.8,<=0.10,!=0.9.0' 'transformers>=5.5.3,<5.11' omegaconf hydra-core codetiming pandas packaging "
    "numpy; then VERL_PYTHON=verlvenv/bin/python pytest -m slow tests/presets/test_verl_oracle.py"
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
    return {f"loss {json.dumps(options)}": options for options in found}


def ask_verl(batch):
    """What verl answers for all cases on one batch."""
    fields = {
        "current": batch.per_token_logps.detach(),
        "old": batch.old_per_token_logps,
        "sampling": batch.sampling_per_token_logps,
    }
    padded = {name: torch.where(batch.mask, values, 0.0).tolist() for name, values in fields.items()}
    request = {
        "batch": {**padded, "mask": batch.mask.float().tolist(), "advantages": batch.advantages.tolist()},
        "cases": cases(),
        "named": NAMED,
        "losses": loss_cases(),
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


@pytest.mark.skipif(PYTHON is None, reason=HOW)
@pytest.mark.parametrize(("seed", "spread"), [(0, 0.3), (1, 0.3), (2, 1.0), (3, 0.01)])
def test_verl_itself_computes_the_same(seed, spread, random_batch):
    batch = random_batch(seed, spread=spread, drift=spread)
    answers = ask_verl(batch)
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
        assert_same_loss(name, presets.from_verl(**options).objective, batch, answers[name])


def assert_same_loss(name, objective, batch, answer):
    batch = replace(batch, per_token_logps=batch.per_token_logps.detach().clone().requires_grad_())
    loss = objective(batch).loss
    (gradient,) = torch.autograd.grad(loss, batch.per_token_logps)

    assert loss.item() == pytest.approx(answer["loss"], rel=5e-5, abs=2e-6), name
    expected = torch.tensor(answer["gradient"])[batch.mask]
    torch.testing.assert_close(gradient[batch.mask], expected, rtol=2e-4, atol=2e-6, msg=lambda m: f"{name}: {m}")
