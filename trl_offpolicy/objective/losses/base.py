"""The contract of a policy loss: what it receives, what it returns and what it declares."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import any_true
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.functional.groups import group_members
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.policy_losses import LossTerms
from trl_offpolicy.parts import Part, overridable
from trl_offpolicy.types import Scope

WeightUse = Literal["multiply", "inside"]
RatioLevel = Literal["token", "sequence_mean", "sequence"]
Field = Literal[
    "sampling_log_ratios", "mismatch_log_ratios", "rewards", "group_ids", "group_rewards", "entropies"
]  # fmt: skip


class LossInputs(NamedTuple):
    """What a policy loss sees. ``logps`` and the log-ratios carry gradient, nothing else does.

    - ``logps`` (B, T): log pi.
    - ``log_ratios`` (B, T): log(pi / proximal), 0 on padding.
    - ``advantages`` (B, 1) or (B, T).
    - ``mask`` (B, T) bool.
    - ``weights`` (B, 1) or (B, T): importance weights, or None.

    The other fields are None if the batch lacks them:

    - ``sampling_log_ratios`` (B, T): log(pi / mu), 0 on padding; only for losses that name it in ``reads``.
    - ``mismatch_log_ratios`` (B, T): log(pi_old / mu), 0 where not observed; only for losses that name it in ``reads``.
    - ``entropies`` (B, T): nats, 0 on padding; only for losses that name it in ``reads``.
    - ``rewards`` (B, 1).
    - ``group_ids`` (B,).
    - ``group_rewards`` (B, G): the rewards of the row's whole group.
    - ``turn_ids`` (B, T).
    """

    logps: Tensor
    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
    sampling_log_ratios: Tensor | None = None
    rewards: Tensor | None = None
    group_ids: Tensor | None = None
    group_rewards: Tensor | None = None
    turn_ids: Tensor | None = None
    entropies: Tensor | None = None
    mismatch_log_ratios: Tensor | None = None

    def need(self, field: Field, loss: object) -> Tensor:
        """The tensor of the field ``field``, which ``loss`` needs.

        Raises:
            ValueError: the batch does not have it; the message names the field and the loss.
        """
        value: Tensor | None = getattr(self, field)
        if value is None:
            raise ValueError(f"{field} must be given for {type(loss).__name__}, but got None.")
        return value


class PolicyLoss(Part):
    """A loss per token. Subclass it as a frozen, keyword-only dataclass.

    A subclass must write :meth:`__call__`. Everything else has the default below. A field, a class attribute or a
    property of the same name in the subclass replaces it. The docstring of the subclass says what carries gradient.
    """

    weight_use: ClassVar[WeightUse] = "multiply"
    """"multiply": the objective multiplies the loss by the importance weights. "inside": the loss reads them itself."""

    uses_ratio: ClassVar[bool] = True
    """Whether it contains the ratio of the current policy to its centre. No weight may then contain it again."""

    aggregation: ClassVar[Aggregation] = "token_mean"
    """The aggregation that it was published with."""

    fixed_aggregation: ClassVar[bool] = False
    """Whether any other aggregation would make it another loss. The objective then refuses others."""

    trust_region: ClassVar[str] = "-"
    """What holds the policy back, in words, for the map in the docs."""

    purpose: ClassVar[str] = "-"
    """What it is made for, in words, for the same map."""

    @overridable
    def level(self) -> RatioLevel:
        """Level of its ratio: one per token, or one per response (geometric mean or product)."""
        return "token"

    @overridable
    def reads(self) -> tuple[Field, ...]:
        """Fields of :class:`LossInputs` that it needs.

        With "sampling_log_ratios" its centre is the policy that sampled. No weight may then contain any part of that
        ratio. With "mismatch_log_ratios" it only looks at pi_old / mu, and does not contain it.
        """
        return ()

    @overridable
    def scope(self) -> Scope:
        """Rows that it must see at once; "micro_batch" = it takes statistics over the rows of one call."""
        return "row"

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossTerms:
        """The loss, (B, T) by token or (B, 1) by response, with its clip flags and gate."""


def at_level(inputs: LossInputs, level: RatioLevel) -> Tensor:
    """The log-ratios: (B, T) at level "token", else their mean or their sum over the response, (B, 1)."""
    return inputs.log_ratios if level == "token" else aggregate(inputs.log_ratios, inputs.mask, level)


def own_logps(inputs: LossInputs) -> Tensor:
    """(B, T) log pi, exactly 0 on padding."""
    return torch.where(inputs.mask, inputs.logps, 0.0)


def rewards_of_group(inputs: LossInputs, loss: object, scope: Scope) -> tuple[Tensor, Tensor]:
    """(B, N) rewards of each row's group and (B, N) bool, which of them count.

    With ``scope="row"`` the row's own ``group_rewards``; with "micro_batch" the rows of this call that share its group
    id and have a trainable token.

    Raises:
        ValueError: a field that is needed is absent.
    """
    if scope == "row":
        if inputs.group_rewards is None:
            raise ValueError(
                f"group_rewards must be given for {type(loss).__name__}, but got None. With scope='micro_batch' the "
                "rewards of the rows at hand stand for the group."
            )
        return inputs.group_rewards, inputs.group_rewards.isfinite()
    rewards, group_ids = inputs.need("rewards", loss), inputs.need("group_ids", loss)
    member = group_members(group_ids, any_true(inputs.mask), across_ranks=False) & rewards.isfinite().T
    return rewards.T.expand(len(rewards), -1), member


def group_fields(scope: Scope) -> tuple[Field, ...]:
    """The fields that :func:`rewards_of_group` reads under ``scope``."""
    return ("group_rewards",) if scope == "row" else ("rewards", "group_ids")


def check_level(level: str, *, product: bool = False) -> None:
    """Raise unless ``level`` is one that a loss can take its ratio at; "sequence" only with ``product``."""
    if product and level not in get_args(RatioLevel):
        raise ValueError(f"level must be 'token', 'sequence_mean' (GSPO) or 'sequence' (RLOO), but got {level!r}.")
    if not product and level not in ("token", "sequence_mean"):
        raise ValueError(f"level must be 'token' or 'sequence_mean' (GSPO), but got {level!r}.")


def check_reward_scope(scope: str) -> None:
    """Raise unless ``scope`` is "row" or "micro_batch"."""
    if scope not in ("row", "micro_batch"):
        raise ValueError(f"scope must be 'row' (group_rewards) or 'micro_batch', but got {scope!r}.")
