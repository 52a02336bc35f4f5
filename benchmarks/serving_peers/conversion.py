"""The checkpoint of a run in the formats of the peers, each by the peer's own converter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving_peers.environments import SHIM, base_python

LOG_TAIL = 2000  # characters
CONVERT_S = 600.0
# Values of llama.h's llama_ftype.
GGUF_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
OPENVINO_FORMATS = ("fp16", "fp32", "int8", "int4")
ONNX_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
# llama.cpp's converter knows the tokenizers of published models by what they make of a text; ours is made up. It
# expects heads for several tokens in types whose published checkpoints have them; ours have none.
WITH_MADE_UP_TOKENIZER = """
import runpy, sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel.no_mtp = True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class ConversionError(RuntimeError):
    """A converter did not write what it was asked for; the message is the end of what it printed."""


def converted(checkpoint: Path, form: str, environments: Path, scratch: Path) -> Path:
    """The folder of `checkpoint` in a form such as ``gguf-q8_0``; made when first asked for.

    Raises:
        ConversionError: the converter failed.
    """
    folder = scratch / form
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    kind, _, precision = form.partition("-")
    {"gguf": to_gguf, "openvino": to_openvino, "onnx": to_onnx}[kind](checkpoint, precision, environments, folder)
    (folder / "done").touch()
    return folder


def to_gguf(checkpoint: Path, precision: str, environments: Path, folder: Path) -> None:
    environment = environments / "llama-cpp"
    folder.mkdir(parents=True)
    script = environment / "llama.cpp" / "convert_hf_to_gguf.py"
    file = folder / f"model-{precision}.gguf"
    if precision in ("f32", "f16", "bf16"):
        paths = [environment / "llama.cpp" / "gguf-py", script.parent, environment, packages_of_this_process()]
        source = with_published_kinds(checkpoint, folder.parent / "checkpoint-with-published-kinds")
        arguments = [str(script), str(source), "--outfile", str(file), "--outtype", precision]
        call([base_python(), "-S", "-c", WITH_MADE_UP_TOKENIZER, *arguments], paths)
        return
    whole = next(converted(checkpoint, "gguf-f16", environments, folder.parent).glob("*.gguf"))
    code = (
        "import ctypes, os, sys; library, a, b, kind = sys.argv[1:]; "
        "sys.exit(ctypes.CDLL(library).engine_quantize(a.encode(), b.encode(), int(kind), os.cpu_count()))"
    )
    library = str(environment / "lib" / SHIM)
    call([base_python(), "-S", "-c", code, library, str(whole), str(file), str(GGUF_TYPES[precision])], [])


def to_openvino(checkpoint: Path, precision: str, environments: Path, folder: Path) -> None:
    command = ["export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
    command += ["--weight-format", precision, str(folder)]
    paths = [environments / "openvino-convert"]
    call([base_python(), "-S", "-m", "optimum.commands.optimum_cli", *command], paths)


def to_onnx(checkpoint: Path, precision: str, environments: Path, folder: Path) -> None:
    named = folder.parent / "checkpoint-with-end"
    with_end_of_text(checkpoint, named)
    command = ["-i", str(named), "-o", str(folder), "-p", precision, "-e", "cpu", "-c", str(folder.parent / "cache")]
    paths = [environments / "onnx", packages_of_this_process()]
    call([base_python(), "-S", "-m", "onnxruntime_genai.models.builder", *command], paths)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of so many tokens, for systems that do not start without one; no request is a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", *alphabet, "th"][:vocab_size]
    names += [f"<{index}>" for index in range(len(names), vocab_size)]
    bpe = models.BPE({name: index for index, name in enumerate(names)}, [("t", "h")], unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def with_end_of_text(checkpoint: Path, folder: Path) -> None:
    """A copy with a token that ends the text, which the builder wants; requests forbid it."""
    copy_with(checkpoint, folder, {"eos_token_id": 2, "pad_token_id": 2}, ("config.json", "generation_config.json"))


def with_published_kinds(checkpoint: Path, folder: Path) -> Path:
    """A copy with layers named as in published configurations of the type, which llama.cpp's converter reads.

    transformers has had one name for all types since 5.24. The checkpoint itself where it is of another type.
    """
    shape = json.loads((checkpoint / "config.json").read_text())
    if shape["model_type"] != "granitemoehybrid":
        return checkpoint
    published = {"full_attention": "attention", "linear_attention": "mamba"}
    kinds = [published.get(each, each) for each in shape["layer_types"]]
    copy_with(checkpoint, folder, {"layer_types": kinds}, ("config.json",))
    return folder


def copy_with(checkpoint: Path, folder: Path, changes: Mapping[str, Any], names: Sequence[str]) -> None:
    """A copy of a checkpoint with other values in the configurations of these names; other files are linked."""
    folder.mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name in names:
            (folder / path.name).write_text(json.dumps(json.loads(path.read_text()) | changes))
        elif not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)


def packages_of_this_process() -> Path:
    """Where PyTorch and transformers lie, which converters read checkpoints with."""
    import torch

    return Path(torch.__file__).resolve().parents[1]


def call(command: list[str], paths: list[Path], environment: Mapping[str, str] | None = None) -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    variables |= {"OPENVINO_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1", **(environment or {})}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=CONVERT_S)
    except subprocess.TimeoutExpired:
        raise ConversionError(f"took more than {CONVERT_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise ConversionError((done.stderr or done.stdout)[-LOG_TAIL:])
