"""Sections of verl's configuration."""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
