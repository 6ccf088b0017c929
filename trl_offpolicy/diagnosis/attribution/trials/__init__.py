"""Tests with the model: tables of what may be wrong, the search through them, and the share that each leaves."""
