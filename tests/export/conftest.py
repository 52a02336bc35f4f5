"""A bundle of the embedded model, made once for all tests of the folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from exported import ENGINE, eager_tokens

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import serve

pytest.importorskip("flatbuffers", reason="jax.export writes programs with it; the extra export brings it")


@pytest.fixture(scope="session")
def served():
    """The embedded model with the engine of the bundle."""
    with serve(EMBEDDED, dtype="float32", engine=ENGINE, pack_weights=False) as model:
        yield model


@pytest.fixture(scope="session")
def bundle(served, tmp_path_factory):
    """The bundle, which no test changes."""
    out = tmp_path_factory.mktemp("bundles") / "embedded"
    assert served.export(out) == out / "1"
    return out


@pytest.fixture(scope="session")
def expected():
    """Eager transformers' tokens."""
    return eager_tokens(EMBEDDED)
