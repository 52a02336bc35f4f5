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
