"""Public path; the code is in :mod:`trl_offpolicy.objective.proximal`."""

from trl_offpolicy.objective.proximal import *  # noqa: F403
from trl_offpolicy.objective.proximal import __all__ as __all__
