"""Sampling ahead of learning: batches are in flight while the trainer learns from older ones. The lag is bounded."""
