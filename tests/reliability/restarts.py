"""Starts after a kill and on damaged, full and missing caches; a command, since each start compiles.

    python tests/reliability/restarts.py

Every start of the embedded model must answer a request with the same tokens, and say in one warning what is wrong with
a folder of its cache, if something is. Each check prints a line; the exit status is the number of those that failed.
Full and read-only disks are tmpfs that the server alone sees (`unshare`, which needs no root where users may have
namespaces).
"""

import argparse
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import Process

from model_adapters.disk_cache import KEY_NAME, SEAL_BYTES, SealedFolder

BODY = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 24,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 1,
}
COMPILER = """#!/bin/sh
# g++, which compiles each source file once: the next time its object is copied
for last; do :; done
name=$(printf '%s\\n' "$@" | grep -v "^/.*\\.o$" | md5sum | cut -c1-32)
case " $* " in
  *" -c "*) ;;
  *) exec g++ "$@" ;;
esac
[ -f "{objects}/$name" ] || {{ g++ "$@" && cp "$last" "{objects}/$name"; exit $?; }}
cp "{objects}/$name" "$last"
"""
"""Kernels take minutes of a processor, and most of these starts build them."""


class Planted:
    """Makes a folder if its pickle is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def answer_of(cache, end=signal.SIGTERM, **options):
    """Starts a server with a cache folder; returns its answer, seconds to ready, and the warnings of its log."""
    began = time.monotonic()
    process = Process("--served-model-name", "tiny", XDG_CACHE_HOME=str(cache), **options)
    try:
        process.wait_until_ready(within_s=900)
        ready_s = time.monotonic() - began
        answer = httpx.post(f"{process.url}/v1/completions", json=BODY, timeout=900)
        assert answer.status_code == 200, answer.text
        process.process.send_signal(end)
        status, errors = process.end()
        assert status == (0 if end == signal.SIGTERM else -end), (status, errors)
        warnings = [line for line in errors.splitlines() if " WARNING " in line or " ERROR " in line]
        return answer.json()["choices"][0]["text"], ready_s, warnings
    finally:
        process.stop()


def truncate(data):
    return data[: len(data) // 2]


def flip(data):
    at = random.Random(len(data)).randrange(len(data)) if data else 0
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] if data else b"x"


def each_file(damage):
    """What damages each file of a cache by itself."""

    def damage_all(files):
        for file in files:
            file.write_bytes(damage(file.read_bytes()))

    return damage_all


def exchange(files):
    """Gives each file the content of the next one of its folder, seal included; a valid key to each folder."""
    for folder in {file.parent for file in files}:
        of_folder = sorted(file for file in files if file.parent == folder and file.name != KEY_NAME)
        contents = [file.read_bytes() for file in of_folder]
        for file, content in zip(of_folder, contents[1:] + contents[:1], strict=True):
            file.write_bytes(content)
    keys = sorted(file for file in files if file.name == KEY_NAME)
    contents = [key.read_bytes() for key in keys]
    for key, content in zip(keys, contents[1:] + contents[:1], strict=True):
        key.write_bytes(content)


def reseal(files):
    """Gives each file its content with a seal that is valid in another folder."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            if file.name != KEY_NAME and len(file.read_bytes()) > SEAL_BYTES:
                SealedFolder(Path(folder) / "other").write(file.name, file.read_bytes()[:-SEAL_BYTES])
                file.write_bytes((Path(folder) / "other" / file.name).read_bytes())


class Restarts:
    """Starts of one server after the other on one cache.

    Attributes:
        num_failed: Number of checks that have failed.
    """

    def __init__(self, folder, objects):
        self.num_failed = 0
        self._folder, self.cache, self.planted = folder, folder / "cache", folder / "planted"
        objects.mkdir(exist_ok=True)
        self._compiler = folder / "g++-once"
        self._compiler.write_text(COMPILER.format(objects=objects))
        self._compiler.chmod(0o700)
        self._environment = {"CXX": str(self._compiler)}
        self.known, seconds, _ = answer_of(self.cache, end=signal.SIGKILL, **self._environment)
        print(f"first start: ready after {seconds:.1f} s, then killed", flush=True)

    def check(self, name, cache=None, num_warnings=0, **options):
        """Starts a server, and checks its answer and the number of its warnings."""
        text, ready_s, warnings = answer_of(cache or self.cache, **{**self._environment, **options})
        is_same, is_clean = text == self.known, not self.planted.exists()
        self.num_failed += not (is_same and is_clean and len(warnings) == num_warnings)
        tokens = "same tokens" if is_same else "OTHER TOKENS"
        planted = "" if is_clean else ", A PICKLE WAS READ"
        expected = "" if len(warnings) == num_warnings else f" IN PLACE OF {num_warnings}"
        print(f"{name}: {tokens}{planted}; {len(warnings)} warnings{expected}; ready after {ready_s:.1f} s", flush=True)
        for line in warnings:
            print(f"    {line[:240]}", flush=True)

    def damaged(self, name, damage):
        """Damages every file of the cache and starts on it."""
        files = [file for file in self.cache.rglob("*") if file.is_file()]
        damage(files)
        self.check(f"{len(files)} files of the cache {name}", num_warnings=1)

    def without_compiler(self):
        """Starts without the compiler that has built the kernels."""
        away = self._compiler.rename(self._folder / "away")
        self.check("start without a compiler")
        away.rename(self._compiler)

    def without_disk(self, name, options, num_warnings):
        """Starts with a file system of its own as the cache folder."""
        folder = self._folder / "mounted"
        folder.mkdir(exist_ok=True)
        script = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
        prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, str(folder))
        self.check(name, cache=folder, num_warnings=num_warnings, prefix=prefix)


def checks_of(restarts):
    payload = pickle.dumps(Planted(restarts.planted))
    return {
        "killed": lambda: restarts.check("start after SIGKILL"),
        "compiler": restarts.without_compiler,
        "truncated": lambda: restarts.damaged("truncated", each_file(truncate)),
        "flipped": lambda: restarts.damaged("with a flipped bit", each_file(flip)),
        "empty": lambda: restarts.damaged("empty", each_file(lambda data: b"")),
        "pickle": lambda: restarts.damaged("replaced by a pickle", each_file(lambda data: payload)),
        "exchanged": lambda: restarts.damaged("exchanged for others of their folder", exchange),
        "resealed": lambda: restarts.damaged("sealed by another key", reseal),
        "removed": lambda: (shutil.rmtree(restarts.cache), restarts.check("cache removed")),
        "impossible": lambda: restarts.check("no cache folder can be made", Path("/dev/null/cache"), num_warnings=1),
        "full": lambda: restarts.without_disk("full disk (64 KiB)", "size=64k,mode=700", num_warnings=1),
        "unwritable": lambda: restarts.without_disk("read-only disk", "ro,mode=700", num_warnings=1),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", help="names of checks, such as truncated full")
    parser.add_argument("--objects", type=Path, help="folder of compiled source files, for the next run too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        restarts = Restarts(Path(folder), arguments.objects or Path(folder) / "objects")
        for name, check in checks_of(restarts).items():
            if arguments.only is None or name in arguments.only:
                check()
    sys.exit(restarts.num_failed)


if __name__ == "__main__":
    main()
