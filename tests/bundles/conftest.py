"""Bundles in environments of their own; collected only where the folder is named, since they are installed for it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "export"))


def pytest_ignore_collect(config):
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True
