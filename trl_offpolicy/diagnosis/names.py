"""Public path; the code is in :mod:`trl_offpolicy.run_folder.names`."""

from trl_offpolicy.run_folder.names import Name, frameworks, remarks, translate

__all__ = ["Name", "frameworks", "remarks", "translate"]
