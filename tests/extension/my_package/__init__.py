"""Parts of a method that are not in trl-offpolicy. docs/extending.md shows the files."""
