"""Public path; the code is in :mod:`trl_offpolicy.objective.losses`."""

from trl_offpolicy.objective.losses import *  # noqa: F403
from trl_offpolicy.objective.losses import __all__ as __all__
