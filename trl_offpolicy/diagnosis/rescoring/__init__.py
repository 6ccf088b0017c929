"""Scores recorded tokens again with the run's own model, so that ``doctor`` can test causes as ``probe`` does."""
