"""Former path; the code is in :mod:`trl_offpolicy.functional._fast`."""

from trl_offpolicy.functional._fast import *  # noqa: F403
