"""Noise on the norms of an engine in this process: exploration by weights, which falls over the training (QeRL).

A norm's output goes into linear layers, so noise on its weight is noise on all of theirs, for a few kilobytes. The
sampling log-probs are those of the engine with the noise, so every correction of this kit acts on the difference. The
noise goes on after a sync is proved, and off before the next one.

Reference: Huang et al. 2025, QeRL (arXiv:2510.11696), adaptive quantisation noise, Eq. 8 and 10; stages as in its code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.checks import check_positive, check_whole, schedule_steps
from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.parts import parse_settings

logger = logging.getLogger(__name__)

OPTION = "engine.norm_noise"


@dataclass(frozen=True, kw_only=True)
class NormNoise:
    """How large the noise is, in stages of equal length. In the first stage there is none.

    Args:
        start: standard deviation in the second stage, on weights that are near 1.
        end: in the last one.
        stages: number of stages.
        steps: optimizer steps of all stages; from then on it is ``end``. None = those of the run.
        seed: of the noise, which depends on it and on the version of the weights alone: ranks have the same.

    Raises:
        ValueError: a wrong value; the message names the field.
    """

    start: float = 1e-2
    end: float = 1e-4
    stages: int = 10
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(start=self.start, end=self.end)
        check_whole("stages", self.stages, least=2)
        check_whole("seed", self.seed, least=0)
        if self.steps is not None:
            check_whole("steps", self.steps, least=1)

    def sigma(self, step: int, run_steps: int) -> float:
        """Standard deviation at an optimizer step, start (end / start)^((k - 1) / (K - 2)) in stage k of 0 .. K - 1.

        Args:
            step: optimizer steps made so far.
            run_steps: those of the whole run, for ``steps: None``.

        Raises:
            ValueError: the length of the run is not known, and ``steps`` does not say another.
        """
        steps = schedule_steps(f"{OPTION}.steps", self.steps, run_steps)
        stage = min(step * self.stages // steps, self.stages - 1)
        if stage == 0:
            return 0.0
        decays = max(self.stages - 2, 1)
        return float(self.start * (self.end / self.start) ** ((stage - 1) / decays))


def parse_noise(option: Any) -> NormNoise | None:
    """The option ``norm_noise`` of an engine: true, or a mapping of :class:`NormNoise`; None or false = no noise.

    Example:
        >>> parse_noise({"start": "1e-2"}).sigma(100, 1000)
        0.01

    Raises:
        ValueError: it is something else, or a key or a value is wrong.
    """
    if option is None or option is False:
        return None
    if option is True:
        return NormNoise()
    if isinstance(option, NormNoise):
        return option
    noise: NormNoise = parse_settings(option, NormNoise, where=OPTION, short="start", choices=("true", "false"))
    return noise


class NoisyNorms:
    """The norms of an engine's model, with and without noise.

    Args:
        noise: the settings.
        model: returns the engine's model; it is called each time.
        forget: called after a change, to forget what was cached with the weights before.
    """

    def __init__(self, noise: NormNoise, model: Callable[[], nn.Module], forget: Callable[[], None]) -> None:
        self.noise, self._model, self._forget = noise, model, forget
        self._clean: dict[str, Tensor] = {}  # empty: the engine has no noise
        self._holds: tuple[int, float] | None = None
        self.sigma = 0.0
        """Standard deviation of the noise that the engine has: 16-bit weights take small noise only in part."""
        self._said = False

    @torch.no_grad()
    def off(self) -> None:
        """Take the noise off. Called before a sync, a proof and an evaluation."""
        if not self._clean:
            return
        for name, weight in norms(self._model()).items():
            weight.copy_(self._clean[name])
        self._clean, self._holds, self.sigma = {}, None, 0.0
        self._forget()

    @torch.no_grad()
    def on(self, version: int, sigma: float) -> None:
        """Give the engine noise of this size. Nothing happens if it has it already.

        Args:
            version: version of the engine's weights.
            sigma: standard deviation; 0 = none.
        """
        if self._holds == (version, sigma):
            return
        self.off()
        if sigma == 0.0:
            return
        generator = torch.Generator().manual_seed(self.noise.seed * 1_000_003 + version)
        squares = []
        for name, weight in norms(self._model()).items():
            clean = self._clean[name] = weight.clone()
            drawn = torch.randn(weight.shape, generator=generator)  # on the host: the same on every device
            weight.copy_(clean.float() + sigma * drawn.to(weight.device))
            squares.append((weight.float() - clean.float()).square().mean())
        self._holds, self.sigma = (version, sigma), float(torch.stack(squares).mean().sqrt())
        self._forget()
        if self.sigma < sigma / 2 and not self._said:
            self._said = True
            logger.warning(
                "%s: noise of %.2g is below what weights near 1 hold in the engine's precision; %.2g of it is left. "
                "Set end to at least 4e-3 in bfloat16 (5e-4 in float16), or take a float32 engine.",
                OPTION, sigma, self.sigma,
            )  # fmt: skip


def norms(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the norms before linear layers, those of queries and keys left out, by name.

    Raises:
        EngineError: there are none: the noise would change nothing, unseen.
    """
    named = sorted((name, weight.data) for name, weight in model.named_parameters() if weight.dim() == 1)
    of_heads = ("q_norm.weight", "k_norm.weight")
    found = {name: w for name, w in named if name.endswith("norm.weight") and not name.endswith(of_heads)}
    if not found:
        raise EngineError(f"{OPTION} needs a model with norms (weights named ...norm.weight), but it has none.")
    return found
