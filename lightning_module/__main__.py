"""The command line: ``python -m lightning_module fit --config recipes/lightning/quickstart.yaml``."""

from lightning_module.cli import main

if __name__ == "__main__":
    main()
