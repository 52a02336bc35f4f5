"""Models whose files somebody has damaged: they load and take prompts, or end with an error of the project.

By default a few mutations of each file; with TORCHAX_SERVE_NUM_MUTATIONS=200 so many.
"""

import json
import os
import random
import shutil
import struct

import pytest
import safetensors.numpy

from model_adapters.errors import TorchaxServeError
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams, serve
from torchax_serve.text import chat_prompt_ids
from torchax_serve.text.prompt import encode_prompt, make_request

NUM = int(os.environ.get("TORCHAX_SERVE_NUM_MUTATIONS", "2"))
PARAMS = SamplingParams(max_new_tokens=2, stop="x")
INDEX = "model.safetensors.index.json"
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX,
    "model-00001-of-00002.safetensors",
)  # fmt: skip
OTHER_VALUES = (None, -1, 0, 2**31, 2**70, 1e308, True, "", "x", "../../etc/passwd", [], {}, [[]], {"a": 1})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The embedded model in two shards."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    shutil.copy(EMBEDDED / "chat_template.jinja", folder)
    tensors = safetensors.numpy.load_file(EMBEDDED / "model.safetensors")
    names, index = sorted(tensors), {}
    for number, of_shard in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in of_shard}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(of_shard, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return folder


def places_of(value, path=()):
    """Paths to all values inside of a value of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places_of(inner, (*path, key))


def with_other_value(data, rng):
    value = json.loads(data)
    *path, last = rng.choice([place for place in places_of(value) if len(place) < 3])
    inner = value
    for key in path:
        inner = inner[key]
    if rng.random() < 0.2:
        del inner[last]
    else:
        inner[last] = rng.choice(OTHER_VALUES)
    return json.dumps(value).encode()


def with_bytes(data, rng):
    """Some bytes exchanged; of weights in the header, which says where they are."""
    found = bytearray(data)
    end = min(8 + struct.unpack("<Q", data[:8])[0], len(data)) if len(data) > 1 << 20 else len(data)
    for _ in range(rng.randint(1, 4)):
        found[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'{}[]"0%'))
    return bytes(found)


MUTATIONS = {
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "bytes": with_bytes,
    "empty": lambda data, rng: b"",
    "other JSON": lambda data, rng: rng.choice((b"[]", b"null", b"1", b'"x"', b"{}")),
    "nested": lambda data, rng: b"[" * 100_000,
    "no text": lambda data, rng: b"\xff\xfe\x00" * 50,
    "template": lambda data, rng: data + rng.choice((b"{% for", b"{{ 1 / 0 }}", b"{{ x.y.z }}", b"{% include 'a' %}")),
    "value": with_other_value,
}


def cases():
    for file in FILES:
        kinds = [kind for kind in MUTATIONS if kind != "value" or file.endswith(".json")]
        rng = random.Random(file)
        for number in range(NUM):
            yield file, rng.choice(kinds), number


@pytest.mark.parametrize(("file", "kind", "number"), list(cases()))
def test_a_damaged_file_is_an_error_of_the_project_or_does_no_harm(whole, tmp_path, file, kind, number):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder, copy_function=os.link)
    data = MUTATIONS[kind]((whole / file).read_bytes(), random.Random(f"{file} {kind} {number}"))
    (folder / file).unlink()
    (folder / file).write_bytes(data)
    try:
        with serve(folder) as model:
            assert make_request(model, encode_prompt(model, "Hi there"), PARAMS).prompt_ids
            assert len(chat_prompt_ids(model, [{"role": "user", "content": "Hi"}])) > 0
    except TorchaxServeError as error:
        assert str(error)
