"""The folder of a run: writing it while the run trains, and reading it afterwards."""
