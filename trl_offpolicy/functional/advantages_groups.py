"""Former path; the code is in :mod:`trl_offpolicy.functional.advantages`."""

from trl_offpolicy.functional.advantages import *  # noqa: F403
