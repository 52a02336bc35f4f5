"""`benchmarks/curves.py`: what is still to be measured, rates from traces, and the pictures."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

import curves
from serving_peers.curve_pictures import PANELS, draw, label_of, series_of
from serving_peers.jobs import JobResult, Trace
from serving_peers.performance_page import page

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

MACHINE = {"cpu": "a processor", "num_cores": 2, "versions": {"jax": "1"}, "date": "today"}


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    path = tmp_path / "results" / "curves-requests.json"
    part = curves.Part(path, facts={"machine": MACHINE})
    part.add(1, {"ours": {"tokens_per_s": 5.0}})
    part.add(16, {"ours": {"tokens_per_s": 9.0}})
    again = curves.Part.read(path)
    assert again.points == part.points
    assert again.is_of({"machine": MACHINE | {"date": "tomorrow"}})
    assert not again.is_of({"machine": MACHINE | {"cpu": "another"}})
    assert not again.is_of({"machine": MACHINE | {"versions": {"jax": "2"}}})
    later = time.monotonic() + 100
    assert list(curves.missing(again, [1, 4, 16, 64], later)) == [4, 64]
    assert list(curves.missing(again, [1, 4, 16, 64], time.monotonic())) == [4], "each run goes on by one at least"


def test_points_are_medians_in_turns_and_a_system_that_fails_leaves(tmp_path):
    part, asked = curves.Part(tmp_path / "x.json"), []

    def ask(worker, turn):
        asked.append((worker, turn))
        if worker == "b" and turn == 1:
            raise RuntimeError("b has ended")
        return {"number": {0: 100.0, 1: 1.0, 2: 9.0, 3: 2.0}[turn]}

    found = curves.in_turns({"A": "a", "B": "b"}, ask, 3, part)
    assert found["A"] == {"number": 2.0}, "the first turn is not counted"
    assert asked == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert part.facts["failed"] == {"B": "b has ended"}


def test_a_rate_is_what_later_tokens_add():
    def result(num_tokens, end_s):
        return JobResult([Trace(0.0, [1] * num_tokens, [end_s] * num_tokens) for _ in range(2)])

    assert curves.decode_rate(result(1, 1.0), result(5, 3.0)) == pytest.approx(8 / 2.0)
    assert curves.decode_rate(result(1, 3.0), result(5, 2.0)) == pytest.approx(10 / 2.0), "noise: all tokens, all time"


def test_series_are_in_the_order_of_numbers_and_skip_what_is_missing():
    points = {
        "16": {"ours": {"a": 3.0}, "peer": {"a": 4.0}},
        "4": {"ours": {"a": 2.0, "b": 7.0}},
        "128": {"peer": {"a": 5.0}},
    }
    assert series_of(points, "a") == {"ours": [(4, 2.0), (16, 3.0)], "peer": [(16, 4.0), (128, 5.0)]}
    assert series_of(points, "b") == {"ours": [(4, 7.0)]}


def test_pictures_show_what_was_measured_and_are_the_same_again(tmp_path):
    points = {
        str(x): {"ours bfloat16": {"first_token_s": x / 10}, "llama.cpp f16": {"first_token_s": 0.1}} for x in (4, 48)
    }
    part = curves.Part(tmp_path / "curves-layers.json")
    for x, found in points.items():
        part.add(float(x), found)
    (picture,) = draw(tmp_path, tmp_path / "pictures")
    text = picture.read_text()
    assert picture.name == "layers.svg"
    for words in ("torchax-serve bfloat16", "llama.cpp f16", PANELS["layers"][0].title, "48"):
        assert words in text
    assert draw(tmp_path, tmp_path / "again")[0].read_text() == text


def test_the_committed_pictures_are_of_the_committed_numbers(tmp_path):
    committed = BENCHMARKS.parent / "docs" / "pictures"
    parts = {name for name in PANELS if (BENCHMARKS / "results" / f"curves-{name}.json").exists()}
    assert parts == {path.stem for path in committed.glob("*.svg") if path.stem in PANELS}
    for name in parts:
        text = (committed / f"{name}.svg").read_text()
        for systems in json.loads((BENCHMARKS / "results" / f"curves-{name}.json").read_text())["points"].values():
            assert all(label_of(system) in text for system in systems)


def result(command, rows):
    return {
        "command": f"python benchmarks/serving.py {command}",
        "machine": MACHINE | {"versions": {"jax": "1", "torch": "2", "transformers": "3"}, "is_busy": False},
        "rows": rows,
        "choices": {"8 bits": {"vllm": {"tried": {}, "failed": {"vllm int8": "a line\nno such kernel"}}}},
        "environments": {
            "vllm": {"error": "no wheel for it"},
            "onnx": {"error": None, "versions": {"onnxruntime_genai": "0.18"}},
        },
    }


def test_the_page_says_dtypes_versions_and_what_did_not_run(tmp_path):
    both = {"dtype": "bfloat16", "other_dtype": "float32"}
    decode = [
        {"case": "8 requests", "number": "decode tokens/s", "ours": 225.0, "beside": "hf", "other": 37.0} | both,
        {"case": "8 requests", "number": "decode tokens/s", "ours": 225.0, "beside": "vllm", "other": 88.0},
        {"case": "8 requests, 8 bits", "number": "decode tokens/s", "ours": 301.0, "beside": "roofline", "other": 400.0}
        | {"dtype": "int8"},
    ]
    start = [{"case": "second start, 8 bits", "number": "peak GB", "ours": 0.9, "beside": "x", "other": 0.45} | both]
    for command, rows in (("decode", decode), ("start", start)):
        (tmp_path / f"serving-{command}-shape.json").write_text(json.dumps(result(command, rows)))
    (tmp_path / "serving-decode-old.json").write_text(json.dumps({"rows": []}))
    lines = page(tmp_path).splitlines()
    assert "| 16 or 32 bits | transformers, eager | float32 | 37 |" in lines
    assert "| 16 or 32 bits | torchax-serve | bfloat16 | 225 |" in lines
    assert "| 8 bits | at most, by the roofline |  | 400 |" in lines
    assert "| 8 bits | x | float32 | 0.45 |" in lines
    assert not any("88" in line for line in lines), "a row without dtypes"
    assert "* vllm int8 did not run: no such kernel" in lines
    assert "Peers: vllm: no wheel for it" in " ".join(lines)
    assert "onnxruntime_genai 0.18" in " ".join(lines)


def test_a_part_is_stored_with_its_facts(tmp_path):
    part = curves.Part(tmp_path / "curves-load.json", facts={"machine": MACHINE})
    part.add(0.5, {"ours": {"peak_gb": 1.0}})
    assert json.loads(part.path.read_text()) == {"machine": MACHINE, "points": {"0.5": {"ours": {"peak_gb": 1.0}}}}
    assert dataclasses.asdict(curves.Part.read(part.path)) == dataclasses.asdict(part)
