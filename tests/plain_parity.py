"""Other frameworks' semantics in plain Python floats, one token at a time. Nothing is shared with ``trl_offpolicy``.

Rows hold only trainable tokens; ``at`` remembers their positions.
"""

import math
from dataclasses import dataclass

import pytest
import torch

GEO, PRODUCT, LARGEST = "geometric", "product", "largest"


@dataclass
class Row:
    """The trainable tokens of one response."""

    at: list[int]
    current: list[float]
    old: list[float]
    sampling: list[float]
    advantage: float

    @property
    def mismatch(self):
        """log(pi_old / mu)."""
        return [a - b for a, b in zip(self.old, self.sampling, strict=True)]

    @property
    def total(self):
        """log(pi / mu)."""
        return [a - b for a, b in zip(self.current, self.sampling, strict=True)]


def rows_of(batch):
    """The batch as a list of :class:`Row`."""
    names = ("per_token_logps", "old_per_token_logps", "sampling_per_token_logps")
    columns = [getattr(batch, name).detach().double().tolist() for name in names]
    rows = []
    for index, mask in enumerate(batch.completion_mask.tolist()):
        at = [position for position, inside in enumerate(mask) if inside]
        values = [[column[index][position] for position in at] for column in columns]
        rows.append(Row(at, *values, batch.advantages[index].item()))
    return rows


def clamp(value, bound=20.0):
    """Held in +-bound."""
    return max(-bound, min(bound, value))


def ratio(log_ratios, how):
    """One ratio for a response."""
    if not log_ratios:
        return 1.0
    if how == LARGEST:
        return math.exp(max(log_ratios))
    total = sum(log_ratios)
    return math.exp(clamp(total / len(log_ratios) if how == GEO else total))


def ppo(log_ratio, advantage, dual=None):
    """PPO's loss of one token, clip 0.2."""
    r = math.exp(clamp(log_ratio))
    loss = max(-r * advantage, -max(0.8, min(1.2, r)) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def assert_parity(preset, batch, weights, keep, loss):
    """Masks equal, weights of kept tokens and the loss close; ``weights`` and ``keep`` are lists of rows."""
    out = preset.objective(batch)
    for index, row in enumerate(rows_of(batch)):
        mine = out.keep_mask[index].tolist()
        assert [mine[t] for t in row.at] == keep[index], f"row {index}"
        assert sum(mine) == sum(keep[index])
        for t, kept, weight in zip(row.at, keep[index], weights[index], strict=True):
            if kept:
                assert out.weights[index, t].item() == pytest.approx(weight, rel=2e-5, abs=1e-7)
    assert out.loss.item() == pytest.approx(loss, rel=2e-5, abs=1e-7)
    return out


def assert_both(keep):
    """The case is worth something: tokens are kept and dropped."""
    flat = [value for row in keep for value in row]
    assert any(flat) and not all(flat)


def gradient(preset, batch):
    """d loss / d log pi, with 0 on padding."""
    (found,) = torch.autograd.grad(preset.objective(batch).loss, batch.per_token_logps)
    return found
