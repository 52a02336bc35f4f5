"""``run`` in one process with a model that says its prompt back: what goes where, and what is refused."""

import json
import re
import sys

import pytest
from fake_model import TEMPLATE, FakeModel, replace_loading
from typer.testing import CliRunner

from model_adapters.errors import ModelNotFoundError
from torchax_serve.cli.chat import conversation
from torchax_serve.cli.main import app

PROMPT_BACK = "u(Hi there)a("


def replaced_loading(monkeypatch, serve):
    modules = {}
    replace_loading(modules, serve)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def call(monkeypatch):
    """Runs the program; ``call.model`` is the model it loads, ``call.served`` how it was asked for."""

    def run(*arguments, **kwargs):
        return CliRunner().invoke(app, ["run", *arguments], **kwargs)

    def serve(name, **options):
        run.served = (name, options)
        if name == "no/where":
            raise ModelNotFoundError("no model\nis called nowhere")
        return run.model

    replaced_loading(monkeypatch, serve)
    # What the program does to the process it ends with, a test process must not keep.
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    run.model = FakeModel()
    run.served = None
    return run


@pytest.mark.parametrize(
    ("arguments", "stdin", "name"),
    [
        (["Hi there"], None, None),
        (["-p", "Hi there"], None, None),
        (["some/model", "Hi there"], None, "some/model"),
        (["some/model", "--prompt", "Hi there"], None, "some/model"),
        ([], "Hi there\n", None),
        (["-"], "Hi there\n", None),
        (["some/model"], "Hi there\n", "some/model"),
        (["some/model", "-"], "Hi there", "some/model"),
    ],
)
def test_ways_to_give_a_prompt(call, arguments, stdin, name):
    result = call(*arguments, input=stdin)
    assert (result.exit_code, result.stdout) == (0, PROMPT_BACK + "\n")
    assert call.served[0] == name
    assert call.model.closed


def test_run_has_one_slot(call):
    assert call("Hi there").exit_code == 0
    assert call.served[1]["engine"].max_num_seqs == 1


def test_a_prompt_before_stdin(call):
    assert call("some/model", "-", "-p", "Sum this up:", input="a\nb\n").stdout == "u(Sum this up:\n\na\nb)a(\n"


def test_a_folder_with_a_space_is_a_model(call, tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    assert call(str(folder), input="Hi there").stdout == PROMPT_BACK + "\n"
    assert call.served[0] == str(folder)


def test_stats_line(call):
    result = call("Hi there")
    assert re.match(r"13 prompt \+ 14 new tokens · first token \d+\.\d\d s", result.stderr)
    assert result.stderr.endswith(" tokens/s\n")
    assert "cut at the length limit (--max-new-tokens)" in call("Hi there", "--max-new-tokens", "3").stderr


def test_json(call):
    answer = json.loads(call("Hi there", "--json", "--stop", "re)").stdout)
    assert answer["text"] == "u(Hi the"
    assert call.model.tokenizer.decode(answer["token_ids"]) == "u(Hi there)"
    assert answer["model"] == "fake"
    assert answer["stats"]["prompt_tokens"] == 13
    assert answer["stats"]["finish_reason"] == "stop"


def test_system_and_raw(call):
    assert call("Hi there", "--system", "Be kind").stdout == "s(Be kind)u(Hi there)a(\n"
    assert call("Hi there", "--raw").stdout == "Hi there\n"
    result = call("Hi there", "--raw", "--system", "Be kind")
    assert result.exit_code == 2
    assert "--system: expected without --raw, as a system prompt needs a chat" in result.stderr


def test_a_model_without_template_continues_text(call):
    call.model = FakeModel(chat_template=None)
    result = call("Hi there")
    assert result.stdout == "Hi there\n"
    assert result.stderr.startswith("fake has no chat template: it continues your text")


def test_decoding_options_arrive(call):
    flags = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.5 --seed 11"
    flags += " --max-new-tokens 20 --min-new-tokens 2 --no-repeat-ngram-size 3"
    assert call("Hi there", *flags.split()).exit_code == 0
    config, seed = call.model.requests[-1]
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.5, 7, 0.9)
    assert (config.min_p, config.repetition_penalty, config.no_repeat_ngram_size) == (0.1, 1.5, 3)
    assert (config.max_new_tokens, config.min_new_tokens, seed) == (20, 2, 11)
    call.model.request_defaults.do_sample = True
    call("Hi there", "--greedy")
    assert call.model.requests[-1][0].do_sample is False


def test_loading_options_arrive(call):
    flags = "--revision main --dtype bfloat16 --token secret --offline --trust-remote-code --allow-pickle"
    flags += " --strict --tensor-parallel 2"
    call("some/model", "Hi there", *flags.split(), "--cache-dir", "/somewhere")
    options = call.served[1]
    del options["progress"], options["engine"]
    assert options == {
        "revision": "main",
        "dtype": "bfloat16",
        "token": "secret",
        "local_files_only": True,
        "trust_remote_code": True,
        "allow_pickle": True,
        "strict": True,
        "cache_dir": "/somewhere",
        "tensor_parallel": 2,
        "mesh": None,
        "hosts": None,
        "quantization": None,
        "requantize": False,
        "pack_weights": True,
    }
    call("Hi there", "--mesh", "model=2,expert=4")
    assert call.served[1]["mesh"] == {"data": 1, "model": 2, "expert": 4}
    call("Hi there", env={"HF_TOKEN": "from the environment"})
    assert call.served[1]["token"] == "from the environment"
    assert call.served[1]["local_files_only"] is None


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["-p", ""], None, "the prompt is empty"),
        (["some/model", "  "], None, "the prompt is empty"),
        (["some/model"], "", "the prompt is empty"),
        (["some/model", "Hi", "-p", "Ho"], None, "two prompts, 'Hi' and --prompt 'Ho'"),
        (["Hi there", "--temperature", "-1"], None, "--temperature: expected a number > 0, got -1.0; for greedy"),
        (["Hi there", "--greedy", "--top-k", "4"], None, "--greedy: expected without --top-k"),
        (["Hi there", "--max-new-tokens", "0"], None, "--max-new-tokens: expected a whole number >= 1"),
        (
            ["Hi there", "--min-new-tokens", "9", "--max-tokens", "3"],
            None,
            "--min-new-tokens: expected at most --max-new",
        ),
        (["Hi there", "--tp", "2", "--mesh", "model=2"], None, "--mesh and --tensor-parallel: expected one of them"),
        (["Hi there", "--mesh", "pipe=2"], None, "--mesh: expected axes out of data, model, expert, got 'pipe'"),
        (
            ["Hi there", "--image", "no.png"],
            None,
            "--image: expected a file with a picture, and there is none at no.png",
        ),
        (["some/model", "Hi", "--dtype", "bf16"], None, "'bf16'; did you mean bfloat16?"),
        (["some/model"], b"\xff\xfe", "expected UTF-8 text, got byte 0xff at 0"),
        (["nowhere"], "", "no model is called 'nowhere'"),
        (["nowhere", "Hi"], None, "no model is called 'nowhere'"),
        (["no/where", "Hi"], None, "no model is called nowhere"),
        (["-p", "long " * 1000], None, "at most 4096 tokens"),
    ],
)
def test_errors_are_one_line_and_status_2(call, arguments, stdin, message):
    result = call(*arguments, input=stdin)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_unknown_model_error_suggests_a_prompt(call):
    assert 'give the prompt as -p "nowhere"' in call("nowhere", input="").stderr


def test_debug_shows_the_traceback(call):
    result = call("no/where", "Hi", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: no model is called nowhere" in result.stderr


def test_internal_error_is_reported_as_such(call):
    call.model.submit_prompt = None
    result = call("Hi there")
    assert result.exit_code == 70
    assert (
        result.stderr
        == "error: TypeError inside the program: 'NoneType' object is not callable (--debug shows where)\n"
    )


def test_interrupted_while_loading(call, monkeypatch):
    def interrupted(name, **options):
        raise KeyboardInterrupt

    replaced_loading(monkeypatch, interrupted)
    result = call("Hi there")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_history_makes_room_for_the_answer():
    model = FakeModel(TEMPLATE, max_position_embeddings=100)
    chat = conversation.Conversation(model, params=conversation.SamplingParams())
    for index in range(4):
        chat.record(f"question {index}", f"answer {index}")
    assert chat.make_room("now") == 4  # 4 * 24 characters, "u(now)a(" and 25 positions of room: two pairs fit
    assert [message["content"] for message in chat.messages] == ["question 2", "answer 2", "question 3", "answer 3"]
    assert chat.make_room("now") == 0
    assert "".join(chat.answer("now")).startswith("u(question 2)a(answer 2)")
