"""Sampling ahead of learning: batches in flight while the trainer learns from older ones, their lag bounded."""
