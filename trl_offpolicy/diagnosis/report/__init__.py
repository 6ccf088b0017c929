"""The pages and tables of a run folder."""
