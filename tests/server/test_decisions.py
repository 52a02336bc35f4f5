"""``/v1/systemone``: answers to typed questions, compared with transformers' own pipeline in eager PyTorch."""

import base64
import io
import json
import math
import re
import shutil
import string
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from running_server import serving
from scripted_server import scripted_server
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    JevConfig,
    JevForDecision,
    LlavaForConditionalGeneration,
)
from transformers.decision import DecisionConfig
from transformers.pipelines import DecisionPipeline

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions
from torchax_serve.server.decision_questions import questions_of

sys.path.insert(0, str(Path(__file__).parents[1] / "multimodal"))

import llava_folder

STATE = {"ticket": "My card was charged twice for one order.", "tags": ["money", "ärger"]}
QUESTIONS = {
    "team": {
        "type": "choice",
        "instructions": "Which team should handle this?",
        "criteria": {"billing": "payments and refunds", "shipping": None, "security": {"of": "access"}},
    },
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "money is moving"}},
    "plain": {"type": "noul"},
    "tone": {"type": "score", "instructions": ["How upset?"], "criteria": ["calm", "annoyed", "furious"]},
    "only": {"type": "choice", "criteria": {"this": None}},
    "most": {"type": "choice", "criteria": {f"option {letter}": None for letter in string.ascii_lowercase}},
}


@pytest.fixture(scope="module")
def expected():
    """transformers' answers, computed in float32 without a cache."""
    eager = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    pipeline = DecisionPipeline(model=eager, tokenizer=AutoTokenizer.from_pretrained(EMBEDDED))
    return lambda state, questions: pipeline({"state": state, "questions": questions})


def ask(http, **body):
    answer = http.post("/v1/systemone", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_close(found, expected):
    """Numbers within some last digits, everything else equal; fields that transformers has not may be there."""
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_close(found[name], value)
        elif isinstance(value, float):
            np.testing.assert_allclose(found[name], value, atol=1e-4)
        else:
            assert found[name] == value


@pytest.mark.parametrize("state", [STATE, "Once upon a time", ""])
def test_answers_are_those_of_transformers(http, expected, state):
    answer = ask(http, state=state, questions=QUESTIONS)
    assert list(answer["answers"]) == list(QUESTIONS)
    assert_close(answer["answers"], expected(state, QUESTIONS))
    assert answer["object"] == "structured_decision" and answer["model"] == "tiny"
    assert answer["usage"]["output_tokens"] == len(QUESTIONS)
    for name, found in answer["answers"].items():
        assert 0 <= found["confidence"] <= 1
        assert sum(found["probabilities"].values()) == pytest.approx(1)
        assert 0 < answer["diagnostics"][name]["label_mass"] <= 1 + 1e-6


def test_the_mass_of_labels_is_among_all_tokens(http, model):
    answer = ask(http, state="Hi", questions={"q": QUESTIONS["team"]})
    content = "Hi\n\n" + questions_of({"q": QUESTIONS["team"]})[0].text
    tokenizer = model.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    ids = torch.tensor([prompt["input_ids"] if hasattr(prompt, "keys") else prompt])
    eager = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.no_grad():
        row = eager(ids).logits[0, -1].softmax(-1)
    labels = [tokenizer.convert_tokens_to_ids(label) for label in "ABC"]
    assert answer["diagnostics"]["q"]["label_mass"] == pytest.approx(float(row[labels].sum()), rel=1e-3)
    assert answer["diagnostics"]["q"]["argmax_is_label"] == (int(row.argmax()) in labels)
    assert answer["usage"]["input_tokens"] == ids.shape[1]


def test_sampling_options_of_the_model_change_no_probability(http, expected, model, monkeypatch):
    config = model.generation_config
    for name, value in {"temperature": 0.3, "top_k": 2, "repetition_penalty": 1.5, "do_sample": True}.items():
        monkeypatch.setattr(config, name, value, raising=False)
    assert_close(ask(http, state=STATE, questions=QUESTIONS)["answers"], expected(STATE, QUESTIONS))


def test_an_instruction_stands_between_state_and_questions(http, expected):
    found = ask(http, state="Hi", instructions="Be strict.", questions={"q": QUESTIONS["tone"]})
    assert_close(found["answers"], expected("Hi\n\nBe strict.", {"q": QUESTIONS["tone"]}))
    assert found["answers"] != ask(http, state="Hi", questions={"q": QUESTIONS["tone"]})["answers"]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A server with room for a long state."""
    engine = EngineOptions(max_num_seqs=8, max_num_waiting=64, max_model_len=8192)
    folder = tmp_path_factory.mktemp("roomy")
    with (
        scripted_server(folder, model={"max_len": 8192}, engine=engine, served_model_names=("tiny",)) as server,
        httpx.Client(base_url=server.url, timeout=300) as found,
    ):
        yield found


def test_64_questions_cost_little_more_than_the_state(roomy):
    questions = {f"q{index}": {"type": "noul", "instructions": f"Is {index} in it?"} for index in range(64)}
    state = "The number of the day is said here, again and again. " * 300
    answer = ask(roomy, state=state, questions=questions, cache_salt="a")
    one = answer["usage"]["input_tokens"] / 64
    computed = answer["usage"]["input_tokens"] - answer["usage"]["input_tokens_details"]["cached_tokens"]
    assert one > 3000 and computed <= 1.3 * one, (one, computed)
    again = ask(roomy, state=state, questions=questions, cache_salt="a")
    assert again["answers"] == answer["answers"]
    cached = again["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached > 0.98 * again["usage"]["input_tokens"]


def test_requests_at_the_same_time_have_the_answers_of_each_alone(http):
    import concurrent.futures

    bodies = [{"state": f"State {index}", "questions": QUESTIONS} for index in range(6)]
    alone = [ask(http, **body)["answers"] for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda body: ask(http, **body)["answers"], bodies))
    for one, other in zip(together, alone, strict=True):
        assert_close(one, other)


def png(color):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), color).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


RED = png("red")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A client of a server with a model that takes images, and its folder; its tokenizer knows the labels."""
    folder = tmp_path_factory.mktemp("llava")
    llava_folder.make(folder)
    text = (folder / "tokenizer.json").read_text()
    for index, word in enumerate(["Yes", "No", "A", "B", "C"], 40):
        text = text.replace(f'"word{index}"', f'"{word}"')
    (folder / "tokenizer.json").write_text(text)
    with serving(folder) as found, httpx.Client(base_url=found[0].url, timeout=300) as http:
        yield http, folder


def test_images_stand_where_the_texts_name_them(seeing):
    http, folder = seeing
    eager = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    pipeline = DecisionPipeline(model=eager, tokenizer=processor.tokenizer, processor=processor)
    questions = {
        "one": {"type": "noul", "instructions": "What is img-1 ?"},
        "two": {"type": "choice", "criteria": {"this": "is img-10 this ?", "word5": None, "word6": "img-1 img-1"}},
        "none": {"type": "score", "criteria": ["word7", "word8"]},
    }
    images = [{"type": "image", "format": "png", "data_base64": png(color)} for color in ("red", "blue")]
    assets = {"img-1": images[0], "img-10": images[1]}
    found = {}
    for state in ({"seen": "word9 img-1 word10"}, "What"):
        request = {"state": state, "questions": questions, "assets": assets}
        found[str(state)] = ask(http, **request)["answers"]
        assert_close(found[str(state)], pipeline(request))
    swapped = {"img-1": assets["img-10"], "img-10": assets["img-1"]}
    other = ask(http, state="What", questions=questions, assets=swapped)["answers"]
    assert abs(other["one"]["noul"] - found["What"]["one"]["noul"]) > 1e-3
    assert_close(other["none"], found["What"]["none"])


HEAD_QUESTIONS = {name: QUESTIONS[name] for name in ("team", "urgent", "plain", "tone", "only")}
TEMPLATE = (
    "{{ state if state is string else state|tojson }}|{{ question.type }}|{{ question.instructions }}"
    "{% for option in question.options %}|{{ question.labels[loop.index0] }}={{ option }}{% endfor %}<|mark|> end"
)
OF_ALL = "{{ state|tojson }}{% for each in questions %}|{{ each.name }}:{{ each.options|join }}<|mark|>{% endfor %}"
SETTINGS = {
    "plain": DecisionConfig(),
    "template": DecisionConfig(
        labels={"noul": ["No", "Yes"], "score": ["C", "B", "A"]},
        temperature={"noul": 2.5, "choice": 0.5},
        chat_template=TEMPLATE,
        noul_options=["false", "true"],
    ),
    "one prompt": DecisionConfig(chat_template=OF_ALL),
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def heads(request, tmp_path_factory):
    """A client of a server with a decision head, and the answers of transformers."""
    folder = tmp_path_factory.mktemp("jev")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 50_000}
    torch.manual_seed(0)
    eager = JevForDecision(JevConfig(hidden_size=32, softcap=4.0, text_config=text | sizes)).eval()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    eager.decision_config = SETTINGS[request.param]
    eager.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pipeline = DecisionPipeline(model=eager, tokenizer=AutoTokenizer.from_pretrained(folder))
    with serving(folder) as found, httpx.Client(base_url=found[0].url, timeout=300) as http:
        yield http, lambda state, questions: pipeline({"state": state, "questions": questions})


@pytest.mark.parametrize("state", [STATE, "Hi <|mark|> there"])
def test_answers_of_a_head_are_those_of_transformers(heads, state):
    http, expected = heads
    found = ask(http, state=state, questions=HEAD_QUESTIONS)
    assert list(found["answers"]) == list(HEAD_QUESTIONS) and not found["diagnostics"]
    assert_close(found["answers"], expected(state, HEAD_QUESTIONS))
    assert found["usage"]["output_tokens"] == 0 < found["usage"]["input_tokens"]
    assert max(abs(each - 1 / 3) for each in found["answers"]["team"]["probabilities"].values()) > 0.01


def test_what_a_head_does_not_take_is_named(heads):
    http, _ = heads
    wrong = [
        ({"questions": {"q": QUESTIONS["most"]}}, "expected at most 16 options of a choice, got 26"),
        ({**noul(), "instructions": "Be brief."}, "instructions: expected none"),
        ({**noul(), "assets": {"Hi": {"data_base64": RED}}}, "assets: expected none"),
        ({**noul(), "state": "word " * 4000}, "maximum context length is 512"),
    ]
    for body, message in wrong:
        answer = http.post("/v1/systemone", json={"model": "tiny", "state": "Hi", **body})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 404 and "decide" in answer.json()["error"]["message"]


@pytest.fixture(params=["template", "one prompt"])
def labelled(request, tmp_path):
    """A folder of a chat model whose files say how questions are asked."""
    shutil.copytree(EMBEDDED, tmp_path / "model")
    SETTINGS[request.param].save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_files_of_a_chat_model_are_followed(labelled):
    eager = AutoModelForCausalLM.from_pretrained(labelled, dtype=torch.float32).eval()
    pipeline = DecisionPipeline(model=eager, tokenizer=AutoTokenizer.from_pretrained(labelled))
    for _ in range(2):  # a second start reads the files as well
        with serving(labelled) as found, httpx.Client(base_url=found[0].url, timeout=300) as http:
            answers = ask(http, state=STATE, questions=HEAD_QUESTIONS)["answers"]
        assert_close(answers, pipeline({"state": STATE, "questions": HEAD_QUESTIONS}))


def test_a_head_next_to_the_weights_is_not_left_out_in_silence(tmp_path):
    shutil.copytree(EMBEDDED, tmp_path / "model")
    (tmp_path / "model" / "decision_config.json").write_text("{}")
    with serving(tmp_path / "model") as found, httpx.Client(base_url=found[0].url, timeout=300) as http:
        answer = http.post("/v1/systemone", json={"state": "Hi", **noul()})
        assert answer.status_code >= 400 and "decision_config.json" in answer.json()["error"]["message"]


def noul(**fields):
    return {"questions": {"q": {"type": "noul", **fields}}}


WRONG = [
    ({"questions": {}}, "questions: expected 1 to 64, got 0"),
    ({"questions": {str(index): {"type": "noul"} for index in range(65)}}, "questions: expected 1 to 64, got 65"),
    ({"questions": {"": {"type": "noul"}}}, "questions: expected names of at least one character"),
    ({"questions": {"q": "Is it?"}}, "questions['q']: expected an object with type"),
    ({"questions": {"q": {"type": "essay"}}}, "questions['q'].type: expected 'choice', 'noul' or 'score'"),
    ({"questions": {"q": {}}}, "questions['q'].type: expected"),
    (noul(max_tokens=3), "questions['q']: expected type, instructions and criteria alone, got 'max_tokens'"),
    (noul(criteria={"maybe": "x"}), "questions['q'].criteria: expected null, or descriptions of true and false"),
    (noul(criteria=["yes", "no"]), "questions['q'].criteria: expected null, or descriptions of true and false"),
    (noul(instructions=3), "questions['q'].instructions: expected"),
    ({"questions": {"q": {"type": "choice"}}}, "questions['q'].criteria: expected 1 to 26 options"),
    ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions['q'].criteria: expected 1 to 26 options"),
    (
        {"questions": {"q": {"type": "choice", "criteria": {str(index): None for index in range(27)}}}},
        "questions['q'].criteria: expected 1 to 26 options with a description or null each, got options of 27",
    ),
    ({"questions": {"q": {"type": "choice", "criteria": ["a", "b"]}}}, "questions['q'].criteria: expected 1 to 26"),
    ({"questions": {"q": {"type": "score", "criteria": ["a"]}}}, "questions['q'].criteria: expected a list of 2 to 26"),
    ({"questions": {"q": {"type": "score", "criteria": {"a": "b"}}}}, "questions['q'].criteria: expected a list of 2"),
    ({**noul(), "state": 3}, "state: expected"),
    ({**noul(), "state": "word " * 4000}, "This model's maximum context length is 512"),
    ({**noul(), "state": "word " * 500000}, "This model's maximum context length is 512"),
    ({**noul(), "assets": {"img": {"data_base64": "eA=="}}}, "assets['img']: expected a name that stands in the state"),
    ({**noul(), "assets": {"": {"data_base64": "eA=="}}}, "assets['']: expected a name that stands in the state"),
    ({**noul(), "assets": {"Hi": {"data_base64": "?"}}}, "assets['Hi'].data_base64: expected base64"),
    ({**noul(), "assets": {"Hi": {"data_base64": "eA=="}}}, "assets['Hi']: expected"),
    ({**noul(), "assets": {"Hi": {"data_base64": RED}}}, "state: expected texts, got images"),
    ({**noul(), "assets": {str(index): {"data_base64": RED} for index in range(5)}}, "assets: expected at most 4"),
    ({**noul(), "assets": {"Hi": {"url": "http://localhost"}}}, "assets.Hi"),
    ({**noul(), "stream": True}, "unknown field 'stream'"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_what_is_no_request_is_named(http, body, message):
    answer = http.post("/v1/systemone", json={"model": "tiny", "state": "Hi", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and re.split(r"\W", error["param"])[0] in (*body, "state", "stream"), error


def test_names_of_any_kind_come_back(http):
    name = 'a "b"\n\u2028 \U0001f600 {{ x }}'
    found = ask(http, state="{% raise %} <end_of_turn>", questions={name: {"type": "choice", "criteria": {name: None}}})
    assert found["answers"][name]["choice"] == name
    half = json.dumps({"model": "tiny", "state": "Hi", "questions": {"\ud83d": {"type": "noul"}}})
    answer = http.post("/v1/systemone", content=half, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400), answer.text


def test_answers_that_begin_with_reasoning_are_refused_and_others_not(tmp_path):
    with scripted_server(tmp_path, model={"thinking_prompt": "<think>\n"}) as server:
        body = {"model": "scripted", "state": "Hi", **noul()}
        with httpx.Client(base_url=server.url, timeout=300) as http:
            answer = http.post("/v1/systemone", json=body | {"chat_template_kwargs": {"enable_thinking": True}})
            assert answer.status_code == 400 and "answers that begin with reasoning" in answer.text
            assert http.post("/v1/systemone", json=body).status_code == 200


def test_a_script_says_what_is_likeliest(tmp_path):
    script = {"": "C", " Yes or No only.": "No"}
    with scripted_server(tmp_path, script=script) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        found = http.post("/v1/systemone", json={"state": "Hi", "questions": QUESTIONS}).json()
    answers = found["answers"]
    assert answers["team"]["choice"] == "security" and answers["most"]["choice"] == "option c"
    assert answers["urgent"]["noul"] < 0.01 and math.isclose(answers["tone"]["score"], 2, abs_tol=0.01)
    assert found["diagnostics"]["team"]["argmax_is_label"] and found["diagnostics"]["team"]["label_mass"] > 0.9


def test_keys_have_prefixes_models_and_tokens_of_their_own(start_server):
    keys = {"one": "one-key-0123456789", "two": "two-key-0123456789 tokens_per_minute=60"}
    keys["other"] = "other-key-0123456789 models=another"
    running = start_server(api_keys=tuple(keys.items()))
    body = {"state": "It is a long day with much to do. " * 8, "questions": {"q": {"type": "noul"}}}

    def post(name):
        headers = {"Authorization": f"Bearer {keys[name].split()[0]}"}
        return httpx.post(f"{running.url}/v1/systemone", json=body, headers=headers, timeout=60)

    cached = [post(name).json()["usage"]["input_tokens_details"]["cached_tokens"] for name in ("one", "one", "two")]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert post("two").status_code == 429  # the prompt alone had more than a minute's tokens
    assert post("other").status_code == 404
    assert httpx.post(f"{running.url}/v1/systemone", json=body).status_code == 401
