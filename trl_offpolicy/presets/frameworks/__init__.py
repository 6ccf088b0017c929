"""Other frameworks' options as presets: their names and defaults are read, and their bugs are named."""
