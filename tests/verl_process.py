"""Starts scripts with the Python of an environment with verl, and reads their answer."""

import json
import os
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent / "integrations"
PYTHON = os.environ.get("VERL_PYTHON")
HOW = (
    "VERL_PYTHON does not name the Python of an environment with verl 0.9.1; test_verl_oracle.py in tests/presets/"
    "frameworks says how to make one, which here also needs: pip install datasets uvicorn fastapi accelerate peft "
    "torchmetrics."
)

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
OURS = (
    f"{POLICY_LOSS}._target_=trl_offpolicy.integrations.verl.PolicyLossConfig",
    f"{POLICY_LOSS}.loss_mode=offpolicy",
)
"""Lines of verl's configuration that choose this kit's loss; one with the method comes after them."""


def start(script, *arguments, given="", **environment):
    """The process, which imports this checkout."""
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    process = subprocess.Popen(
        [PYTHON, str(HERE / script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
    )
    assert process.stdin is not None
    process.stdin.write(given)
    process.stdin.close()
    process.stdin = None
    return process


def answer(process):
    """What the process printed after ORACLE; None if it printed none."""
    out, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, errors[-4000:]
    lines = [line for line in out.splitlines() if line.startswith("ORACLE ")]
    return json.loads(lines[0].removeprefix("ORACLE ")) if lines else None


RESPONSES, LENGTH, PROMPT = 8, 6, 3


def made_up_batch(vocabulary):
    """The tensors of a mini-batch as verl's trainer holds them; log-probs of pi_old and mu are made up."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(1, LENGTH + 1, (RESPONSES,), generator=generator)
    ids = torch.randint(3, vocabulary, (RESPONSES, PROMPT + LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < ends.unsqueeze(1)).float()
    attention = torch.cat([torch.ones(RESPONSES, PROMPT), mask], dim=1).long()
    old = (-4.8 + 0.3 * torch.randn(RESPONSES, LENGTH, generator=generator)) * mask
    sampling = (old - 0.4 * torch.randn(RESPONSES, LENGTH, generator=generator)) * mask
    return {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask,
        "old_log_probs": old,
        "rollout_log_probs": sampling,
        "advantages": torch.randn(RESPONSES, 1, generator=generator) * mask,
    }
