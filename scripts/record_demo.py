"""Record the run that ``trl-offpolicy demo`` shows: the quickstart with a real fault, an engine that gets no weights.

    python scripts/record_demo.py [--steps 16]

Trains recipes/quickstart with its sync switched off (only the first weights arrive), so that engine and trainer drift
apart as the policy learns, under a product mask that loses the longest responses first. About 10 minutes on 2 cores.
Writes metrics.jsonl, run.json and rollouts.parquet, token ids left out, to trl_offpolicy/diagnosis/report/demo_run/.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "trl_offpolicy" / "diagnosis" / "report" / "demo_run"
CHANGES = {
    "offpolicy": "paper/product-mask",
    "engine": {"dtype": "float32", "enforce_eager": True, "check_sync": False, "seed": 0},
    "max_completion_length": 24,
    "noise_floor_steps": 4,
}


def train(folder: Path, steps: int) -> None:
    """The quickstart with the fault, in this process."""
    import yaml

    sys.path.insert(0, str(ROOT))
    from recipes import grpo
    from trl_offpolicy.trl import engine as engines

    config = yaml.safe_load((ROOT / "recipes" / "quickstart" / "config.yaml").read_text())
    config |= CHANGES | {"max_steps": steps, "output_dir": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    sync = engines.TRLEngine.sync_weights

    def only_the_first(engine: engines.TRLEngine) -> None:
        if engine.last_sync is None:
            sync(engine)

    engines.TRLEngine.sync_weights = only_the_first
    sys.argv = ["grpo.py", "--config", str(path)]
    grpo.main()


def keep(run: Path) -> None:
    """Copy what the demo needs, in one small file each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    TARGET.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "run.json"):
        shutil.copy(run / name, TARGET / name)
    parts = [pq.read_table(path) for path in sorted((run / "rollouts.parquet").glob("*.parquet"))]
    pq.write_table(pa.concat_tables(parts), TARGET / "rollouts.parquet", compression="zstd")
    for path in sorted(TARGET.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Train, then keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), steps)
        keep(Path(folder) / "run")


if __name__ == "__main__":
    main()
