"""Whether a loss depends on how the rows of an optimizer step are split into micro-batches."""

from __future__ import annotations

from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.types import WIDE_SCOPES


def split_dependence(
    objective: Objective, *, by_token: bool, has_entropy_bonus: bool, top_entropy: bool, aux_loss: bool = False
) -> str | None:
    """Why the gradient of an optimizer step depends on which rows share a micro-batch; None if it does not.

    A loss that is a sum over rows (or tokens) with a denominator of the whole step does not: then rows may be sorted
    into micro-batches of like length. A denominator or a statistic of one micro-batch does, and sorting by length would
    bias it: BNPO's tokens of short responses would weigh more than those of long ones.

    Args:
        objective: the loss.
        by_token: True if the trainer gives the loss the tokens of the whole step as its denominator.
        has_entropy_bonus: True if the loss has an entropy bonus (its coefficient may move, and be 0 now).
        top_entropy: True if only the tokens of highest entropy learn.
        aux_loss: True if the loss has a load-balancing term.

    Example:
        >>> import trl_offpolicy as op
        >>> options = {"by_token": False, "has_entropy_bonus": False, "top_entropy": False}
        >>> split_dependence(op.Objective(aggregation="token_mean"), **options)
        'aggregation token_mean divides by the tokens of its own micro-batch (bnpo)'
        >>> split_dependence(op.Objective(aggregation="seq_mean_token_mean"), **options) is None
        True
    """
    kept_of_step = objective.denominator == "kept" and objective.scope in WIDE_SCOPES
    if objective.aggregation == "token_mean" and not by_token and not kept_of_step:
        return "aggregation token_mean divides by the tokens of its own micro-batch (bnpo)"
    if objective.policy_loss.scope == "micro_batch":
        return f"{type(objective.policy_loss).__name__} takes statistics over its micro-batch"
    correction = objective.correction
    if correction is not None:
        scopes = [(type(weight).__name__, weight.scope) for weight in correction.weights]
        scopes += [(term.name, term.scope) for term in correction.keep]
        if narrow := [name for name, scope in scopes if scope == "micro_batch"]:
            return f"{narrow[0]} has scope micro_batch"
        if correction.normalize != "none" and correction.normalize_over == "micro_batch":
            return "normalize_over is micro_batch"
    if has_entropy_bonus and objective.entropy_aggregation == "token_mean":
        return "the entropy bonus is a mean over the tokens of its micro-batch"
    if top_entropy:
        return "top_entropy_quantile is taken over a micro-batch"
    if aux_loss:
        return "the load-balancing loss of the experts is taken over a micro-batch"
    return None
