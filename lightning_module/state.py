"""Random states, and rollouts in use: what a checkpoint holds besides weights and optimizer."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from lightning_module.rollouts import RolloutBuffer
from trl_offpolicy.functional.collective import gather_objects


def run_seed() -> int:
    """The seed of ``seed_everything``, 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def seed_random(seed: int) -> None:
    """Seed what :func:`random_state` holds: Python, NumPy, and torch on all devices."""
    seed %= 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The random state of this process: Python's, NumPy's, torch's and, if it is used, CUDA's."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the random state that :func:`random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:  # absent from older checkpoints
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def of_all_ranks(buffer: RolloutBuffer | None) -> list[dict[str, Any]]:
    """Rollouts and random state of every rank, in rank order. All ranks call it."""
    return gather_objects({"random": random_state(), "rollouts": None if buffer is None else buffer.state_dict()})
