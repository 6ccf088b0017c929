"""Rollout engines: they sample, and their weights are kept in step with the trainer's."""
