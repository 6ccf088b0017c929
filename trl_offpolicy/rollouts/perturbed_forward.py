"""Noise on the hidden states of the forwards that learn: ALP, adaptive layerwise perturbation.

A policy that is sharp where it stands has ratios with heavy tails, because a small difference to the sampler moves its
log-probs far. ALP learns through a policy whose hidden states are perturbed, which flattens it: in the ratio the
perturbed policy stands above the sampler, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.checks import check_bool, check_positive
from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.parts import parse_settings, read_numbers
from trl_offpolicy.rollouts.model_parts import decoder_layers
from trl_offpolicy.stats import PREFIX

NOT_SHARED = "perturbation draws other noise in every forward"
"""Why no prompt is computed once for several rows."""


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """Gaussian noise on the input of every decoder layer.

        h_l <- h_l + s_l rms(h_l) e,    e ~ N(0, I)

    drawn anew for each element and forward. rms(h_l) is the root mean square of a token's hidden state, without
    gradient, so that s_l means the same in every layer and model.

    Args:
        std: s_l at the start, a share of the size of the hidden state.
        largest: bound of s_l. None = ten times ``std``.
        learn: whether each layer's s_l is learned by the loss (Adam), between 0 and ``largest``.
        learning_rate: Adam's learning rate of log s_l.

    Raises:
        ValueError: a value is out of range.

    Reference: Ye et al. 2026, ALP (arXiv:2603.19470). We know it by its abstract and its project page; that the noise
    is measured in hidden states, its bound and its optimizer are this kit's. Its ratio is that of ``paper/ppo-is``.
    """

    std: float = 1e-3
    largest: float | None = None
    learn: bool = True
    learning_rate: float = 1e-2

    def __post_init__(self) -> None:
        check_positive(std=self.std, learning_rate=self.learning_rate)
        check_bool(learn=self.learn)
        if self.largest is not None:
            check_positive(largest=self.largest)
            if self.largest < self.std:
                raise ValueError(f"largest must be at least std ({self.std}), but got {self.largest}.")

    @property
    def bound(self) -> float:
        """Largest s_l."""
        return 10 * self.std if self.largest is None else self.largest


def parse_perturbation(spec: Any, *, where: str = "perturbation") -> Perturbation | None:
    """A perturbation from its ``std``, ``0.001``, or a mapping of its fields; None = none.

    Raises:
        ValueError: a wrong value; the message names the field.

    Example:
        >>> parse_perturbation(0.01)
        Perturbation(std=0.01, largest=None, learn=True, learning_rate=0.01)
    """
    if spec is None:
        return None
    given = read_numbers(spec)
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = {"std": given}
    elif not isinstance(given, Mapping | Perturbation):
        raise ValueError(f"{where} must be a standard deviation or a mapping, but got {spec!r}.")
    found: Perturbation = parse_settings(given, Perturbation, where=where, short="std", choices=())
    return found


class PerturbedForward:
    """The noise of one model's layers. It is off until :meth:`learning`.

    What is remembered are the scales s_l, which are no parameters of the model: neither synced nor saved with it.

    Args:
        model: the policy; wrapped by nothing but PEFT.
        options: how it is perturbed; None = it is not, and every method does nothing.
        device: where the scales are.

    Raises:
        ValueError: the model does not name its decoder layers in ``_no_split_modules``.
    """

    def __init__(self, model: Any, options: Perturbation | None, device: torch.device | str = "cpu") -> None:
        layers = [] if options is None else decoder_layers(model)
        if options is not None and not layers:
            raise ValueError(f"perturbation needs a model that names its layers, but {type(model).__name__} does not.")
        self._options, self._on = options or Perturbation(learn=False), False
        learn = self._options.learn
        self._log_std = torch.full((len(layers),), self._options.std, device=device).log().requires_grad_(learn)
        self._optimizer = torch.optim.Adam([self._log_std], lr=self._options.learning_rate) if learn else None
        self._hooks = [
            layer.register_forward_pre_hook(self._hook(place), with_kwargs=True) for place, layer in enumerate(layers)
        ]

    def learning(self, on: bool = True) -> None:
        """Perturb forwards from now on, or stop. Recomputed activations of the backward count as the forward."""
        self._on = on

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @property
    def adds(self) -> bool:
        """Whether forwards that learn are perturbed at all."""
        return len(self._log_std) > 0

    @property
    def std(self) -> Tensor:
        """(layers,) the scales s_l, float32; no gradient."""
        return self._log_std.detach().exp()

    def step(self) -> None:
        """One step of the scales by the gradient that the losses have left. All ranks call it at an optimizer step."""
        if self._optimizer is None or self._log_std.grad is None:
            return
        total = sum_ranks(self._log_std.grad)  # Adam's step is that of the mean as well
        # the gradient of a step that a gradient scaler skips; all ranks see the same sum
        self._log_std.grad = torch.where(total.isfinite(), total, 0.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            self._log_std.clamp_(max=torch.tensor(self._options.bound).log().item())

    def state_dict(self) -> dict[str, Any]:
        """Scales and Adam's moments as plain values, for the checkpoints."""
        if self._optimizer is None:
            return {}
        kept = self._optimizer.state.get(self._log_std, {})
        return {"log_std": self._log_std.tolist(), "adam": {key: value.tolist() for key, value in kept.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the values of :meth:`state_dict`; those at the start if there are none."""
        if self._optimizer is None or "log_std" not in state:
            return
        self._log_std.copy_(torch.tensor(state["log_std"]))
        if state["adam"]:
            self._optimizer.state[self._log_std] = {
                key: torch.tensor(value, device="cpu" if key == "step" else self._log_std.device)
                for key, value in state["adam"].items()
            }

    def stats(self) -> dict[str, float]:
        """The mean scale over layers, by its name in the log; empty without a perturbation."""
        return {f"{PREFIX}perturbation/std": float(self.std.mean())} if self.adds else {}

    def _hook(self, place: int) -> Callable[[nn.Module, Any, Any], Any]:
        def perturb(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._on:
                return None
            if args:
                return (self._perturbed(place, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._perturbed(place, kwargs["hidden_states"])}

        return perturb

    def _perturbed(self, place: int, hidden: Tensor) -> Tensor:
        size = hidden.detach().float().square().mean(-1, keepdim=True).sqrt()
        scale = self._log_std[place].to(hidden.device).exp()
        return _rounded(hidden.float() + scale * size * _normal(hidden), hidden.dtype)


def _normal(hidden: Tensor) -> Tensor:
    return torch.randn_like(hidden, dtype=torch.float32)


def _rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as ``dtype``; the gradient passes as if they were not rounded.

    To bfloat16, up or down at random with the mean kept: to the nearest, noise that is small beside the value it is
    added to would be rounded away.
    """
    if dtype != torch.bfloat16:
        return exact.to(dtype)
    return _ToBfloat16.apply(exact)  # type: ignore[no-any-return, no-untyped-call]


class _ToBfloat16(torch.autograd.Function):
    """Stochastic rounding: bfloat16 is the upper half of a float32, to which a random lower half is added."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor) -> Tensor:
        bits = exact.contiguous().view(torch.int32)
        raised = bits + torch.randint_like(bits, 1 << 16)
        upper = (raised & ~0xFFFF).view(torch.float32)
        return torch.where(exact.isfinite(), upper, exact).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.float()
