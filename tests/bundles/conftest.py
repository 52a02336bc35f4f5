"""Bundles in environments of their own; collected only where the folder is named, since they are installed for it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "export"))
