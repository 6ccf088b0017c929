"""Nothing that a preset computes waits for the device, and nothing is copied to it: seen without a GPU.

On the device "meta", tensors have shapes and no values. Whatever reads a value fails there (``.item()``, ``nonzero``, a
mask as index), and a tensor that no operation made came from the host (a list as index, ``torch.tensor(...)``).
``tests/test_cuda.py`` asks CUDA itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_offpolicy import PolicyBatch, presets

ROWS, LENGTH = 8, 16


class FromHost(TorchDispatchMode):
    """Collects the operations that read a tensor which is neither given nor made by an operation."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.kept = list(given)  # alive, so that no id is used twice
        self.known = {id(one) for one in given}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        # a number of Python travels as a tensor of no dimension on the CPU, and goes to the kernel as an argument
        strange = [one for one in read if id(one) not in self.known and not (one.dim() == 0 and one.is_cpu)]
        self.found += [f"{func} reads {tuple(one.shape)} {one.device}" for one in strange]
        made = func(*args, **(kwargs or {}))
        new = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self.kept += new
        self.known |= {id(one) for one in new}
        return made


def batch(versions: tuple[int, ...]) -> PolicyBatch:
    """Every field of a batch, on the device without values."""
    tokens, rows = {"size": (ROWS, LENGTH), "device": "meta"}, {"size": (ROWS,), "device": "meta"}
    logps = ("per_token_logps", "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps", "entropies")
    return PolicyBatch(
        **{name: torch.empty(**tokens) for name in logps},
        completion_mask=torch.empty(**tokens, dtype=torch.bool),
        advantages=torch.empty(**rows),
        rewards=torch.empty(**rows),
        group_rewards=torch.empty((ROWS, 4), device="meta"),
        group_ids=torch.empty(**rows, dtype=torch.long),
        policy_versions=torch.empty(versions, dtype=torch.long, device="meta"),
        current_version=1,
    )


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device "meta" knows no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    yield


def read_from_host(run: Any, given: list[Tensor]) -> list[str]:
    with FromHost(given) as seen:
        run()
    return seen.found


CASES = [(name, (ROWS,)) for name in presets.names()] + [("paper/tis", (ROWS, LENGTH))]
"""A preset and the shape of the versions: one a response, or one a token."""
OFTEN = 8
"""Every so many cases are run by ``make test``; these kernels are Python, a third of a second a case."""


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        pytest.param(*case, id=case[0], marks=[] if place % OFTEN == 0 else pytest.mark.integration)
        for place, case in enumerate(reversed(CASES))
    ],
)
def test_a_preset_reads_nothing_from_the_host(name: str, versions: tuple[int, ...], no_autocast: None) -> None:
    objective, filled = presets.get(name).objective, batch(versions)
    given = [value for value in vars(filled).values() if isinstance(value, Tensor)]
    assert read_from_host(lambda: objective(filled), given) == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[:, [0, 2]],
        lambda x: x + torch.tensor([1.0], device="meta"),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
    ],
    ids=["a list as index", "a new tensor", "a number", "a mask as index"],
)
def test_each_way_to_wait_is_seen(wait: Any) -> None:
    x = torch.empty(3, 4, device="meta")
    try:
        assert read_from_host(lambda: wait(x), [x])
    except (RuntimeError, NotImplementedError) as error:
        assert "meta" in str(error).lower()
