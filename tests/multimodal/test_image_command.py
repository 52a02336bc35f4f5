"""``run --image`` and ``/image``: the answer is that of `chat` about the same picture."""

import json

import llava_folder
import pytest
from PIL import Image
from typer.testing import CliRunner

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve import SamplingParams, serve
from torchax_serve.cli.chat.conversation import Conversation
from torchax_serve.cli.chat.repl import InteractiveChat
from torchax_serve.cli.main import app

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
PARAMS = SamplingParams(max_new_tokens=8, temperature=0)
QUESTION = "What is this ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llava")
    llava_folder.make(made)
    return made


@pytest.fixture(scope="module")
def model(folder):
    with serve(folder) as served:
        yield served


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (30, 20), "red").save(path)
    return path


@pytest.fixture(scope="module")
def answer(model, picture):
    parts = [{"type": "image", "image": str(picture)}, {"type": "text", "text": QUESTION}]
    made = model.chat([{"role": "user", "content": parts}], PARAMS)
    assert made
    return made


def reader(*lines):
    waiting = iter(lines)

    def read():
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    return read


def test_one_answer(folder, picture, answer, monkeypatch):
    # What the program does to the process it ends with, a test process must not keep.
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    options = ["--image", str(picture), "--greedy", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, ["run", str(folder), QUESTION, *options])
    assert (result.exit_code, result.stdout) == (0, answer + "\n")


def test_chat_has_the_image_in_later_turns(model, picture, answer, capsys, tmp_path):
    saved = tmp_path / "chat.json"
    conversation = Conversation(model, PARAMS)
    lines = ("/image", f"/image {picture}", QUESTION, "What ?", f"/save {saved}")
    InteractiveChat(conversation, reader(*lines), as_json=False).run()
    printed = capsys.readouterr()
    assert "red.png goes with your next message" in printed.err
    *before, last = json.loads(saved.read_text())
    assert before[0]["content"][0] == {"type": "image", "image": str(picture)}
    assert before[2]["content"] == "What ?"
    assert printed.out.splitlines() == [answer, last["content"]]
    assert last["content"] == model.chat(before, PARAMS) != answer


def test_reset_drops_the_image(model, picture):
    conversation = Conversation(model, PARAMS)
    conversation.attach(picture)
    conversation.reset()
    assert conversation.images == []


def test_images_that_cannot_be_read(model, picture, tmp_path):
    with pytest.raises(InvalidArgumentError, match="image: expected a file with a picture, and there is none at"):
        Conversation(model, PARAMS).attach(tmp_path / "none.png")
    with pytest.raises(InvalidArgumentError, match="an image needs a chat"):
        Conversation(model, PARAMS, raw=True).attach(picture)
    with serve() as blind, pytest.raises(UnsupportedModelError, match="expected a processor next to the weights"):
        Conversation(blind, PARAMS).attach(picture)
