"""`benchmarks/types_speed.py`: sizes of models, what rows say, the guard, and what documents show."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from thorough import except_for

import types_speed
from parity_sweep import models_page, speed_table
from parity_sweep.tiny.models import _config_for
from speed_of_types import pages, processes, rows
from speed_of_types.cases import TypeCase, all_cases, named
from speed_of_types.measure import MeasuredSide, agreement
from speed_of_types.sizes import enlarged

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

ONE_OF_A_KIND = (
    "causal:qwen3",
    "causal:gemma3_text",
    "causal:qwen3_moe",
    "causal:deepseek_v3",
    "causal:falcon_h1",
    "causal:mamba2",
    "causal:bloom",
    "seq2seq:t5",
    "speech:whisper",
    "images:gemma3",
)
KINDS = {
    "causal:qwen3": "dense",
    "causal:gpt_oss": "experts",
    "causal:deepseek_v3": "latent",
    "causal:falcon_h1": "hybrid",
    "causal:mamba2": "recurrent",
    "causal:bloom": "per-sequence",
    "seq2seq:t5": "encoder-decoder",
    "speech:whisper": "speech",
    "images:gemma3": "media",
}
NEEDS_PACKAGE = ("gemma3n", "fast_vlm", "perception_lm")
"""Types with an encoder from timm, which is not installed."""
CASES = {case.name: case for case in all_cases() if case.impossible() is None and case.model_type not in NEEDS_PACKAGE}


def weights_of(config, model_class):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())


@pytest.mark.parametrize("name", except_for(ONE_OF_A_KIND, CASES))
def test_sizes_fit_each_other_and_every_kind_of_layer_stays(name):
    case = CASES[name]
    tiny = case.tiny()
    large, small = (enlarged(tiny, is_small=is_small) for is_small in (False, True))
    model_class = case.model_class()
    assert weights_of(_config_for(model_class, large), model_class) > 50e6
    assert weights_of(_config_for(model_class, small), model_class) > 2e6
    texts = [config.get_text_config(decoder=True) for config in (tiny, large, small)]
    kinds = [getattr(text, "layer_types", None) for text in texts]
    if kinds[0] is not None:
        assert [set(each) for each in kinds] == [set(kinds[0])] * 3
        assert texts[1].num_hidden_layers == len(kinds[1])


def test_kinds_and_names():
    assert {name: CASES[name].kind() for name in KINDS} == KINDS
    assert [case.name for case in named(list(CASES.values()), ["bart", "causal:bart", "llama"])] == [
        "seq2seq:bart",
        "causal:bart",
        "causal:llama",
    ]
    with pytest.raises(ValueError, match="got 'lama'"):
        named(list(CASES.values()), ["lama"])


def test_decoding_is_what_a_call_for_all_tokens_takes_longer_than_one_for_a_token():
    side = MeasuredSide("engine", None)
    side.first = [(1.0, 1.5), (2.0, 2.5), (9.0, 9.5)]
    side.all = [(5.0, 8.5), (6.0, 9.5), (99.0, 99.0)]
    found = side.summary(8)
    assert (found["prefill_s"], found["prefill_cpu_s"]) == (2.0, 2.5)
    assert (found["decode_s"], found["decode_cpu_s"]) == (4.0, 7.0)
    assert found["decode_tokens_per_s"] == pytest.approx(8 * 31 / 4.0)
    assert found["prefill_tokens_per_s"] == pytest.approx(8 * 64 / 2.0)


def test_no_call_has_the_prompts_of_another():
    class Recorded:
        calls: ClassVar[list[tuple[str, int]]] = []

        def run(self, inputs, new_tokens):
            self.calls.append((inputs, new_tokens))

        def wait(self):
            pass

    side, prompts = MeasuredSide("engine", None), iter("abcd")
    side.side = Recorded()
    for _ in range(2):
        side.turn(prompts)
    assert Recorded.calls == [("a", 1), ("b", 32), ("c", 1), ("d", 32)]


def test_agreement_is_the_part_before_the_first_other_token():
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75


def row_of(name, decode, *, requests=8, dtype="bfloat16", task="causal", kind="dense", cores_in_use=0.0, threads=0):
    ratios = dict.fromkeys(("decode", "prefill"), decode) | {f"{each}_cpu": 2.0 for each in ("decode", "prefill")}
    about = {"task": task, "type": name, "dtype": dtype, "requests": requests, "threads": threads, "kind": kind}
    about |= {"date": "2026-01-01", "cpu": "a processor", "cores": 2, "versions": {"jax": "1"}}
    about |= {"cores_in_use": cores_in_use, "status": "measured", "error": None, "executor": "packed"}
    return about | {"ratios": {"engine": ratios, "drop-in": ratios}}


def ran(name, all_cpu, error=None):
    ratios = None if all_cpu is None else {"decode": 0.1, "all_cpu": all_cpu}
    return row_of(name, 1.0) | {"ratios": {"engine": ratios}, "error": error}


def test_the_guard_finds_what_is_slower_by_processor_time():
    known = {rows.key_of(row): row for row in (ran("a", 2.0), ran("b", 2.0))}
    assert rows.slower([ran("a", 1.61), ran("b", 3.0)], known, 0.8) == {}
    assert list(rows.slower([ran("a", 1.59)], known, 0.8).values()) == [
        "causal:a: expected at least 0.8 of 2.0 times, got 1.59 times as fast as eager PyTorch"
    ]
    assert "got engine: it fails" in str(rows.slower([ran("b", None, "engine: it fails")], known, 0.8))
    assert rows.slower([ran("new", 0.1)], known, 0.8) == {}, "nothing to compare with"


def test_the_guard_measures_again_what_is_slower(tmp_path, monkeypatch, capsys):
    options = argparse.Namespace(results=tmp_path / "rows.jsonl", types=None, part=(1, 2))

    def here(name, all_cpu):
        return ran(name, all_cpu) | {"processor": types_speed.processor()}

    for row in (here("a", 2.0), here("b", 2.0), ran("a", 9.0) | {"processor": "another"}):
        rows.append(options.results, row)
    sweeps = []

    def guarded(*answers):
        """The status, and what was measured in which sweep."""
        sweeps[:] = []

        def sweep(options):
            sweeps.append((options.types, options.part))
            return answers[min(len(sweeps), len(answers)) - 1]

        monkeypatch.setattr(types_speed, "sweep", sweep)
        return types_speed.guard(argparse.Namespace(**vars(options))), list(sweeps)

    good, slow = [here("a", 2.0), here("b", 2.0)], [here("a", 1.0), here("b", 2.0)]
    again = [(None, (1, 2)), (["causal:a"], None)]
    assert guarded(good) == (0, again[:1])
    assert guarded(slow, [here("a", 1.9)]) == (0, again), "the machine was busy"
    assert guarded(slow, [here("a", 1.0)], [here("a", 1.9)]) == (0, [*again, again[1]]), "busy once more"
    assert guarded(slow, [here("a", 1.0)]) == (1, again[:1] + again[1:] * types_speed.MEASURED_AGAIN)
    assert "got 1.0 times" in capsys.readouterr().out


def test_the_guard_compares_nothing_with_rows_of_other_processors(tmp_path, monkeypatch, capsys):
    options = argparse.Namespace(results=tmp_path / "rows.jsonl", types=None, part=None)
    rows.append(options.results, ran("a", 2.0) | {"processor": "of another maker"})
    monkeypatch.setattr(types_speed, "sweep", lambda options: pytest.fail("nothing is to be measured"))
    assert types_speed.guard(options) == 0
    assert f"no rows are kept for the processor {types_speed.processor()}" in capsys.readouterr().out


def test_the_last_row_of_a_key_counts_and_files_are_written_in_order(tmp_path):
    path = tmp_path / "results" / "rows.jsonl"
    for row in (row_of("b", 1.0), row_of("a", 1.0), row_of("b", 3.0)):
        rows.append(path, row)
    rows.tidy(path)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["type"], rows.ratio(row, "decode")) for row in found] == [("a", 1.0), ("b", 3.0)]


def asked(**changed):
    values = {"dtypes": ["bfloat16"], "requests": [1], "turns": 1, "least_turns": 1, "seconds": 1.0, "log": None}
    values |= {"sides": types_speed.SIDES[:2], "is_small": True, "cores": [0], "lock": None}
    values |= {"time_limit_s": 100, "memory_limit": 4e9}
    return processes.Asked(**values | changed)


def test_a_type_that_cannot_be_built_and_one_that_takes_too_long_are_rows_with_the_reason():
    impossible, slow = TypeCase("causal", "gemma4_assistant"), TypeCase("causal", "gpt2")
    (row,) = processes.measured([impossible], asked())
    assert (row["type"], row["status"]) == ("gemma4_assistant", "impossible")
    assert "hidden_size_per_layer_input" in row["error"] or "configuration" in row["error"], row
    found = list(processes.measured([slow, slow], asked(time_limit_s=0.1)))
    assert [(row["status"], row["error"]) for row in found] == [("timed out", "no row within 0.1 s of a processor")] * 2


SIBLINGS = r"""
import subprocess, sys
tick = "import time\nwhile True: print(time.monotonic(), flush=True); time.sleep(0.01)"
timed = '''
import sys, time
from pathlib import Path
from speed_of_types.processes import alone_in_time
time.sleep(0.5)
with alone_in_time(Path(sys.argv[1])):
    began = time.monotonic()
    time.sleep(0.5)
    print(began, time.monotonic(), flush=True)
time.sleep(0.5)
'''
ticking = subprocess.Popen([sys.executable, "-c", tick])
subprocess.run([sys.executable, "-c", timed, sys.argv[1]], check=True)
ticking.kill()
"""


def test_while_one_process_is_timed_its_siblings_stand(tmp_path):
    command = [sys.executable, "-c", SIBLINGS, str(tmp_path / "lock")]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    ((began, ended),) = [line for line in lines if len(line) == 2]
    ticks = [line[0] for line in lines if len(line) == 1]
    assert not [tick for tick in ticks if began + 0.1 < tick < ended]
    assert min(ticks) < began
    assert max(ticks) > ended


def test_documents_show_the_rows_of_most_threads(tmp_path):
    path = tmp_path / pages.FILE
    for row in (
        row_of("llama", 1.5, requests=1),
        row_of("llama", 1.2),
        row_of("slow", 0.5),
        row_of("t5", 2.5, task="seq2seq", kind="encoder-decoder"),
        row_of("other", 9.0, threads=1),
    ):
        rows.append(path, row)
    found = pages.Results.of(rows.read(path).values())
    assert pages.columns(found) == {
        "causal": {"llama": {"1": 1.5, "8": 1.2}, "slow": {"8": 0.5}},
        "seq2seq": {"t5": {"8": 2.5}},
    }
    text = pages.section(tmp_path)
    assert "2 cores of a processor, 2026-01-01, by the clock; jax 1." in text.replace("\n", " ")
    assert "| dense | 2 | 1.50 | 1.50 | 0.85 | 0.85 |  |  |  |  |" in text
    assert "`slow` 0.50." in text
    picture = pages.draw(tmp_path, tmp_path / "pictures").read_text()
    assert "decode, engine over eager, 8 requests" in picture
    assert pages.section(tmp_path / "empty") is None


def test_on_a_busy_machine_ratios_are_those_of_processor_time(tmp_path):
    found = pages.Results.of([row_of("llama", 0.1, cores_in_use=1.5)])
    assert pages.columns(found)["causal"]["llama"] == {"8": 2.0}
    assert "by processor time" in found.machine()


def test_documents_show_the_processor_that_measured_last(tmp_path):
    old = row_of("llama", 9.0) | {"processor": "A avx2 avx512f", "date": "2025-01-01"}
    new = [row_of("t5", value, dtype=dtype) for dtype, value in (("bfloat16", 7.0), ("float32", 2.0))]
    new = [row | {"processor": "B avx2"} for row in new]
    found = pages.Results.of([old, *new])
    assert found.dtype == "float32"  # eager PyTorch is at its best
    assert pages.columns(found) == {"causal": {"t5": {"8": 2.0}}}
    for row in (old, *new):
        rows.append(tmp_path / pages.FILE, row)
    assert "no AVX-512" in pages.section(tmp_path)


def test_columns_of_the_page_of_models(tmp_path, monkeypatch):
    path = tmp_path / "ratios.json"
    speed_table.write(
        {"command": "python x", "machine": "here", "dtype": "bfloat16"},
        {"causal": {"llama": {"1": 1.54, "8": 0.2}}},
        path,
    )
    stored = speed_table.read(path)
    monkeypatch.setattr(speed_table, "read", lambda: stored)
    text = models_page.document()
    assert "| llama | 1.5 | 0.2 |" in text.splitlines()
    assert "| gpt2 |" not in text  # no measurement
    assert "`python x` on here" in text
    assert speed_table.cells(stored, "seq2seq", "t5") == ()


def test_rows_of_several_processors(tmp_path):
    path = tmp_path / "rows.jsonl"
    days = {"one": "2026-01-02", "two": "2026-01-01"}
    for name, day in days.items():
        rows.append(path, row_of("a", 1.0) | {"processor": name, "date": day})
    rows.tidy(path)
    found = rows.read(path).values()
    assert {row["processor"] for row in found} == set(days)
    assert [row["processor"] for row in rows.newest(found)] == ["one"]
