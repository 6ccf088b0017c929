"""The trainer for TRL. Everything that imports trl is in this folder."""
