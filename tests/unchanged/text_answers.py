"""Answers of the embedded model to text requests, as a script that imports no torch of its own.

``python tests/unchanged/text_answers.py FOLDER`` prints them as JSON, those over HTTP among them. The second run for a
folder has the model of a start record.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from request_walk import serving
from torchax_serve import SamplingParams, serve

MAX_SHOWN = 8


def jsonable(value):
    """The same as JSON reads it: tuples as lists, numbers as Python has them."""
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return int(value) if isinstance(value, np.integer) else value


def outcome(call):
    """The result of a call, or its error."""
    try:
        return jsonable(call())
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def logprobs_of(found):
    if found is None:
        return None
    return [None if each is None else [each.token_id, each.logprob, _of_top(each.top), each.rank] for each in found]


def _of_top(top):
    """The likeliest tokens; of a long list the first ones, their number, and the sum of all."""
    return top if len(top) <= MAX_SHOWN else [*top[:MAX_SHOWN], len(top), math.fsum(value for _, value in top)]


def completion(each):
    return {
        "text": each.text, "ids": each.token_ids, "prompt": each.prompt_len, "reason": each.finish_reason,
        "logprobs": logprobs_of(each.logprobs), "prompt_logprobs": logprobs_of(each.prompt_logprobs),
    }  # fmt: skip


def streamed(stream):
    with stream:
        pieces = list(stream)
    stats = stream.stats
    return {
        "pieces": pieces, "ids": stream.token_ids, "reason": stats.finish_reason, "prompt": stats.prompt_tokens,
        "logprobs": logprobs_of(stream.logprobs), "prompt_logprobs": logprobs_of(stream.prompt_logprobs),
    }  # fmt: skip


def text_answers(model):
    """Requests with text of the embedded model."""
    found = {}
    cases = [
        {}, {"stop": "e"}, {"stop": [" the", "\n"]}, {"stop": "e", "temperature": 1.0, "seed": 3},
        {"stop_token_ids": list(range(40)), "temperature": 0.0}, {"min_new_tokens": 4, "temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "logprobs": 2}, {"n": 2}, {"ignore_eos": True, "temperature": 0.0},
        {"max_new_tokens": 40}, {"timeout_s": 1e-9}, {"queue_timeout_s": 1e-9}, {"prompt_logprobs": 0},
        {"num_beams": 3}, {"repetition_penalty": 1.3, "stop": "."},
    ]  # fmt: skip
    for options in cases:
        params = SamplingParams(**{"max_new_tokens": 12, **options})
        found[f"chat {options}"] = outcome(
            lambda params=params: streamed(model.chat("What is JAX?", params, stream=True))
        )
        found[f"stream {options}"] = outcome(lambda params=params: streamed(model.stream("The capital of", params)))
        found[f"batch {options}"] = outcome(
            lambda params=params: [*map(completion, model.generate_batch(["One, two,", "A"], params))]
        )
    for messages in (
        [],
        [{"role": "user"}],
        [{"role": "assistant", "content": "Hi"}],
        3,
        [{"role": "tool", "content": "x"}],
    ):
        found[f"messages {messages}"] = outcome(lambda messages=messages: model.chat(messages))
    found["system"] = outcome(lambda: model.chat("Hi", SamplingParams(max_new_tokens=5), system="Be brief."))
    found["empty"] = outcome(lambda: streamed(model.stream("")))
    found["long"] = outcome(lambda: streamed(model.stream("a b " * 5000)))
    found["default chat"] = outcome(lambda: streamed(model.chat("Hi", stream=True)))
    found["default stream"] = outcome(lambda: streamed(model.stream("Hi")))
    found["unknown"] = outcome(lambda: model.chat("Hi", max_tokens=3))
    return found


def http_answers(model):
    """Requests over HTTP, answers without ids and times."""
    import httpx

    chat = {"messages": [{"role": "user", "content": "What is JAX?"}], "max_tokens": 10}
    text, usage = {"prompt": "The capital of", "max_tokens": 10}, {"include_usage": True}
    cases = [
        ("chat/completions", chat), ("chat/completions", {**chat, "stream": True}),
        ("chat/completions", {**chat, "n": 2, "temperature": 1.0, "seed": 4, "logprobs": True, "top_logprobs": 2}),
        ("chat/completions", {**chat, "stop": ["e"], "temperature": 0}),
        ("chat/completions", {**chat, "stop": ["e"], "stream": True, "include_stop_str_in_output": True}),
        ("chat/completions", {**chat, "max_tokens": 0}), ("chat/completions", {**chat, "temperature": -1}),
        ("chat/completions", {**chat, "max_tokens": 5000}), ("chat/completions", {**chat, "messages": []}),
        ("chat/completions", {**chat, "logit_bias": {"5": 100}, "stream": True, "stream_options": usage}),
        ("chat/completions", {**chat, "response_format": {"type": "json_object"}, "temperature": 0}),
        ("completions", text), ("completions", {**text, "stream": True, "logprobs": 2}),
        ("completions", {**text, "echo": True, "logprobs": 1, "max_tokens": 3}),
        ("completions", {**text, "prompt": [[5, 6, 7], [8, 9]], "n": 2, "temperature": 1.0, "seed": 1}),
        ("completions", {**text, "prompt": [999999]}), ("completions", {**text, "stop_token_ids": list(range(300))}),
        ("completions", {**text, "min_tokens": 5, "repetition_penalty": 1.2, "presence_penalty": 1.0}),
        ("completions", {**text, "use_beam_search": True, "n": 2, "temperature": 0}),
        ("completions", {**text, "model": "x"}),
    ]  # fmt: skip
    found = {}
    with serving(model) as server, httpx.Client(base_url=server.addresses[0], timeout=120) as client:
        for path, body in cases:
            answer = client.post(f"/v1/{path}", json=body)
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            found[f"{path} {body}"] = [answer.status_code, [_without_ids(line) for line in lines]]
    return found


def _without_ids(line):
    try:
        answer = json.loads(line)
    except ValueError:
        return line
    for name in ("id", "created", "system_fingerprint"):
        answer.pop(name, None) if isinstance(answer, dict) else None
    return jsonable(answer)


def _joined_stream(lines):
    """The pieces of a stream joined by choice: how steps fall into pieces depends on the clock."""
    joined = {}
    for line in lines:
        if not isinstance(line, dict) or "choices" not in line:
            joined.setdefault("others", []).append(line)
            continue
        for choice in line["choices"]:
            into = joined.setdefault(str(choice.get("index")), [])
            into.append(choice)
    return {name: _merged(each) if name != "others" else each for name, each in joined.items()}


def _merged(choices):
    merged = {"text": "", "others": []}
    for choice in choices:
        delta = choice.pop("delta", {})
        merged["text"] += str(choice.pop("text", "") or "") + str(delta.pop("content", "") or "")
        logprobs = choice.pop("logprobs", None)
        merged.setdefault("logprobs", []).extend(_flat(logprobs))
        rest = {k: v for k, v in {**choice, **delta}.items() if v not in (None, "", [], 0)}
        merged["others"] += [rest] if rest else []
    return merged


def _flat(logprobs):
    if logprobs is None:
        return []
    return logprobs["content"] if "content" in logprobs else [logprobs.get("tokens"), logprobs.get("token_logprobs")]


def comparable(found):
    """Answers in the form in which they are compared."""
    for name, answer in found.get("http", {}).items():
        status, lines = answer
        found["http"][name] = [status, _joined_stream(lines) if len(lines) > 1 else lines]
    return found


def main():
    model = serve(sys.argv[1])
    found = {"model": type(model).__name__, "texts": text_answers(model), "http": http_answers(model)}
    model.close()
    print(json.dumps(comparable(found)))


if __name__ == "__main__":
    main()
