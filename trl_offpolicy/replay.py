"""Public path; the code is in :mod:`trl_offpolicy.rollouts.replay`."""

from trl_offpolicy.rollouts.replay import *  # noqa: F403
from trl_offpolicy.rollouts.replay import __all__ as __all__
