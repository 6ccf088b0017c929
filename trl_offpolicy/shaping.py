"""Public path; the code is in :mod:`trl_offpolicy.objective.shaping`."""

from trl_offpolicy.objective.shaping import *  # noqa: F403
from trl_offpolicy.objective.shaping import __all__ as __all__
