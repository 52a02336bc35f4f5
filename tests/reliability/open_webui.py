"""Signs up as the first user of an Open WebUI in front of the server, lists its models, and sends a chat.

The chat is sent complete and streamed.

    python tests/reliability/open_webui.py http://127.0.0.1:8080 MODEL

docs/server.md has the lines that start it, in an environment of its own and with a new DATA_DIR.
"""

import argparse
import json

import httpx


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=300) as http:
        user = {"name": "Admin", "email": "admin@example.com", "password": "a long password 1"}
        signed_up = http.post("/api/v1/auths/signup", json=user)
        assert signed_up.status_code == 200, signed_up.text
        http.headers["Authorization"] = f"Bearer {signed_up.json()['token']}"
        listed = [model["id"] for model in http.get("/api/models").json()["data"]]
        assert options.model in listed, listed
        chat = {"model": options.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
        answer = http.post("/api/chat/completions", json={**chat, "stream": False}).json()
        text = answer["choices"][0]["message"]["content"]
        lines = http.post("/api/chat/completions", json={**chat, "stream": True}).text.splitlines()
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streamed = "".join(each["delta"].get("content") or "" for piece in pieces for each in piece["choices"])
        assert text and streamed == text, (text, streamed)
        print(f"models: {listed}; answer: {text!r}")


if __name__ == "__main__":
    main()
