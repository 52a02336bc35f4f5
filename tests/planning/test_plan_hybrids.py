"""`benchmarks/plan_hybrids.py`: the table in docs/plan.md is what it makes of the stored plans."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_hybrids  # noqa: E402  # a script

from torchax_serve.planning.chips import chip_of  # noqa: E402

ROWS = json.loads(plan_hybrids.RESULTS.read_text())["rows"]


def test_the_page_has_the_table_that_the_command_writes(tmp_path):
    for name in ("benchmarks", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("pictures", "__pycache__"))
    page = tmp_path / "docs" / "plan.md"
    begin, end = plan_hybrids.BEGIN, plan_hybrids.END
    text = page.read_text()
    assert text.count(begin) == text.count(end) == 1
    page.write_text(text[: text.index(begin)] + begin + "an older table\n" + text[text.index(end) :])
    command = [sys.executable, str(tmp_path / "benchmarks" / "plan_hybrids.py"), "--page"]
    subprocess.run(command, check=True)
    assert page.read_text() == text


@pytest.mark.parametrize("row", [row for row in ROWS if "report" in row], ids=lambda row: str(plan_hybrids.key(row)))
def test_bounds_are_bytes_over_bandwidth(row):
    """States of the delta rule and of state spaces are read and written in each step, and counted by hand here."""
    report, (bound,) = row["report"], row["report"]["bounds"]
    shape = json.loads((ROOT / "benchmarks" / "shapes" / f"{row['shape']}.json").read_text())
    kinds = shape.get("layer_types") or shape["layers_block_type"]
    heads, numbers = {
        "qwen3_5_text": ("linear_num_value_heads", 128 * 128),
        "qwen3_5_moe_text": ("linear_num_value_heads", 128 * 128),
        "kimi_linear": ("linear_num_heads", 128 * 128),
        "nemotron_h": ("mamba_num_heads", 64 * 128),
        "granitemoehybrid": ("mamba_n_heads", 64 * 128),
    }[shape["model_type"]]
    parts = report["mesh"]["model"]
    recurrent = kinds.count("linear_attention") * shape[heads] * numbers * 4 // parts
    states = report["states_bytes"] / (row["slots"] + 1)
    assert recurrent < states < 1.1 * recurrent  # inputs of convolutions are the rest
    assert bound["bound_by"] == "memory" and bound["bytes_read"] > 2 * row["slots"] * recurrent
    assert bound["seconds"] == pytest.approx(bound["bytes_read"] / chip_of(row["topology"]).bytes_per_s)
