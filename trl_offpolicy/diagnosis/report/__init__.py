"""Writes the report page, the summary table and the model card of a run folder."""
