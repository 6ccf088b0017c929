"""verl: hydra's YAML, and launch scripts with overrides ``a.b=c``."""

from trl_offpolicy.migrate.frameworks.verl.framework import FRAMEWORK

__all__ = ["FRAMEWORK"]
