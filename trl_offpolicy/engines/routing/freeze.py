"""Routers that are not trained, so that training does not change the routing through them."""

from __future__ import annotations

import re

from torch import nn

_ROUTER = re.compile(r"(?:^|\.)(?:gate|router)\.")
_BIAS = re.compile(r"(?:^|\.)(?:(?:gate|router)\.(?:.*\.)?bias|e_score_correction_bias)$")


def freeze_router(model: nn.Module) -> list[str]:
    """Take every parameter of the routers out of training, adapters on them too; returns their names.

    Args:
        model: a mixture of experts whose routers are called ``gate`` or ``router``, as in transformers.

    Raises:
        ValueError: the model has no router.
    """
    names = _freeze(model, _ROUTER)
    if not names:
        raise ValueError("freeze_router must be False for a model without routers (a dense one).")
    return names


def freeze_router_bias(model: nn.Module) -> list[str]:
    """Take the routers' biases out of training; returns the names of biases, trained or not.

    In transformers DeepSeek-V3's ``e_score_correction_bias`` is a buffer, which no optimizer moves. If it is a
    parameter, or if the router itself has a bias (GPT-OSS), it is trained unless it is frozen here.

    Args:
        model: a mixture of experts.

    Raises:
        ValueError: its routers have no bias.

    Reference: Ling Team 2025, "Every Step Evolves" (Ring-1T, arXiv:2510.18855), Sec. 2.3.4.
    """
    names = _freeze(model, _BIAS) + [name for name, _ in model.named_buffers() if _BIAS.search(name)]
    if not names:
        raise ValueError("freeze_router_bias must be False for routers without a bias.")
    return names


def _freeze(model: nn.Module, pattern: re.Pattern[str]) -> list[str]:
    found = [(name, parameter) for name, parameter in model.named_parameters() if pattern.search(name)]
    for _, parameter in found:
        parameter.requires_grad_(False)
    return [name for name, _ in found]
