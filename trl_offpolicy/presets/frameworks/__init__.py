"""Other frameworks' options as presets: their names and defaults are read, and their bugs are named."""

NAMES = ("areal", "ms-swift", "nemo-rl", "openrlhf", "prime-rl", "skyrl", "slime", "trl", "verl")
"""Frameworks whose own option names are understood."""
