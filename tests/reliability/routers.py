"""Routers of vLLM and SGLang before three servers: conversations find nearly all prefixes that one server would have.

    python3.11 -m venv routers && routers/bin/pip install vllm-router sglang-router
    python tests/reliability/routers.py routers/bin

Prints, for each router, the share of prompt tokens that the caches of the servers had, beside that of one server and
of three in turns. The exit status is the number of routers with less than 0.9 of one server's, or that gave all work to
one server. Where a router goes by texts, two thirds of the conversations are with adapters. vLLM's goes by the events
of the servers as well, with the model alone: it asks for no adapter's blocks.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

from model_adapters.loading.model_source import EMBEDDED

sys.path.insert(0, str(Path(__file__).parents[1]))

from ports import free_port
from server_process import Process

NUM_SERVERS, NUM_CONVERSATIONS, NUM_TURNS = 3, 9, 6
LEAST_SHARE = 0.9
NUM_AT_ONCE = 3
CACHE_AWARE = ("--policy", "cache_aware", "--cache-threshold", "0.3")
TURNS = ("--policy", "round_robin")
PROGRAMS = ("vllm-router", "sglang-router")
MODELS = ("tiny", "one", "two")
"""The model's name, and those of its adapters."""
WORDS = ("apple", "bread", "castle", "dragon", "engine", "forest", "garden", "harbour", "island")
"""First words of conversations: none has a beginning of another."""


def hits(servers):
    """Tokens of prompts found in the caches of all servers, and tokens of all prompts."""
    found = [0.0, 0.0]
    for each in servers:
        text = httpx.get(f"{each.url}/metrics").text
        for index, name in enumerate(("hits", "queries")):
            found[index] += float(re.search(rf"^torchax_serve_prefix_cache_{name}_total (\S+)", text, re.M)[1])
    return found


def adapter(folder, seed):
    """Writes an adapter of the embedded model that changes its answers, as peft does."""
    config = json.loads((Path(EMBEDDED) / "config.json").read_text())
    hidden, rng, tensors = config["hidden_size"], np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        num_out = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((4, hidden), np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((num_out, 4), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    found = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(found))
    return folder


def converse(url, salt, models):
    """Sends conversations, a few at once; each turn has all of the turns before."""
    texts = [f"{word} {salt} once upon a time there was a {word} " * 4 for word in WORDS[:NUM_CONVERSATIONS]]

    def ask(number, turn):
        body = {"model": models[number % len(models)], "prompt": texts[number], "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == body["model"], answer.text
        texts[number] += f" and {turn} then"

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for turn in range(NUM_TURNS):
            list(pool.map(ask, range(NUM_CONVERSATIONS), [turn] * NUM_CONVERSATIONS))


def share_found(servers, url, salt, models):
    """The share of prompt tokens that came from caches, and the tokens that each server was asked for."""
    before = hits(servers)
    asked_before = [hits([each])[1] for each in servers]
    converse(url, salt, models)
    found, asked = (new - old for new, old in zip(hits(servers), before, strict=True))
    parts = [hits([each])[1] - old for each, old in zip(servers, asked_before, strict=True)]
    return found / asked, parts


@contextlib.contextmanager
def router(program, servers, *options, **environment):
    """The address of a router before `servers`."""
    port = free_port()
    command = [str(program), *(["launch"] if program.name == "sglang-router" else [])]
    command += ["--worker-urls", *(each.url for each in servers), "--host", "127.0.0.1", "--port", str(port), *options]
    command += ["--prometheus-port", str(free_port())]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment}) as process,
    ):
        try:
            until = time.monotonic() + 120
            while True:
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{program.name} did not start:\n{log.read()[-3000:]}")
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/readiness").status_code == 200:
                        break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def by_events(servers, events):
    """Options and variables of vLLM's router that routes by what the servers publish."""
    options = ["--policy", "kv_aware", "--kv-event-model", "tiny"]
    for each, (port, replay) in zip(servers, events, strict=True):
        options += ["--kv-event-source", f"{each.url}=tcp://127.0.0.1:{port}"]
        options += ["--kv-event-replay-source", f"{each.url}=tcp://127.0.0.1:{replay}"]
    return options, {"VLLM_ROUTER_TOKENIZER": str(EMBEDDED)}


def main():
    folder, num_worse = Path(sys.argv[1]).resolve(), 0
    servers, events = [], [(free_port(), free_port()) for _ in range(NUM_SERVERS)]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            adapters = [f"--adapter={name}={adapter(Path(scratch) / name, i)}" for i, name in enumerate(MODELS[1:])]
            for port, replay in events:
                config = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}
                config = json.dumps({"enable_kv_cache_events": True, **config})
                servers.append(Process("--served-model-name", "tiny", "--kv-events-config", config, *adapters))
            for each in servers:
                each.wait_until_ready()
            ways = [(name, MODELS, CACHE_AWARE, {}) for name in PROGRAMS]
            ways.append((PROGRAMS[0], MODELS[:1], *by_events(servers, events)))
            for number, (name, models, options, environment) in enumerate(ways):
                alone, _ = share_found(servers[:1], servers[0].url, f"alone {number}", models)
                with router(folder / name, servers, *TURNS) as url:
                    turns, _ = share_found(servers, url, f"turns {number}", models)
                with router(folder / name, servers, *options, **environment) as url:
                    routed, parts = share_found(servers, url, f"routed {number}", models)
                num_worse += routed < LEAST_SHARE * alone or sum(map(bool, parts)) < 2
                shown = ", ".join(f"{each:.0f}" for each in parts)
                print(
                    f"{name} {options[1]}: {routed:.3f} of the tokens, one server {alone:.3f}, in turns {turns:.3f}; "
                    f"each was asked for {shown}",
                    flush=True,
                )
        finally:
            for each in servers:
                each.stop()
    sys.exit(num_worse)


if __name__ == "__main__":
    main()
