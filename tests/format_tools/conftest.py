"""Checkpoints of and for the formats' own tools; collected only where the folder is named.

These libraries are large, and transformers takes other paths where it finds them installed: ``pip install --no-deps
--target .venv/format-tools bitsandbytes torchao hqq einops termcolor autoawq auto-gptq``, then
``PYTHONPATH=.venv/format-tools pytest -n 0 tests/format_tools``. The files of FBGEMM, GPTQModel and vLLM say what they
need, each in a folder of its own.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "loading" / "formats"))


def pytest_ignore_collect(config):
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True
