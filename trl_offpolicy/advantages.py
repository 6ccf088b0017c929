"""Public path; the code is in :mod:`trl_offpolicy.objective.advantages`."""

from trl_offpolicy.objective.advantages import *  # noqa: F403
from trl_offpolicy.objective.advantages import __all__ as __all__
