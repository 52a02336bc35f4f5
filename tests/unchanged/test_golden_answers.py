"""Answers of tiny models are those of `golden_answers.json`; `golden_answers.py` writes them anew."""

import pytest
import recorded
from golden_answers import FILE, TOLERANCE, answers_of, embedded_answers
from golden_models import MODELS
from thorough import except_for

RECORDED, IS_SAME = recorded.read(FILE)
NAMES = [name for name, model in MODELS.items() if model.takes_text]
REMEDY = "python tests/unchanged/golden_answers.py write, if these answers were to change"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", except_for(["packed"], NAMES))
def test_answers_are_unchanged(name, tmp_path):
    """With other versions or another processor than the recorded ones, those of another engine of the same model."""
    found = answers_of(name, tmp_path)
    wanted = RECORDED["answers"][name] if IS_SAME else answers_of(name, tmp_path)
    places = list(recorded.differences(wanted, found, TOLERANCE))
    assert not places, (places, REMEDY)


@pytest.mark.thorough
def test_answers_of_both_starts_are_unchanged(tmp_path):
    found = embedded_answers(tmp_path / "embedded")
    wanted = RECORDED["answers"] if IS_SAME else embedded_answers(tmp_path / "again")
    places = list(recorded.differences({start: wanted[start] for start in found}, found, TOLERANCE))
    assert not places, (places, REMEDY)
