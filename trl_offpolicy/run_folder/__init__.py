"""The folder of a run: what is written there while it trains, and how it is read afterwards."""
