"""`benchmarks/weight_kinds.py`: what a processor is called, and what is above the limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weight_kinds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512f avx512_vnni amx_tile

processor\t: 1
vendor_id\t: GenuineIntel
model\t\t: 1
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
KEPT = {"int8": {"prefill": 1.0, "decode": 2.0}, "int4": {"prefill": 0.5, "decode": 3.0}}


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [(INTEL, "GenuineIntel 6 207 avx2 avx512f avx512_vnni amx_tile"), (ARM, "0xd40 asimddp i8mm"), ("", "")],
)
def test_a_processor_is_told_by_what_it_multiplies_with(cpuinfo, name):
    assert weight_kinds.processor(cpuinfo) == name


def test_what_is_above_the_limit_is_named():
    found = {"int8": {"prefill": 1.39, "decode": 2.81}, "int4": {"prefill": 0.1, "decode": 4.1}, "new": {"prefill": 9}}
    assert weight_kinds.slower(found, KEPT) == {
        "int8": ["int8, decode: expected at most 1.4 of 2 times a plain product, got 2.81"]
    }
    assert weight_kinds.slower({"int4": {"prefill": 0.8, "decode": 5.0}}, KEPT).keys() == {"int4"}
    again = weight_kinds.best_of(found, {"int8": {"prefill": 1.5, "decode": 2.5}})
    assert again["int8"] == {"prefill": 1.39, "decode": 2.5} and again["int4"] == found["int4"]


def test_numbers_of_other_processors_are_kept(tmp_path):
    path = tmp_path / "numbers.json"
    weight_kinds.keep(path, "one", KEPT)
    weight_kinds.keep(path, "other", {"int8": {"prefill": 7.0, "decode": 7.0}})
    weight_kinds.keep(path, "one", {"int8": {"prefill": 1.5, "decode": 2.5}})
    kept = json.loads(path.read_text())
    assert {key: value["numbers"]["int8"]["prefill"] for key, value in kept.items()} == {"one": 1.5, "other": 7.0}
    assert kept["one"]["numbers"]["int4"] == KEPT["int4"]


@pytest.mark.thorough
def test_the_guard_fails_beyond_the_limit(tmp_path):
    """One kind, measured, and once more: kept numbers far below what it takes."""
    path = tmp_path / "numbers.json"
    command = [sys.executable, BENCHMARKS / "weight_kinds.py", "--guard", "--kinds", "int8", "--results", path]
    key = weight_kinds.processor()
    weight_kinds.keep(path, key, {"int8": {"prefill": 0.01, "decode": 0.01}})
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "int8, prefill: expected at most 1.4 of 0.01 times" in done.stdout
