"""The kit's LightningCLI: ``fit``, ``validate``, ``test`` and ``predict``, options in YAML or as arguments."""

# ruff: noqa: E402  the first error shall be the one that says what to install

from __future__ import annotations

from collections.abc import Sequence

from trl_offpolicy.packages import require

require("jsonargparse", by="python -m lightning_module")

from lightning.pytorch.cli import LightningCLI

from lightning_module.data import PromptDataModule
from lightning_module.module import OffPolicyGRPOModule


def main(args: Sequence[str] | None = None) -> LightningCLI:
    """Parse the arguments and run the subcommand.

    Args:
        args: the arguments; None = those of the command line.
    """
    return LightningCLI(
        OffPolicyGRPOModule,
        PromptDataModule,
        args=None if args is None else list(args),
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "python -m lightning_module"},
    )
