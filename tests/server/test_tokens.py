"""``/tokenize``, ``/detokenize``, the rendered prompt of a chat, and what usage counts."""

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def test_texts_to_tokens_and_back(http, model):
    text = "Once upon a time, zażółć 🦊"
    found = http.post("/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == model.tokenizer(text)["input_ids"]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert found["token_strs"] == model.tokenizer.convert_ids_to_tokens(found["tokens"])
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": plain}).json()["prompt"] == text
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400


def test_the_rendered_prompt_is_what_the_chat_counts(http, client, model):
    rendered = http.post("/v1/chat/completions/render", json={"model": "tiny", "messages": QUESTION}).json()
    tokens = http.post("/tokenize", json={"messages": QUESTION}).json()
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, extra_body={"return_token_ids": True})
    assert rendered["prompt_token_ids"] == tokens["tokens"] == answer.prompt_token_ids
    assert rendered["prompt"] == model.tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert answer.usage.prompt_tokens == tokens["count"]


def test_long_texts_are_answered_in_pieces(http, model):
    """A list of more tokens than are encoded at once, and a text beyond the limit."""
    text = "Once upon a time. " * 20_000
    expected = model.tokenizer(text)["input_ids"]
    assert len(expected) > 2 * 16384
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == expected and found["count"] == len(expected) == len(found["token_strs"])
    for route, body, param in (
        ("/tokenize", {"prompt": "ą" * (1 << 19) + "a"}, "prompt"),
        ("/detokenize", {"tokens": [1] * ((1 << 18) + 1)}, "tokens"),
    ):
        answer = http.post(route, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_long_prompt_is_refused_by_the_tokens_of_its_pieces(http, monkeypatch, server):
    """Characters alone do not show it: a token of this tokenizer may be long."""
    service = server.context.service()
    monkeypatch.setattr(service.token_bytes, "max_token_chars", 1 << 20)
    for route, body in (
        ("/v1/completions", {"prompt": "a b " * (1 << 19)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * (1 << 19)}]}),
    ):
        answer = http.post(route, json={"model": "tiny", **body})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert "512 tokens, and the prompt has more" in answer.json()["error"]["message"]


def test_a_body_of_too_many_values_is_refused_and_commas_of_a_text_are_none(http):
    most = 1 << 20
    for body in ('{"tokens": [' + "1," * (most + 1) + "1]}", '{"tokens": ["' + '\\\\","' * (most + 1) + '"]}'):
        answer = http.post("/detokenize", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", answer.text
    escaped = {"prompt": '\\",' * 300_000 + "," * 900_000, "n": 1}
    answer = http.post("/tokenize", json=escaped)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"  # it was parsed
    wrong = http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * 100_000 + ["x"] * 100_000})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"].startswith("prompt")
    many = {str(index): 1 for index in range(70_000)}
    wrong = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "logit_bias": many})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "logit_bias"
