"""What the tests of the fault suite measure in a world: how far two sides are apart, and what a context leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from worlds import Made, World

SAME = 1e-9
"""KL k3 below which two sides are the same policy here."""


def k3(world: World, made: Made) -> Any:
    """KL k3 of each row."""
    scored = made.scored if made.scored is not None else world.score(made.batch)
    d = scored["old_per_token_logps"] - made.batch.logps
    return np.nanmean(np.expm1(d) - d, axis=1)


def assert_changed_and_put_back(world: World, begin: Callable[[World], AbstractContextManager[Any]]) -> None:
    """The context that ``begin`` makes changes what the model says, and leaves it as it was, to the last bit.

    Some contexts act as soon as they are made.
    """
    ids = torch.tensor([world.prompts[0] + world.prompts[3]])
    with torch.no_grad():
        before = world.model(ids).logits
        with begin(world):
            inside = world.model(ids).logits.float()
        after = world.model(ids).logits
    assert (inside - before).abs().max() > 1e-4
    assert torch.equal(before, after)
