"""Tunix's trainers; collected only where the folder is named.

google-tunix pins other releases of transformers and safetensors than this project runs with, so that it is installed
without its dependencies and in a folder of its own: ``pip install --no-deps --target .venv/tunix google-tunix
google-metrax clu jaxtyping wadler-lindig perfetto tensorboardX wrapt``, then ``PYTHONPATH=.venv/tunix pytest -n 0
tests/tunix``.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "training"))
