"""Keep terms that need the whole generation batch: a budget for all its tokens, or a verdict on a prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trl_offpolicy.checks import check_number
from trl_offpolicy.correction.terms.base import KeepTerm, TermInputs, Violations, is_late, number
from trl_offpolicy.correction.terms.checks import check_ratio, check_scope
from trl_offpolicy.functional import masks
from trl_offpolicy.functional.levels import group_mean
from trl_offpolicy.functional.log_ratios import LOG_RATIO_LIMIT
from trl_offpolicy.types import Ratio, Scope

__all__ = [
    "GroupRejection",
    "SecondMomentBudget",
]


@dataclass(frozen=True, kw_only=True)
class SecondMomentBudget(KeepTerm):
    """M2PO: drop the worst tokens of the batch until the mean of l^2 over the kept ones is at most ``budget``.

    A dropped token is reported as ``above`` if the numerator finds it likelier than the sampler did, else as ``below``.
    With ``scope="micro_batch"`` the budget is that of one call's rows; ratios with the current policy need this.

    Reference: Zheng et al. 2025, M2PO (arXiv:2510.01161); 0.04 is the paper's budget.
    """

    type_name: ClassVar[str] = "second_moment_budget"
    budget: float = 0.04
    ratio: Ratio = "old/sampling"
    scope: Scope = "generation_batch"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_scope(self.scope, self.ratio)
        check_number("budget", self.budget)
        largest = LOG_RATIO_LIMIT**2
        if not 0 < self.budget < largest:
            raise ValueError(f"budget must be in (0, {largest:.0f}) nats squared to ever fire, but got {self.budget}.")

    @property
    def formula(self) -> str:
        """The budget, as ``drop the largest |log rho_t| until mean_t log^2 rho_t <= 0.04``."""
        return f"drop the largest |log rho_t| until mean_t log^2 rho_t <= {number(self.budget)}"

    def violations(self, inputs: TermInputs) -> Violations:
        """The tokens that the budget does not allow, above or below a ratio of 1."""
        keep = masks.second_moment_budget(
            inputs.log_ratios, inputs.mask, budget=self.budget, across_ranks=self.scope == "generation_batch"
        )
        up = inputs.log_ratios > 0
        return Violations(~keep & up, ~keep & ~up)


@dataclass(frozen=True, kw_only=True)
class GroupRejection(KeepTerm):
    """Drop all responses to a prompt when earlier terms dropped more than ``max_dropped_fraction`` of them.

    Where only a few responses of a group are left, their baseline rests on those few. List this term after the terms
    whose drops it counts. A response that ``nonfinite="drop"`` empties counts too.
    """

    type_name: ClassVar[str] = "group_rejection"
    max_dropped_fraction: float = 0.5
    scope: ClassVar[Scope] = "group"
    reads_ratio: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("max_dropped_fraction", self.max_dropped_fraction)
        if not 0 <= self.max_dropped_fraction < 1:
            raise ValueError(
                f"max_dropped_fraction must be in [0, 1) to ever fire, but got {self.max_dropped_fraction}."
            )

    @property
    def formula(self) -> str:
        """The share, as ``drop a prompt of which more than 0.5 were dropped``."""
        return f"drop a prompt of which more than {number(self.max_dropped_fraction)} were dropped"

    def violations(self, inputs: TermInputs) -> Violations:
        """The rows (B, 1) of groups that lost too many responses."""
        if inputs.group_ids is None:
            raise ValueError("group_ids must be given for a group rejection, but got None.")
        trainable = inputs.mask if inputs.trainable is None else inputs.trainable
        kept = trainable if inputs.keep is None else trainable & inputs.keep
        lost = (~kept.any(-1)).float()
        share = group_mean(lost, trainable.any(-1), inputs.group_ids)
        return Violations((share > self.max_dropped_fraction).unsqueeze(-1), None)


def check_group_rejections(keep: tuple[KeepTerm, ...], *, nonfinite_drops: bool) -> None:
    """Raise unless earlier terms drop something on the whole generation batch, which a group rejection can count.

    Raises:
        ValueError: nothing is dropped before it, or something is dropped only in the loss step.
    """
    places = [index for index, term in enumerate(keep) if isinstance(term, GroupRejection)]
    if 0 in places and not nonfinite_drops:
        raise ValueError("keep must name the terms that group_rejection counts before it, but got it first.")
    late = [term.name for term in keep[: max(places, default=0)] if is_late(term)]
    if late:
        raise ValueError(
            f"keep must name {late[0]} behind group_rejection (it is decided in the loss step, groups are judged "
            "before the batch is split), but got it before."
        )


def check_kept_baseline(keep: tuple[KeepTerm, ...]) -> None:
    """Raise unless the kept responses are known before the advantages are made and do not depend on them.

    Raises:
        ValueError: nothing can be dropped, or something is dropped only in the loss step or by the advantage's sign.
    """
    if not keep:
        raise ValueError("baseline must be 'all' without a keep term, but got 'kept'.")
    if late := [term.name for term in keep if is_late(term)]:
        raise ValueError(
            f"baseline must be 'all' with {late[0]}, which is decided in the loss step: advantages are made before the "
            "first step, when it has not dropped anything yet."
        )
    if by_sign := [term.name for term in keep if term.reads_advantages]:
        raise ValueError(
            f"baseline must be 'all' with {by_sign[0]}, which decides by the sign of the advantage: a baseline of the "
            "kept responses changes that sign after the decision."
        )
