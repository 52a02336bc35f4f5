"""Signs up as the first user of an Open WebUI in front of the server, lists its models, and sends a chat.

The chat is sent complete and streamed; with ``--ollama`` through Ollama's interface.

    python tests/reliability/open_webui.py http://127.0.0.1:8080 MODEL [--ollama]

docs/server.md has the lines that start it, in an environment of its own and with a new DATA_DIR.
"""

import argparse
import json

import httpx

MESSAGES = [{"role": "user", "content": "Hi"}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--ollama", action="store_true", help="where ENABLE_OLLAMA_API and OLLAMA_BASE_URL are set")
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=300) as http:
        user = {"name": "Admin", "email": "admin@example.com", "password": "a long password 1"}
        signed_up = http.post("/api/v1/auths/signup", json=user)
        if signed_up.status_code != 200:  # in an earlier run
            signed_up = http.post("/api/v1/auths/signin", json=user)
        assert signed_up.status_code == 200, signed_up.text
        http.headers["Authorization"] = f"Bearer {signed_up.json()['token']}"
        answered = of_ollama if options.ollama else of_openai
        listed, text, pieces = answered(http, options.model)
        assert options.model in listed, listed
        assert text and "".join(pieces) == text, (text, pieces)
        print(f"models: {listed}; answer: {text!r}; {len(pieces)} pieces")


def of_openai(http, model):
    """The names of the models, an answer, and the pieces of the same one as a stream."""
    listed = [each["id"] for each in http.get("/api/models").json()["data"]]
    chat = {"model": model, "messages": MESSAGES, "max_tokens": 12}
    answer = http.post("/api/chat/completions", json={**chat, "stream": False}).json()
    lines = http.post("/api/chat/completions", json={**chat, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [each["delta"].get("content") or "" for event in events for each in event["choices"]]
    return listed, answer["choices"][0]["message"]["content"], pieces


def of_ollama(http, model):
    """The same, as Ollama has it: an object a line."""
    listed = [each["name"] for each in http.get("/ollama/api/tags").json()["models"]]
    chat = {"model": model, "messages": MESSAGES, "options": {"num_predict": 12}}
    answer = http.post("/ollama/api/chat", json={**chat, "stream": False})
    streamed = http.post("/ollama/api/chat", json={**chat, "stream": True})
    parts = [json.loads(line) for line in streamed.text.splitlines()]
    assert parts[-1]["done"] and parts[-1]["eval_count"] > 0, parts[-1]
    first = [json.loads(line) for line in answer.text.splitlines()]
    return listed, "".join(each["message"]["content"] for each in first), [each["message"]["content"] for each in parts]


if __name__ == "__main__":
    main()
