"""``from_verl`` against verl 0.9.1 itself: weights, masks and losses of every option, and the 19 named presets."""

import itertools
import json
import os
import subprocess
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

    assert set(answers) == set(built)
    for name, preset in built.items():
        answer, out = answers[name], preset.objective(batch)
        assert torch.equal(out.keep_mask, torch.tensor(answer["mask"]) > 0), name
        if preset.correction.weights:
            torch.testing.assert_close(
                out.weights, torch.tensor(answer["weights"]), rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        if out.keep_mask.any():
            assert out.loss.item() == pytest.approx(answer["loss"], rel=2e-5, abs=1e-6), name
