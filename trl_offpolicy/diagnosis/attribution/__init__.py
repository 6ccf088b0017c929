"""Finds why engine and trainer differ, from features of the log-probs, declared settings, and tests with the model.

It needs numpy only, except :mod:`.hypotheses` and :mod:`.precision`, which need torch and a model.
``benchmarks/faults`` measures the accuracy for every cause, strength and level of observation.
"""
