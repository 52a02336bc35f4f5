"""Planned steps of tiny models are those of `step_digests.json`; `step_digests.py` checks and writes all programs."""

import pytest
import recorded
from golden_models import MODELS, served
from step_digests import FILE, planned
from thorough import except_for

RECORDED, IS_SAME = recorded.read(FILE)
# As others of these, or seconds: these run with --thorough.
LEFT_OUT = {"few pages", "head_dim", "learned positions", "own positions", "windowed", "encoder-decoder", "adapters"}
REMEDY = "python tests/unchanged/step_digests.py write, if these programs were to change"

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers


@pytest.mark.parametrize("name", except_for([name for name in MODELS if name not in LEFT_OUT], MODELS))
def test_planned_steps_are_unchanged(name, tmp_path):
    """With other versions or another processor than the recorded ones, those of another engine of the same model."""
    with served(name, tmp_path) as model:
        found = planned(model)
    if IS_SAME:
        assert found == RECORDED["planned"][name], REMEDY
        return
    with served(name, tmp_path) as model:
        assert found == planned(model)


def test_digests_are_of_what_a_program_computes():
    """Names make no difference, a number that it computes with does."""
    import jax
    from step_digests import digest

    def first(x):
        return {"a": x + 1}

    def second(y):
        return {"b": y + 1}

    def third(x):
        return {"a": x + 2}

    digests = [digest(jax.jit(each).lower(1.0).as_text()) for each in (first, second, third)]
    assert digests[0] == digests[1] != digests[2]
