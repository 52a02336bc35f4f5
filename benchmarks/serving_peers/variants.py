"""How each system can be run on this machine, and which way is its best: dtypes and threads, chosen by measurement.

Weights of three kinds are compared, each with their like: 16 or 32 bits as the system likes it best, 8 bits, 4 bits.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving_peers.environments import SHIM, cpu_flags

UNQUANTIZED, EIGHT_BITS, FOUR_BITS = "16 or 32 bits", "8 bits", "4 bits"
KINDS = (UNQUANTIZED, EIGHT_BITS, FOUR_BITS)
A_FILE = "GGUF file"  # read by both as it is
NAMES = {  # of systems, as their projects write them
    "ours": "torchax-serve",
    "hf": "transformers, eager",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "onnxruntime": "ONNX Runtime GenAI",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a system.

    Attributes:
        system: name of a `SYSTEMS` entry.
        dtype: of weights, and of products where it differs; as tables show it.
        kind: weights with which it is compared.
        form: of the checkpoint it reads, as `conversion.converted` names it; "" is the checkpoint itself.
        options: of the system's process.
        num_threads: None where the system decides.
    """

    system: str
    dtype: str
    kind: str
    form: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_threads: int | None = None

    @property
    def name(self) -> str:
        return f"{self.system} {self.dtype}" + (f", {self.num_threads} threads" if self.num_threads else "")

    def with_threads(self, num_threads: int) -> Variant:
        return dataclasses.replace(self, num_threads=num_threads)


@dataclasses.dataclass(frozen=True)
class SystemKind:
    """What is known of a system.

    Attributes:
        module: of this package.
        environment: of `environments.RECIPES`; None: that of the benchmark.
        threads_option: name of the option for a number of threads; None where there is none.
    """

    module: str
    environment: str | None = None
    threads_option: str | None = None


SYSTEMS = {
    "ours": SystemKind("ours"),
    "vllm": SystemKind("vllm_engine", "vllm"),  # its threads are bound to cores by the environment
    "hf": SystemKind("hf_generate", None, "num_threads"),
    "hf-continuous": SystemKind("hf_continuous"),
    "llama.cpp": SystemKind("llama_engine", "llama-cpp", "num_threads"),
    "openvino": SystemKind("openvino_engine", "openvino", "num_threads"),
    "onnxruntime": SystemKind("onnx_engine", "onnx", "num_threads"),
}


def _of_dtypes(system: str, dtypes: Sequence[str]) -> list[Variant]:
    return [Variant(system, dtype, UNQUANTIZED, options={"dtype": dtype}) for dtype in dtypes]


def _openvino(dtype: str, kind: str, form: str) -> list[Variant]:
    """Its weights with products of each dtype; on a processor that lacks one it takes another by itself."""
    return [
        Variant("openvino", f"{dtype}, products {product}", kind, form, {"inference_precision": product})
        for product in ("bf16", "f16", "f32")
    ]


VARIANTS: tuple[Variant, ...] = (
    *_of_dtypes("ours", ("bfloat16", "float32")),
    Variant("ours", "int8", EIGHT_BITS, options={"quantization": "int8"}),
    Variant("ours", "int4", FOUR_BITS, options={"quantization": "int4"}),
    *_of_dtypes("vllm", ("bfloat16", "float16", "float32")),
    *_of_dtypes("hf", ("bfloat16", "float16", "float32")),
    *_of_dtypes("hf-continuous", ("bfloat16", "float16", "float32")),
    *(Variant("llama.cpp", name, UNQUANTIZED, f"gguf-{name}") for name in ("f16", "bf16", "f32")),
    Variant("llama.cpp", "Q8_0", EIGHT_BITS, "gguf-q8_0"),
    Variant("llama.cpp", "Q4_0", FOUR_BITS, "gguf-q4_0"),
    *_openvino("f16", UNQUANTIZED, "openvino-fp16"),
    *_openvino("int8", EIGHT_BITS, "openvino-int8"),
    *_openvino("int4", FOUR_BITS, "openvino-int4"),
    Variant("onnxruntime", "float32", UNQUANTIZED, "onnx-fp32"),
    Variant("onnxruntime", "int8", EIGHT_BITS, "onnx-int8"),
    Variant("onnxruntime", "int4", FOUR_BITS, "onnx-int4"),
)


def variants_of(system: str, kind: str) -> list[Variant]:
    return [each for each in VARIANTS if (each.system, each.kind) == (system, kind)]


def thread_counts(num_cores: int) -> list[int]:
    """All cores, and half of them: two hardware threads of a core share its units."""
    return [num_cores] if num_cores == 1 else [num_cores, num_cores // 2]


def options_of(variant: Variant, environments: Any) -> dict[str, Any]:
    """For the system's process."""
    options, kind = dict(variant.options), SYSTEMS[variant.system]
    if variant.num_threads is not None and kind.threads_option is not None:
        options[kind.threads_option] = variant.num_threads
    if variant.system == "llama.cpp":
        options["library"] = str(environments / "llama-cpp" / "lib" / SHIM)
    return options


def score(rates: Sequence[float]) -> float:
    """One number for the rates of several batch sizes: their geometric mean, so that none outweighs the others."""
    return math.exp(sum(math.log(rate) for rate in rates) / len(rates))


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was tried of a system, and the best of it.

    Attributes:
        best: None where nothing ran.
        tried: of each variant's name, tokens/s of each batch size.
        failed: of each variant's name, why it did not run.
    """

    best: Variant | None
    tried: Mapping[str, Sequence[float]]
    failed: Mapping[str, str]


def choose(
    candidates: Sequence[Variant], counts: Sequence[int], measure: Callable[[Variant], Sequence[float]]
) -> Choice:
    """The fastest of `candidates`, then with the fastest number of threads.

    Args:
        candidates: of one system, with weights of one kind.
        counts: of threads to try; the first with every candidate.
        measure: tokens/s of each batch size, all positive; raises RuntimeError where the variant does not run.
    """
    tried: dict[str, Sequence[float]] = {}
    failed: dict[str, str] = {}
    takes_threads = bool(candidates) and SYSTEMS[candidates[0].system].threads_option is not None

    def best_of(variants: Sequence[Variant]) -> Variant | None:
        for each in variants:
            if each.name not in tried:
                try:
                    tried[each.name] = measure(each)
                except RuntimeError as error:
                    failed[each.name] = str(error)
        ran = [each for each in variants if each.name in tried]
        return max(ran, key=lambda each: score(tried[each.name]), default=None)

    first = [each.with_threads(counts[0]) for each in candidates] if takes_threads else list(candidates)
    best = best_of(first)
    if best is not None and takes_threads:
        best = best_of([best.with_threads(count) for count in counts])
    return Choice(best, tried, failed)


def similar(candidates: Sequence[Variant], like: Variant) -> list[Variant]:
    """Those of `candidates` whose products have the dtype of `like`; all where none has."""
    wanted = like.options.get("inference_precision")
    return [each for each in candidates if each.options.get("inference_precision") == wanted] or list(candidates)


def write_choices(path: Path, choices: Mapping[str, Mapping[str, Choice]]) -> None:
    """Stores what is best on this processor, for another run over the same checkpoint."""
    found = {kind: {name: dataclasses.asdict(each) for name, each in of.items()} for kind, of in choices.items()}
    path.write_text(json.dumps({"cpu_flags": cpu_flags(), "choices": found}, indent=1) + "\n")


def read_choices(path: Path) -> dict[str, dict[str, Choice]]:
    """What `write_choices` has stored, but for systems of which nothing ran; empty on another processor."""
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("cpu_flags") != cpu_flags():
        return {}
    return {
        kind: {
            name: Choice(Variant(**each["best"]), each["tried"], each["failed"])
            for name, each in of.items()
            if each["best"] is not None
        }
        for kind, of in found["choices"].items()
    }
