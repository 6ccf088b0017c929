"""``my_package`` stands for a package of the user's own; it is found by its name, as one that is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
