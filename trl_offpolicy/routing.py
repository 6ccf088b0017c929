"""Public path; the code is in :mod:`trl_offpolicy.engines.routing`."""

from trl_offpolicy.engines.routing import *  # noqa: F403
from trl_offpolicy.engines.routing import __all__ as __all__
