"""llama.cpp as ``benchmarks/peers.py`` installs it: its converter, its quantizer, its dequantization, its tokens."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

from quantized_quality import LlamaCpp  # noqa: E402

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
FILE_TYPES |= {"Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "MXFP4_MOE": 38}
"""Values of llama_ftype in llama.h."""

# The converter knows tokenizers of published models by what they make of a text, and wants files of SentencePiece.
_CONVERT = """
import runpy, sys
from conversion import load_all_models
from conversion.base import TextModel
load_all_models()
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
def classes(of):
    return [of, *(each for child in of.__subclasses__() for each in classes(child))]
for each in classes(TextModel):
    each.set_vocab = lambda self: TextModel._set_vocab_gpt2(self)
script, *folders = sys.argv[1:]
for folder in folders:
    sys.argv = [script, folder, "--outfile", folder + ".gguf", "--outtype", "f32"]
    runpy.run_path(script, run_name="__main__")
"""


class Tool:
    """The environment of llama.cpp that the option ``--llama-cpp`` names."""

    def __init__(self, environment):
        self.environment = Path(environment).resolve()
        libraries = self.environment / "lib"
        self._shim = ctypes.CDLL(str(libraries / "libllama_shim.so"))
        self._ggml = ctypes.CDLL(str(libraries / "libggml-base.so"))

    def convert(self, folders):
        """Writes ``FOLDER.gguf`` in float32 beside each folder."""
        root = self.environment / "llama.cpp"
        paths = [root / "gguf-py", root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", _CONVERT, root / "convert_hf_to_gguf.py", *folders]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    def quantize(self, source, target, kind):
        """Writes `target` with weights of a type of `FILE_TYPES`."""
        code = self._shim.engine_quantize(str(source).encode(), str(target).encode(), FILE_TYPES[kind], 2)
        assert code == 0, f"llama_model_quantize returned {code}"

    def dequantize(self, data, kind, count):
        """float32[count] of blocks: what ggml computes of them."""
        numbers = np.empty(count, np.float32)
        name = kind.lower().replace("_k", "_K")
        function = getattr(self._ggml, f"dequantize_row_{name}")
        function(data.ctypes.data_as(ctypes.c_void_p), numbers.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(count))
        return numbers

    def open(self, file, context_len=128):
        """The model of a file."""
        return Model(self.environment, file, context_len)


class Model(LlamaCpp):
    """A model in llama.cpp."""

    def tokenize(self, text):
        """Token ids of a text, without special tokens in it."""
        model = ctypes.cast(self._engine, ctypes.POINTER(ctypes.c_void_p))[0]
        self._llama.llama_model_get_vocab.restype = ctypes.c_void_p
        vocab = ctypes.c_void_p(self._llama.llama_model_get_vocab(ctypes.c_void_p(model)))
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self._llama.llama_tokenize(vocab, data, len(data), ids, len(ids), True, False)
        assert count >= 0
        return list(ids[:count])
