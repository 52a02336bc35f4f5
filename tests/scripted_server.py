"""A server of a model that says the lines of a script, for the tests of interfaces."""

import contextlib

from running_server import serving
from scripted_model import call, write_scripted_model

SCRIPT = {
    "": "I have no line for this.",
    " does note.txt say?": "Let me look.\n" + call("Read", file_path="/tmp/note.txt"),
    " world of notes": "It says: hello, world of notes.",
    " think first": "<think>Two and two are four.</think>\n\nFour.",
    " think and read": "<think>I need the file.</think>\n\n" + call("Read", file_path="/tmp/a b.txt"),
    " read both": call("Read", file_path="/tmp/one.txt") + "\n" + call("Glob", pattern="*.py", deep=True),
    " was not found": "There is no such file.",
    " be polite": "One STOP Two.",
    " run code": call("python", input="print('a')\n"),
}
QUESTIONS = [f"Please{key}" for key in SCRIPT if key] + ["Anything else"]


@contextlib.contextmanager
def scripted_server(folder, *, script=SCRIPT, engine=None, model=(), **options):
    """A running server under the name ``scripted``; `model` has options of `write_scripted_model`."""
    path = write_scripted_model(folder, script, **{"max_len": 2048, **dict(model)})
    with serving(path, engine=engine, **{"served_model_names": ("scripted",), "keep_alive_s": 0.05, **options}) as (
        server,
        _,
    ):
        yield server


__all__ = ["QUESTIONS", "SCRIPT", "call", "scripted_server"]
