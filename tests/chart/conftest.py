"""The Helm chart; collected only where the folder is named.

``pip install helm-python-sdk kubernetes-validate``, then ``pytest -n 0 tests/chart``.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "docs"))
