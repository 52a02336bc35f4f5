"""The programs of tiny models are those of `step_digests.json`; `step_digests.py` writes them anew."""

import pytest
import recorded
from golden_models import MODELS, served
from step_digests import FILE, planned, programs
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


@pytest.mark.thorough
@pytest.mark.own_programs
@pytest.mark.parametrize("name", MODELS)
def test_programs_are_unchanged(name, tmp_path):
    """What models share, as sampling, is compiled once a process: those that are compiled are the recorded ones."""
    takes_text = MODELS[name].takes_text
    with served(name, tmp_path) as model:
        found = programs(model, takes_text=takes_text)
    wanted = RECORDED["programs"][name]
    if not IS_SAME:
        wanted = found
        with served(name, tmp_path) as model:
            found = programs(model, takes_text=takes_text)
    assert found
    others = {program: sorted(set(digests) - set(wanted.get(program, ()))) for program, digests in found.items()}
    assert not any(others.values()), (others, REMEDY)


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
