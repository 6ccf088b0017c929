"""Weights and masks that correct the mismatch of two policies, and the diagnostics that measure it."""
