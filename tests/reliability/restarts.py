"""Starts after a kill and on damaged, full and missing caches; a command, since each start compiles.

    python tests/reliability/restarts.py

Every start of the embedded model must answer a request with the same tokens. Each check prints a line; the exit status
is the number of those that failed. A full disk is a process that may write no byte to any file (RLIMIT_FSIZE).
"""

import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import Process

BODY = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 24,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 1,
}


class Planted:
    """Makes a file if its pickle is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def answer_of(cache, end=signal.SIGTERM, **options):
    """Starts a server with a cache folder; returns its answer, seconds to ready, and the lines of its log."""
    began = time.monotonic()
    process = Process("--served-model-name", "tiny", XDG_CACHE_HOME=str(cache), **options)
    try:
        process.wait_until_ready(within_s=900)  # an empty cache has no C++ kernels either
        ready_s = time.monotonic() - began
        answer = httpx.post(f"{process.url}/v1/completions", json=BODY, timeout=120)
        assert answer.status_code == 200, answer.text
        process.process.send_signal(end)
        status, errors = process.end()
        assert status == (0 if end == signal.SIGTERM else -end), (status, errors)
        return answer.json()["choices"][0]["text"], ready_s, errors.splitlines()
    finally:
        process.stop()


def truncate(data, rng):
    return data[: len(data) // 2]


def flip(data, rng):
    at = rng.randrange(len(data)) if data else 0
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] if data else b"x"


def empty(data, rng):
    return b""


def damage_all(cache, damage):
    """Damages every file of a cache; returns their number."""
    rng = random.Random(3)
    files = [file for file in cache.rglob("*") if file.is_file()]
    for file in files:
        file.write_bytes(damage(file.read_bytes(), rng))
    return len(files)


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        cache, planted = Path(folder) / "cache", Path(folder) / "planted"
        known, first_s, _ = answer_of(cache, end=signal.SIGKILL)
        print(f"first start: ready after {first_s:.1f} s, then killed", flush=True)

        def check(name, cache, **options):
            nonlocal failed
            text, ready_s, lines = answer_of(cache, **options)
            is_well = text == known and not planted.exists()
            failed += not is_well
            num_warnings = sum(" WARNING " in line or "no CPU kernels" in line for line in lines)
            said = f"ready after {ready_s:.1f} s, {num_warnings} warnings in the log"
            print(f"{name}: {'same tokens' if is_well else 'OTHER TOKENS'}; {said}", flush=True)
            print(
                *(f"    {line[:200]}" for line in lines if " WARNING " in line or "no CPU kernels" in line),
                sep="\n",
                flush=True,
            )

        check("start after SIGKILL", cache)
        check("start without a compiler", cache, PATH="/nonexistent")
        payload = pickle.dumps(Planted(planted))
        damages = {"truncated": truncate, "flipped": flip, "empty": empty, "replaced by a pickle": lambda *_: payload}
        for name, damage in damages.items():
            num_files = damage_all(cache, damage)
            check(f"{num_files} files of the cache {name}", cache)
        check("no cache folder can be made", Path("/dev/null/cache"))
        (Path(folder) / "full").mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        check("full disk", Path(folder) / "full")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sys.exit(failed)


if __name__ == "__main__":
    main()
