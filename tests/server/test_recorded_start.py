"""``torchax-serve serve`` from the record of an earlier start: it is ready and answers without torch."""

import json
import re
import shutil
import signal
import subprocess
import sys

import httpx
import pytest

from model_adapters.loading.model_source import EMBEDDED

# The command line; with "refused" first, importing torch, transformers or torchax raises.
SCRIPT = """
import sys
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "torchax"):
            raise AssertionError(f"{name} is imported")

if sys.argv.pop(1) == "refused":
    sys.meta_path.insert(0, Refusal())
from torchax_serve.cli.main import main
main()
"""
SIZES = "--max-num-seqs", "2", "--max-model-len", "128"
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8}
DIGITS = {"model": "tiny", "prompt": "3 + 4 =", "max_tokens": 8, "structured_outputs": {"regex": "[0-9]{1,4}"}}


def answers(folder, how):
    """What a new server of `folder` answers, from its lines on stderr on, until it is told to end."""
    command = [sys.executable, "-c", SCRIPT, how, "serve", str(folder), "--port", "0", "--served-model-name", "tiny"]
    with subprocess.Popen([*command, *SIZES], stderr=subprocess.PIPE, text=True) as process:
        lines, url = [], ""
        for line in process.stderr:
            lines.append(line)
            url = url or next(iter(re.findall(r"listening on (http://\S+)", line)), "")
            if " is ready after " in line:
                break
        try:
            assert "is ready after" in lines[-1], "".join(lines)
            with httpx.Client(base_url=url, timeout=60) as client:
                chat = client.post("/v1/chat/completions", json=QUESTION).json()
                digits = client.post("/v1/completions", json=DIGITS).json()
                shown = client.get("/v1/models").json()["data"][0]
                assert "torchax_serve_" in client.get("/metrics").text
            return [
                chat["choices"],
                digits["choices"],
                shown["tasks"],
                shown["max_model_len"],
                chat["system_fingerprint"],
            ]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


@pytest.mark.thorough
def test_the_second_start_needs_no_torch(tmp_path):
    folder = shutil.copytree(EMBEDDED, tmp_path / "model")
    first = answers(folder, "")
    assert json.dumps(answers(folder, "refused")) == json.dumps(first)
