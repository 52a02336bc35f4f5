"""Routers of vLLM and SGLang before three servers: conversations find nearly all prefixes that one server would have.

    python3.11 -m venv routers && routers/bin/pip install --no-deps vllm-router sglang-router
    python tests/reliability/routers.py routers/bin

Prints, for each router, the share of prompt tokens that the caches of the servers had, beside that of one server; the
exit status is the number of routers with less than 0.9 of it.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from ports import free_port
from server_process import Process

NUM_SERVERS, NUM_CONVERSATIONS, NUM_TURNS = 3, 9, 6
LEAST_SHARE = 0.9
CACHE_AWARE = ("--policy", "cache_aware", "--cache-threshold", "0.3")
PROGRAMS = ("vllm-router", "sglang-router")


def hits(servers):
    """Tokens of prompts found in the caches of all servers, and tokens of all prompts."""
    found = [0.0, 0.0]
    for each in servers:
        text = httpx.get(f"{each.url}/metrics").text
        for index, name in enumerate(("hits", "queries")):
            found[index] += float(re.search(rf"^torchax_serve_prefix_cache_{name}_total (\S+)", text, re.M)[1])
    return found


def converse(url, salt):
    """Sends conversations in turn, as many clients would; each turn has all of the turns before."""
    texts = [f"{salt} {number} once upon a time there was a dog " * 4 for number in range(NUM_CONVERSATIONS)]
    for turn in range(NUM_TURNS):
        for number in range(NUM_CONVERSATIONS):
            body = {"model": "tiny", "prompt": texts[number], "max_tokens": 2, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            texts[number] += f" and {turn} then"


def share_found(servers, url, salt):
    """The share of prompt tokens that came from caches, and the tokens that each server was asked for."""
    before = hits(servers)
    asked_before = [hits([each])[1] for each in servers]
    converse(url, salt)
    found, asked = (new - old for new, old in zip(hits(servers), before, strict=True))
    parts = [hits([each])[1] - old for each, old in zip(servers, asked_before, strict=True)]
    return found / asked, parts


@contextlib.contextmanager
def router(program, servers, *options):
    """The address of a router before `servers`."""
    port = free_port()
    command = [str(program), *(["launch"] if program.name == "sglang-router" else [])]
    command += ["--worker-urls", *(each.url for each in servers), "--host", "127.0.0.1", "--port", str(port), *options]
    command += ["--prometheus-port", str(free_port())]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
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


def main():
    folder, num_worse = Path(sys.argv[1]).resolve(), 0
    servers = [Process("--served-model-name", "tiny") for _ in range(NUM_SERVERS)]
    try:
        for each in servers:
            each.wait_until_ready()
        for name in PROGRAMS:
            alone, _ = share_found(servers[:1], servers[0].url, f"alone {name}")
            with router(folder / name, servers, *CACHE_AWARE) as url:
                routed, parts = share_found(servers, url, f"routed {name}")
            num_worse += routed < LEAST_SHARE * alone
            shown = ", ".join(f"{each:.0f}" for each in parts)
            print(f"{name}: {routed:.3f} of the tokens, one server {alone:.3f}; each was asked for {shown}", flush=True)
    finally:
        for each in servers:
            each.stop()
    sys.exit(num_worse)


if __name__ == "__main__":
    main()
