"""Files of requests in OpenAI's batch format: answers are those of the engine, and every line has one."""

import io
import json
import random

import pytest
from running_server import ENGINE
from typer.testing import CliRunner

from model_adapters.errors import RequestError
from torchax_serve import SamplingParams, serve
from torchax_serve.cli.main import app
from torchax_serve.server.batch.lines import encoded, read_lines
from torchax_serve.server.batch.results import BatchResults, open_results
from torchax_serve.server.batch.run import run_batch
from torchax_serve.server.options import ConnectionLimits, ServerOptions

OPTIONS = ServerOptions(served_model_names=("tiny",), access_log=False)
QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def request(name, url="/v1/completions", /, **body):
    line = {"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", **body}}
    return json.dumps(line).encode() + b"\n"


def answered(model, *lines, options=OPTIONS, **further):
    """Lines of the output and counts of a batch."""
    output = io.BytesIO()
    counts = run_batch(model, io.BytesIO(b"".join(lines)), BatchResults(output), options, **further)
    return [json.loads(line) for line in output.getvalue().splitlines()], counts


def bodies(lines):
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines), lines
    assert len({line["id"] for line in lines}) == len({line["response"]["request_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"]["body"] for line in lines}


@pytest.fixture
def program(monkeypatch, model):
    """The command, with the model of all tests."""
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    monkeypatch.setattr("torchax_serve.entrypoints.serve.serve_without_pipelines", lambda name, **options: model)
    monkeypatch.setattr(type(model), "close", lambda self: None)
    return lambda *arguments, **further: CliRunner().invoke(app, ["batch", *map(str, arguments)], **further)


def test_answers_are_those_of_the_engine(model):
    draw = random.Random(3)
    prompts = [[draw.randrange(10, 700) for _ in range(draw.randrange(1, 40))] for _ in range(40)]
    lines = [
        request(f"{index}", prompt=prompt, max_tokens=5, temperature=0.8, seed=index, return_token_ids=True)
        for index, prompt in enumerate(prompts)
    ]
    lines.append(request("chat", "/v1/chat/completions", messages=QUESTION, max_tokens=8, temperature=0))
    lines.append(request("tokens", "/tokenize", prompt="Once upon a time"))
    found, counts = answered(model, *lines)
    found = bodies(found)
    assert len(found) == counts.num_answered == counts.num_done == 42
    for index, prompt in enumerate(prompts):
        (expected,) = model.generate_batch([prompt], SamplingParams(max_new_tokens=5, temperature=0.8, seed=index))
        assert found[f"{index}"]["choices"][0]["token_ids"] == list(expected.token_ids)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    assert found["chat"]["choices"][0]["message"]["content"] == model.chat(QUESTION, params)
    assert found["tokens"]["tokens"] == model.tokenizer("Once upon a time")["input_ids"]
    assert counts.num_prompt_tokens == sum(body["usage"]["prompt_tokens"] for body in found.values() if "usage" in body)
    assert counts.num_new_tokens == sum(
        body["usage"]["completion_tokens"] for body in found.values() if "usage" in body
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no json\n", "expected a JSON object on a line of its own, got something else at column 1"),
        (b"\xff\n", "got a byte that is not at place 0"),
        (b"[1]\n", "expected a JSON object with custom_id, method, url, body, got [1]"),
        (b"[" * 5000 + b"\n", "levels, got more"),
        (b'{"custom_id": 1}\n', "custom_id: expected a text of 1 to 512 characters, got 1"),
        (b'{"custom_id": "b", "method": "GET"}\n', "method: expected 'POST', got 'GET'"),
        (request("b", "/v1/load_lora_adapter"), "url: expected one of /v1/chat/completions,"),
        (request("b", prompt="x", stream=True), "body.stream: expected false, got true"),
        (b'{"custom_id": "b", "method": "POST", "url": "/tokenize"}\n', "body: expected a JSON object, got none"),
        (b'{"custom_id": "b", "metadata": {}}\n', "body, got also 'metadata'; leave it out"),
        (request("a", prompt="x"), "custom_id: expected one of its own, got that of line 1; rename it"),
        (request("b", prompt="x" * 9000), "expected at most 5096 bytes, got more; shorten the request"),
    ],
)
def test_a_line_that_is_no_request_is_an_error_of_its_own(model, line, message):
    good = [request(name, "/tokenize", prompt="x") for name in "ac"]
    small = ServerOptions(served_model_names=("tiny",), connection=ConnectionLimits(max_body_bytes=1000))
    found, counts = answered(model, good[0], b"\n", line, good[1], options=small)
    assert (counts.num_answered, counts.num_failed) == (2, 1)
    (wrong,) = (each for each in found if each["error"])
    assert wrong["error"]["message"].startswith("line 3: ") and message in wrong["error"]["message"]
    assert wrong["error"]["line"] == 3 and wrong["response"] is None
    assert set(bodies([each for each in found if each is not wrong])) == {"a", "c"}


def test_errors_of_the_server_are_answers_with_its_body(model, http):
    body = {"model": "tiny", "prompt": "x", "temperature": -1}
    (line,), counts = answered(model, request("a", **body))
    expected = http.post("/v1/completions", json=body)
    assert line["response"]["status_code"] == expected.status_code == 400
    assert line["response"]["body"] == expected.json()
    assert counts.num_failed == 1


def test_a_full_queue_is_waited_for(model):
    """Answers of 30 requests are more than run and wait together; those of one request alone are an error."""
    lines = [request(f"{index}", prompt="x", n=9, max_tokens=2, temperature=1) for index in range(30)]
    found, _ = answered(model, *lines, request("most", prompt="x", n=100, max_tokens=2), max_in_flight=31)
    (most,) = (each for each in found if each["custom_id"] == "most")
    assert most["response"]["status_code"] == 429
    found.remove(most)
    assert all(len(body["choices"]) == 9 for body in bodies(found).values()) and len(found) == 30


def test_an_engine_that_has_ended_ends_the_run():
    with serve(engine=ENGINE) as ended:
        ended.engine.close("as if its thread had failed")
        with pytest.raises(RequestError, match="this one has ended; --resume goes on"):
            answered(ended, request("a", prompt="x"), request("b", prompt="x"))


def test_a_run_that_was_killed_goes_on(program, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(request(name, "/tokenize", prompt=name) for name in "abcd"))
    done = program(source, target, "--served-model-name", "tiny")
    assert done.exit_code == 0 and not done.stdout
    assert "4 requests answered, 0 failed" in done.stderr
    written = {json.loads(line)["custom_id"]: line for line in target.read_bytes().splitlines(keepends=True)}
    failed = written["b"].replace(b'"status_code":200', b'"status_code":500')
    target.write_bytes(written["a"] + failed + written["c"] + written["d"][:40])
    again = program(source, target, "--served-model-name", "tiny", "--resume")
    assert "2 requests answered, 0 failed, 2 answered before" in again.stderr
    lines = target.read_bytes().splitlines(keepends=True)
    assert lines[:2] == [written["a"], written["c"]]
    found = bodies([json.loads(line) for line in lines])
    assert {name: body["tokens"] for name, body in found.items()} == {
        name: json.loads(line)["response"]["body"]["tokens"] for name, line in written.items()
    }
    assert set(tmp_path.iterdir()) == {source, target}


def test_pipes_and_the_exit_status_of_a_failed_request(program):
    lines = request("a", "/tokenize", prompt="x") + request("b", "/classify", input="x")
    done = program("-", "-", "--served-model-name", "tiny", input=lines)
    assert done.exit_code == 1
    found = {line["custom_id"]: line["response"]["status_code"] for line in map(json.loads, done.stdout.splitlines())}
    assert found == {"a": 200, "b": 404}
    assert "1 requests answered, 1 failed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "out"], "INPUT: expected a file of requests, and there is none at missing"),
        (["empty", "out"], "INPUT: expected at least one request, got the empty file empty"),
        (["blank", "out"], "INPUT: expected at least one request, got none in blank"),
        (["folder", "out"], "INPUT: expected a file that can be read, got folder (Is a directory)"),
        (["full", "full"], "OUTPUT: expected another file than INPUT, got full for both"),
        (["full", "no/out"], "OUTPUT: expected a file in a folder that is there, got no/out"),
        (["full", "old"], "OUTPUT: expected no file or an empty one, got old; --resume goes on with it"),
        (["full", "old", "--resume"], "OUTPUT: expected the lines of an earlier run, got another in line 1 of old"),
        (["full", "-", "--resume"], "--resume: expected a file as OUTPUT, got standard output"),
        (["full", "out", "--resume", "--overwrite"], "--resume and --overwrite: expected one of them, got both"),
    ],
)
def test_files_that_cannot_be_those_of_a_batch(program, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    files = {"empty": b"", "blank": b"\n \n", "full": request("a", "/tokenize", prompt="x"), "old": b'{"a": 1}\n'}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = program(*arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("error: ") and message in line
    assert (tmp_path / "old").read_bytes() == files["old"]


def test_lines_without_an_end_and_beyond_the_limit():
    content = b"a" * 11 + b"\n" + b"b" * 10 + b"\n\n" + b"c" * 31
    assert list(read_lines(io.BytesIO(content), 10)) == [(1, None), (2, b"b" * 10 + b"\n"), (4, None)]


def test_half_of_a_surrogate_pair_stays_an_escape(tmp_path):
    line = {"id": "x", "custom_id": "\ud800", "response": None, "error": None}
    assert json.loads(encoded(line)) == line
    path = tmp_path / "out"
    path.write_bytes(encoded(line))
    with open_results(path, resume=True, overwrite=False) as results:
        assert not results.answered
