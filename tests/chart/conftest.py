"""The Helm chart; collected only where the folder is named.

``pip install helm-python-sdk kubernetes-validate``, then ``pytest -n 0 tests/chart``.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "docs"))


def pytest_ignore_collect(config):
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True
