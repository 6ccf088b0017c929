"""Weights and masks against the mismatch of two policies, and what is measured of it."""
