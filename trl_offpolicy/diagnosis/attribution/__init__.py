"""Finds why engine and trainer differ, from features of the log-probs, declared settings, and tests with the model.

- :mod:`.attribute` gives the answer for a batch, :mod:`.recorded` that for the rollouts of a run.
- :mod:`.traces` is what log-probs alone show (numpy only).
- :mod:`.trials` are tests with the model, by the list of :mod:`.hypotheses`; they run it in :mod:`.contexts`.

``benchmarks/faults`` measures the accuracy for every cause, strength and level of observation.
"""
