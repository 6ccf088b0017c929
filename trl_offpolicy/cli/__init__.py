"""The commands of `trl-offpolicy`."""

from trl_offpolicy.cli.commands import main

__all__ = ["main"]
