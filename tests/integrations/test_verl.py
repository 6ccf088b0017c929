"""The policy loss in real verl 0.9.1: equal to verl's rollout correction under its 19 presets, and to this kit alone."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trl_offpolicy import Reduction, presets
from trl_offpolicy.presets.frameworks.verl.losses import AGGREGATIONS
from trl_offpolicy.run_folder.names import translate

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VERL_PYTHON")
HOW = (
    "VERL_PYTHON does not name the Python of an environment with verl; tests/presets/frameworks/test_verl_oracle.py "
    "says how to make one. Here it also needs: pip install uvicorn fastapi accelerate peft torchmetrics."
)
NAMED = [name.removeprefix("verl/") for name in presets.names() if name.startswith("verl/")]
SETTINGS = [
    ({"dp_size": 1, "batch_num_tokens": 31, "global_batch_size": 8}, "token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "seq-mean-token-sum-norm"),
    ({"dp_size": 4, "batch_num_tokens": 120, "global_batch_size": 32}, "seq-mean-token-sum"),
]


def run_in_verl(script, request=None, *arguments, **environment):
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name(script)), *arguments],
        input=None if request is None else json.dumps(request),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ORACLE "))
    return json.loads(line.removeprefix("ORACLE "))
