"""Real models beside eager PyTorch; collected only where the folder is named, since they have to be fetched.

``python tests/real/fetch.py`` fetches them (extra ``real``), ``pytest -n 0 tests/real`` compares and prints a table,
and ``--write-results`` keeps it for docs/models.md.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from fetch import MODELS, folder_of

from parity_sweep import real_models
from parity_sweep.page_section import table_lines
from torchax_serve import serve

FINDINGS = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--write-results", action="store_true", help="keep the table of real models for docs/models.md")


def pytest_configure(config):
    config.stash[FINDINGS] = {}


def pytest_terminal_summary(terminalreporter, config):
    findings = config.stash[FINDINGS]
    if findings:
        terminalreporter.section("real models")
        terminalreporter.write_line("\n".join(table_lines(real_models.HEADINGS, real_models.rows(findings))))
    if config.getoption("--write-results") and findings:
        real_models.write(findings)


@pytest.fixture(scope="session")
def found(pytestconfig):
    """Notes what a check of a model found: a line of the table."""

    def note(model, check, result):
        pytestconfig.stash[FINDINGS].setdefault(MODELS[model].title, {})[check] = result

    return note


@pytest.fixture(scope="session")
def folder():
    """The folder of a model, by name."""
    return folder_of


class Eager:
    """A model in eager PyTorch, in float32, and its tokenizer."""

    def __init__(self, name, auto=transformers.AutoModelForCausalLM, dtype=torch.float32):
        self.model = auto.from_pretrained(folder_of(name), dtype=dtype).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder_of(name))

    def new_tokens(self, prompt_ids, num_tokens, **options):
        """The tokens that transformers' greedy ``generate`` appends to one prompt."""
        ids = torch.tensor([prompt_ids])
        options = {"do_sample": False, "max_new_tokens": num_tokens, "attention_mask": torch.ones_like(ids)} | options
        return self.model.generate(ids, **options)[0, len(prompt_ids) :].tolist()


@pytest.fixture(scope="session")
def smollm2():
    return Eager("smollm2")


@pytest.fixture(scope="session")
def served():
    """SmolLM2 in float32."""
    with serve(folder_of("smollm2"), dtype="float32") as model:
        yield model
