"""Weights and keep terms: the parts of a correction, as small frozen dataclasses.

A weight maps a ratio to a factor of the policy loss; a keep term says which tokens leave it. Both only hold their
settings and check them; :class:`~trl_offpolicy.Correction` runs them on a batch.
"""

from trl_offpolicy.correction.terms import batchwide, keep, weights
from trl_offpolicy.correction.terms.base import KeepTerm, TermInputs, Violations, Weighed, Weight
from trl_offpolicy.correction.terms.batchwide import *  # noqa: F403
from trl_offpolicy.correction.terms.keep import *  # noqa: F403
from trl_offpolicy.correction.terms.weights import *  # noqa: F403

__all__ = ["KeepTerm", "TermInputs", "Violations", "Weighed", "Weight"]
__all__ += batchwide.__all__
__all__ += keep.__all__
__all__ += weights.__all__
