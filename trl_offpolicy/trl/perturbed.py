"""The noise of ALP in a TRL trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from trl_offpolicy.rollouts.perturbed_forward import PerturbedForward, parse_perturbation


class LearnScales(TrainerCallback):  # type: ignore[misc]
    """Moves the scales of the noise at every optimizer step, and ends it with the training."""

    def __init__(self, noise: PerturbedForward) -> None:
        self._noise = noise

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The gradients are those of the whole step."""
        self._noise.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """What is generated or scored later is the policy itself."""
        self._noise.learning(False)


def perturbed(trainer: Any) -> PerturbedForward:
    """The noise of a trainer's model as configured; it does nothing without ``perturbation``."""
    options = parse_perturbation(trainer.args.perturbation)
    noise = PerturbedForward(trainer.accelerator.unwrap_model(trainer.model), options, trainer.accelerator.device)
    if options is not None:
        trainer.add_callback(LearnScales(noise))
    return noise
