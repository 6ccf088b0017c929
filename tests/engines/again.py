"""A batch computed again in another way: plain forwards of single rows, without padding.

With copies of the weights of every step, the routing that the rows brought along, and a softmax over their kept tokens.
Under FSDP2 and ZeRO-3 a rank makes whole copies and computes its own rows again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from trl_offpolicy.engines.routing import replay
from trl_offpolicy.rollouts import kept, routing
from trl_offpolicy.rollouts.ahead.old_policy import PROXIMAL

DECAY = 0.6
"""Of the moving average of weights."""

CAP = 2.0
"""Of the weights of ``paper/tis``."""


@torch.no_grad()
def whole_weights(model: Any) -> dict[str, Tensor]:
    """Copies of all weights by name, whichever ranks hold their parts. All ranks call it."""
    named = dict(model.named_parameters())
    held, gathered = [value for value in named.values() if hasattr(value, "ds_id")], nullcontext()
    if held:  # by DeepSpeed
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(held)
    with gathered:
        found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}
        return {name: value.detach().clone() for name, value in found.items()}


def of_all_ranks(values: Tensor) -> Tensor:
    """The 1-d values of all ranks, one rank after the other. All ranks call it."""
    if not dist.is_initialized():
        return values
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values.tolist())
    return torch.tensor([one for part in parts for one in part])


class Again:
    """Computes a batch again from copies of the weights.

    Args:
        model: name of the model.
        per_generation: optimizer steps of a generation that was not sampled ahead.
    """

    def __init__(self, model: str, per_generation: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.weights: dict[int, dict[str, Tensor]] = {}
        self._first = whole_weights(self.model)
        self._per_generation = per_generation

    @torch.no_grad()
    def row(
        self, inputs: Mapping[str, Any], row: int, weights: Any, *, routed: bool = True, cut: bool = True
    ) -> Tensor:
        """(T,) log-probs of one completion; with the recorded routing and over the kept tokens, if there are any."""
        unknown = self.model.load_state_dict(weights, strict=False).unexpected_keys  # tied ones are there once
        assert not unknown, unknown
        prompt, completion = (
            inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row].bool()].tolist() for part in ("prompt", "completion")
        )
        here = torch.cat([inputs["prompt_mask"][row], inputs["completion_mask"][row]]).bool()
        fed, way = torch.tensor([[*prompt, *completion][:-1]]), nullcontext()
        if routed and routing.KEY in inputs:
            way = replay(self.model, inputs[routing.KEY][row][here][:-1].unsqueeze(0))
        with way:
            logits = self.model(input_ids=fed).logits[0, len(prompt) - 1 :]
        if not cut or kept.KEY not in inputs:
            return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        found = []
        for at, token, listed in zip(logits, completion, inputs[kept.KEY][row].tolist(), strict=False):
            found.append(at[listed].log_softmax(-1)[listed.index(token)])
        return torch.stack(found)

    def average(self, step: int) -> dict[str, Tensor]:
        """The moving average of the weights of all steps so far."""
        found = dict(self.weights[0])
        for version in range(1, step + 1):
            now = self.weights[version]
            found = {name: DECAY * value + (1 - DECAY) * now[name] for name, value in found.items()}
        return found

    def __call__(self, inputs: Mapping[str, Any], step: int, model: Any) -> dict[str, float]:
        """Numbers of one batch before its loss, by the model of now; differences are of log-probs, in nats."""
        self.weights[step] = whole_weights(model)
        masks = inputs["completion_mask"].bool()
        columns: dict[str, list[Tensor]] = {}
        versions = inputs.get("policy_versions")
        if versions is None:
            versions = torch.full(masks.shape, step - step % self._per_generation)
        if versions.dim() == 1:  # one for each row
            versions = versions[:, None].expand(masks.shape)
        sampled = of_all_ranks(versions[masks])
        shares = {int(one): float((sampled == one).float().mean()) for one in sampled.unique()}
        for row, mask in enumerate(masks):
            now, free, whole, first = (
                self.row(inputs, row, weights, **how)
                for weights, how in (
                    (self.weights[step], {}), (self.weights[step], {"routed": False}),
                    (self.weights[step], {"cut": False}), (self._first, {"cut": False}),
                )
            )  # fmt: skip
            by_version = {one: self.row(inputs, row, self.weights[one]) for one in shares}
            then = torch.stack([by_version[int(v)][t] for t, v in enumerate(versions[row][mask])])
            mixture = sum(share * by_version[one].exp() for one, share in shares.items()).log()  # type: ignore[union-attr]
            averaged = self.row(inputs, row, self.average(step))
            mu = inputs["sampling_per_token_logps"][row][mask]
            unknown = torch.full_like(mu, torch.nan)
            old, proximal, decided, advantages = (
                unknown if inputs.get(name) is None else inputs[name][row].expand(mask.shape)[mask]
                for name in ("old_per_token_logps", PROXIMAL, "decided_weights", "advantages")
            )
            found = {
                "then_mu": then - mu, "now_mu": now - mu, "now_then": now - then, "now_mixture": now - mixture,
                "then_old": then - old, "mixture_old": mixture - old, "average_proximal": averaged - proximal,
                "average_now": averaged - now, "routed_free": now - free, "cut_whole": now - whole,
                "k3": (first - now).expm1() - (first - now), "decided": decided, "advantages": advantages,
            }  # fmt: skip
            for name, column in found.items():
                columns.setdefault(name, []).append(column)
        joined = {name: torch.cat(column) for name, column in columns.items()}
        losses = corrected(joined)
        return {f"{name}/max": float(column.abs().max()) for name, column in joined.items()} | {
            f"{name}/mean": float(column.abs().mean()) for name, column in joined.items()
        } | losses | {"rows": len(masks), "lag": step - int(sampled.min()), "versions": len(shares)}  # fmt: skip


def corrected(columns: dict[str, Tensor]) -> dict[str, float]:
    """The loss of ``paper/tis`` by tokens, all responses of one length, where the policy of now is the proximal one.

    "loss" has the weights as they are. For "loss_wide" they are divided by their mean over the whole batch;
    "decided_off" is how far the weights that travel with the rows are from these, "wide_by" what the division changes.
    """
    weights, advantages = columns["now_mu"].exp().clamp(max=CAP), columns["advantages"]
    wide = weights / weights.mean()
    return {
        "loss": float(-(advantages * weights).mean()),
        "loss_wide": float(-(advantages * wide).mean()),
        "decided_off": float((wide - columns["decided"]).abs().max()),
        "wide_by": float((wide - weights).abs().max()),
    }
