"""Why engine and trainer differ: features of the log-probs, what both sides declare, and tests with the model.

numpy only; :mod:`.hypotheses` and :mod:`.precision` need torch and a model. The accuracy for every
cause, strength and level of observation is measured by ``benchmarks/faults``.
"""
