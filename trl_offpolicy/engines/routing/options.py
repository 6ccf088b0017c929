"""Which routing a trainer replays, and which one to recommend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from trl_offpolicy.checks import check_choice, check_positive
from trl_offpolicy.parts import parse_settings

Replay = Literal["none", "r2", "r3"]

R2_FROM, R3_FROM = 2, 4
"""Optimizer steps per generation from which the paper prefers R2, and from which R3."""


@dataclass(frozen=True, kw_only=True)
class RoutingReplay:
    """The ``routing_replay`` field of a configuration.

    Args:
        mode: "r2" replays the routing of the trainer at the weights that sampled, "r3" that of the engine; "none"
            routes freely.
        device: where the records wait: "model" (with the model) or "cpu".
        limit_gib: GiB (2^30 bytes) that the records of a rank's generation batch may take.

    Raises:
        ValueError: a wrong value; the message names the field.
    """

    mode: Replay = "none"
    device: Literal["model", "cpu"] = "model"
    limit_gib: float = 4.0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Replay))
        check_choice("device", self.device, ("model", "cpu"))
        check_positive(limit_gib=self.limit_gib)

    @classmethod
    def parse(cls, spec: Any, *, where: str = "routing_replay") -> RoutingReplay:
        """The options from a mode, ``r3``, or a mapping, ``{mode: r3, device: cpu, limit_gib: 8}``; None = no replay.

        Raises:
            ValueError: a wrong value; the message names the field.

        Example:
            >>> RoutingReplay.parse({"mode": "r3", "limit_gib": 8}).limit_gib
            8
        """
        spec = "none" if spec is None else spec
        settings: RoutingReplay = parse_settings(spec, cls, where=where, short="mode", choices=get_args(Replay))
        return settings


class ReplayAdvice(NamedTuple):
    """The mode to set, and a sentence that says why."""

    mode: Replay
    why: str


def recommend_replay(steps: float) -> ReplayAdvice:
    """None, R2 or R3 for a mixture of experts by the off-policiness N.

    Args:
        steps: N, optimizer steps that one generation serves (``steps_per_generation * num_iterations /
            gradient_accumulation_steps`` in TRL).

    Raises:
        ValueError: ``steps`` is not above 0.

    Example:
        >>> recommend_replay(1).mode, recommend_replay(2).mode, recommend_replay(4).mode
        ('none', 'r2', 'r3')

    Reference: Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs" (arXiv:2512.01374), with runs at N = 1,
    2, 4 and 8. The paper has no run between 2 and 4; R2 there is this kit's choice.
    """
    check_positive(steps=steps)
    if steps < R2_FROM:
        why = "one optimizer step a generation: replay only adds its bias, a correction of the engine ratio is enough"
        return ReplayAdvice("none", why)
    if steps < R3_FROM:
        why = (
            f"{steps:g} optimizer steps a generation: R2 leaves the first step's policy as it is, R3's bias outweighs "
            "what it repairs"
        )
        return ReplayAdvice("r2", why)
    why = (
        f"{steps:g} optimizer steps a generation: the engine's other experts weigh more than the bias of replaying "
        "them" + ("; R2 did not keep training stable at 8" if steps >= 2 * R3_FROM else "")
    )
    return ReplayAdvice("r3", why)
