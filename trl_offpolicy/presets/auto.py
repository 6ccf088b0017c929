"""The options of ``offpolicy: auto``, which lets the batches choose among several corrections.

The choice itself is made in :mod:`trl_offpolicy.control.auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_offpolicy.checks import (
    check_fraction,
    check_not_negative,
    check_positive_or_none,
    check_proper_fraction,
    check_whole,
)

AUTO = "auto"
"""Its name in a configuration. It is no preset: a preset is one correction."""

CANDIDATE_KEYS = ("name", "preset", "options", "correction")
CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"name": "none", "preset": "measure"},
    {"name": "sequence_is", "preset": "paper/vanilla-is", "options": {"level": "sequence"}},
    {"name": "sequence_tis_10", "preset": "paper/sequence-tis", "options": {"max_weight": 10.0}},
    {"name": "sequence_tis_5", "preset": "paper/sequence-tis", "options": {"max_weight": 5.0}},
    {"name": "sequence_tis_2", "preset": "paper/sequence-tis", "options": {"max_weight": 2.0}},
    {"name": "tis_5", "preset": "paper/tis", "options": {"max_weight": 5.0}},
    {"name": "tis_2", "preset": "paper/tis", "options": {"max_weight": 2.0}},
    {"name": "icepop", "preset": "paper/icepop"},
    {"name": "geometric_mask", "preset": "paper/geometric-mask"},
)
"""The corrections to choose from. Where two are estimated to be equal, the earlier one is taken."""


def _default_candidates() -> tuple[Mapping[str, Any], ...]:
    return CANDIDATES


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """When a correction is good enough, when it is better than another one, and when to change.

    Args:
        ess_floor: effective sample size that a correction must leave, a share of the responses in [0, 1].
        max_second_moment: largest E w^2 that a correction may have, 1 on-policy; None = only the ESS counts.
        tolerance: share of the target's mass that may be missed. Corrections that miss no more are equal in bias; the
            one with the least variance is then taken.
        token_tolerance: the same for the missed mass of single tokens, which decides where the products are lost.
        margin: how much better a correction must be to replace the present one, as a share: of the missed mass, or of
            the ESS if both miss nothing.
        patience: generations in a row in which it must be better.
        candidates: mappings with the keys of :data:`CANDIDATE_KEYS`; one must be without weight and mask, because
            there must be one that holds the floor.

    Raises:
        ValueError: a value is out of range, or a candidate has no name or another one's.
    """

    ess_floor: float = 0.5
    max_second_moment: float | None = None
    tolerance: float = 0.05
    token_tolerance: float = 0.005
    margin: float = 0.2
    patience: int = 3
    candidates: tuple[Mapping[str, Any], ...] = field(default_factory=_default_candidates)

    def __post_init__(self) -> None:
        check_fraction(ess_floor=self.ess_floor)
        check_positive_or_none(max_second_moment=self.max_second_moment)
        check_not_negative(tolerance=self.tolerance, token_tolerance=self.token_tolerance)
        check_proper_fraction(margin=self.margin)
        check_whole("patience", self.patience, least=1)
        if not isinstance(self.candidates, list | tuple) or len(self.candidates) < 2:
            raise ValueError(f"candidates must be a list of two or more mappings, but got {self.candidates!r}.")
        for one in self.candidates:
            _check_candidate(one)
        names = [one["name"] for one in self.candidates]
        if len(set(names)) < len(names):
            raise ValueError(f"candidates must have different names, but got {names}.")
        object.__setattr__(self, "candidates", tuple(self.candidates))


def _check_candidate(one: object) -> None:
    if not isinstance(one, Mapping) or not isinstance(one.get("name"), str) or not one["name"].isidentifier():
        raise ValueError(
            f"candidates must be mappings with a name of letters, digits and _ and a preset, but got {one!r}."
        )
    if unknown := [key for key in one if key not in CANDIDATE_KEYS]:
        raise ValueError(f"candidates.{one['name']} must have the keys {list(CANDIDATE_KEYS)}, but got {unknown[0]!r}.")
