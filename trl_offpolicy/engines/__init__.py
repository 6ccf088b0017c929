"""Rollout engines: what samples, and how its weights are kept in step with the trainer's."""
