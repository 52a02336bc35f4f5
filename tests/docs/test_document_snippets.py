"""Every Python snippet of the documents runs as it stands, on the embedded model and without a network.

Those of the README always run, the others by `pytest --thorough`.
"""

import inspect

import pytest
from documents import ROOT, blocks
from thorough import except_for

import torchax_serve
from model_adapters.loading.model_source import EMBEDDED
from model_adapters.loading.short_names import short_name
from torchax_serve.entrypoints.serve import serve

# Names of the hub, and what stands for them here.
INSTEAD = {"README.md:1": ('"google/gemma-3-1b-it"', repr(str(EMBEDDED)))}
# Snippets that only load models of the hub and of folders that nobody has: the calls are checked, nothing is loaded.
CALLS_ONLY = {"docs/loading.md:0": 5}

# torchax asks JAX for the 64-bit integers that torch code names; JAX says that it makes 32-bit ones of them.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

SNIPPETS = {block.name: block.text for block in blocks("python")}


def test_the_exceptions_are_snippets():
    assert set(INSTEAD) | set(CALLS_ONLY) <= set(SNIPPETS)


RUN = [name for name in SNIPPETS if name not in CALLS_ONLY]


@pytest.mark.parametrize("name", except_for([name for name in RUN if name.startswith("README.md")], RUN))
def test_snippet_runs(name, capsys):
    text = SNIPPETS[name]
    if name in INSTEAD:
        assert text.count(INSTEAD[name][0]) == 1
        text = text.replace(*INSTEAD[name])
    names = {}
    exec(compile(text, name, "exec"), names)
    if "print(" in text:
        assert capsys.readouterr().out.strip()
    if "answers" in names:
        assert [len(answer.token_ids) for answer in names["answers"]] and all(a.text for a in names["answers"])


@pytest.mark.parametrize("name", CALLS_ONLY)
def test_snippet_calls_existing_names(name, monkeypatch):
    calls = []

    def checked(*args, **kwargs):
        inspect.signature(serve).bind(*args, **kwargs)
        calls.append(args[0] if args else None)

    monkeypatch.setattr(torchax_serve, "serve", checked, raising=False)
    exec(compile(SNIPPETS[name], name, "exec"), {})
    assert len(calls) == CALLS_ONLY[name]
    for model in calls:
        is_path = model is not None and model.startswith("./")
        assert model is None or is_path or short_name(model) or model.count("/") == 1
        assert not is_path or not (ROOT / model).exists(), "exists: run the snippet instead"
