"""One row of "asked on both sides", and what all rows together prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trl_offpolicy.diagnosis.attribution.evidence import Compared, Seen

Outcome = Literal["equal", "different", "no effect", "for information", "not compared"]
"""``no effect``: the two differ, but nothing that was sampled here depends on it. ``for information``: only one side
has it, or they always differ."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One thing that engine and trainer were asked for.

    Args:
        topic: what it belongs to.
        what: the thing, e.g. "RoPE theta".
        engine: the engine's answer.
        trainer: the trainer's answer.
        outcome: how they compare.
        cause: the cause that a difference proves, a name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
    """

    topic: Compared
    what: str
    engine: str
    trainer: str
    outcome: Outcome
    cause: str = ""


_ORDER: tuple[Compared, ...] = (
    "weights", "adapter", "prompts", "sampling", "logprobs_mode", "model_config", "tokenizer", "precision",
    "parallelism",
)  # fmt: skip
"""The differences that move log-probs most come first."""


@dataclass(frozen=True)
class Proof:
    """What was asked on both sides.

    Args:
        rows: the answers.
    """

    rows: tuple[Asked, ...] = ()

    @property
    def seen(self) -> tuple[Seen, ...]:
        """The differences that can explain a mismatch of what was sampled."""
        found = [row for row in self.rows if row.outcome == "different"]
        found.sort(key=lambda row: _ORDER.index(row.topic))
        return tuple(Seen(row.cause, row.what, row.engine, row.trainer) for row in found)

    @property
    def compared(self) -> frozenset[Compared]:
        """Topics in which everything that matters was compared."""
        done = {row.topic for row in self.rows if row.outcome in ("equal", "different", "no effect")}
        missing = {row.topic for row in self.rows if row.outcome == "not compared"}
        return frozenset(done - missing)

    @property
    def not_compared(self) -> tuple[Compared, ...]:
        """The other topics."""
        return tuple(topic for topic in get_args(Compared) if topic not in self.compared)


def row(
    topic: Compared, what: str, engine: Any, trainer: Any, cause: str, *, equal: bool, matters: bool = True
) -> Asked:
    """A row whose two answers are known.

    Args:
        topic: see :class:`Asked`.
        what: see :class:`Asked`.
        engine: the engine's answer, shown by :func:`shown`.
        trainer: the trainer's answer.
        cause: the cause that a difference proves.
        equal: whether they are equal.
        matters: False = what was sampled here does not depend on it.
    """
    unequal: Outcome = "different" if matters else "no effect"
    return Asked(
        topic=topic, what=what, engine=shown(engine), trainer=shown(trainer), cause="" if equal else cause,
        outcome="equal" if equal else unequal,
    )  # fmt: skip


def not_compared(topic: Compared, what: str, why: str) -> Asked:
    """A row for what could not be asked; ``why`` stands in the engine's column."""
    return Asked(topic=topic, what=what, engine=why, trainer="", outcome="not compared")


def information(topic: Compared, what: str, engine: Any, trainer: Any = "") -> Asked:
    """A row that is only shown."""
    return Asked(topic=topic, what=what, engine=shown(engine), trainer=shown(trainer), outcome="for information")


def shown(value: Any) -> str:
    """A value for people: floats short, long lists by their ends."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [shown(item) for item in value]
        kept = parts if len(parts) <= 8 else [*parts[:4], "...", *parts[-3:]]
        return f"[{', '.join(kept)}]" + (f" ({len(parts)})" if len(parts) > 8 else "")
    return str(value)
