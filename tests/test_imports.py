"""``import trl_offpolicy`` needs torch only and takes no time beside it; each in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import trl_offpolicy

ROOT = Path(trl_offpolicy.__file__).parents[1]
HEAVY = (
    "trl", "transformers", "accelerate", "datasets", "peft", "vllm", "lightning", "pytorch_lightning",
    "torchmetrics", "pandas", "pyarrow", "matplotlib", "jinja2", "rich", "yaml", "scipy",
)  # fmt: skip

WITH_TORCH_ALONE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {(*HEAVY, "numpy")}:  # torch itself does without NumPy
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())

import torch
import trl_offpolicy as op

batch = op.PolicyBatch(
    per_token_logps=torch.tensor([[-1.0, -2.0]], requires_grad=True),
    sampling_per_token_logps=torch.tensor([[-1.0, -3.0]]),
    completion_mask=torch.ones(1, 2).bool(),
    advantages=torch.ones(1),
)
out = op.presets.get("paper/tis").objective(batch)
out.loss.backward()
print(out.loss.item(), len(out.stats.compute()) > 50)
"""
BESIDE_TORCH = f"""
import sys, time, torch

before, start = set(sys.modules), time.process_time()
import trl_offpolicy
trl_offpolicy.PolicyBatch
print(time.process_time() - start, sorted(set({HEAVY}) & (set(sys.modules) - before)))
"""


NAMES_LATER = """
import sys, trl_offpolicy as op

print("torch" in sys.modules, "PolicyBatch" in dir(op), "attach" in op.__all__, op.__version__ > "0")
try:
    op.PolicyBach
except AttributeError as error:
    print(error)
from trl_offpolicy import *
print(Correction is op.Correction, callable(attach), losses.PPOClip().low, presets.get("measure").name)
"""


def run(code, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_works_with_torch_alone():
    assert run(WITH_TORCH_ALONE) == "-1.5 True"  # weights 1 and min(e, 2)


def test_importing_it_takes_at_most_0_3_cpu_seconds_more_than_torch_and_loads_nothing_heavy(tmp_path):
    # bytecode is kept as in any installation; some machines turn that off, and all files would be compiled each time
    kept = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    seconds = []
    for _ in range(5):  # caches, and a busy machine, can only add
        taken, _, loaded = run(BESIDE_TORCH, **kept).partition(" ")
        assert loaded == "[]"
        seconds.append(float(taken))
        if seconds[-1] <= 0.3:
            break

    assert min(seconds) <= 0.3, f"import took {seconds} s"


def test_the_import_leaves_garbage_collection_as_it_was():
    after = "import gc; gc.{}(); import trl_offpolicy; trl_offpolicy.PolicyBatch; print(gc.isenabled())"
    assert [run(after.format(name)) for name in ("enable", "disable")] == ["True", "False"]


def test_torch_is_imported_with_the_first_name_that_is_used():
    assert run(NAMES_LATER.replace('"PolicyBatch" in dir(op), "attach" in op.__all__, ', "")).splitlines() == [
        "False True",
        "module 'trl_offpolicy' has no attribute 'PolicyBach'",
        "True True 0.2 measure",
    ]
    assert run(NAMES_LATER).startswith("False True True True")
