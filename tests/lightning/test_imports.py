"""lightning_module stands on lightning and trl_offpolicy alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_module

CODE = """
import sys
import lightning_module, lightning_module.cli
print([name for name in ("trl", "vllm", "deepspeed", "accelerate.accelerator") if name in sys.modules])
"""


@pytest.mark.integration
def test_importing_it_does_not_import_trl():
    root = Path(lightning_module.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.strip()
    assert "trl" not in loaded.replace("'", "").strip("[]").split(", ") and "vllm" not in loaded
