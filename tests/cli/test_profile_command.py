"""``torchax-serve profile``: its tables as JSON and as text, and wrong options."""

import json

import pytest
from typer.testing import CliRunner

from torchax_serve.cli.main import app
from torchax_serve.profiling import bandwidth

RUNNER = CliRunner()


@pytest.fixture
def small_buffer(monkeypatch):
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**22)


def test_profiles_by_number_of_rows(small_buffer, tmp_path):
    found = RUNNER.invoke(
        app,
        f"profile --prompt 16 --steps 4 --rows 1,2 --json --out {tmp_path}/trace --plot {tmp_path}/profile.svg".split(),
    )
    assert found.exit_code == 0, found.output
    tables = json.loads(found.stdout)
    assert list(tables) == ["1", "2"]
    for rows, table in tables.items():
        assert list((tmp_path / "trace" / f"rows{rows}").rglob("*.xplane.pb"))
        names = [row["name"] for row in table["rows"]]
        assert "model.layers.0.mlp.down_proj" in names and "lm_head" in names
        assert sum(row["share"] for row in table["rows"]) == pytest.approx(1)
    assert b"<svg" in (tmp_path / "profile.svg").read_bytes()


def test_tables_as_text(small_buffer):
    found = RUNNER.invoke(app, ["profile", "--prompt", "8", "--steps", "4", "--rows", "1", "--by", "kernel"])
    assert found.exit_code == 0, found.output
    assert "1 request, program decode_steps" in found.stdout and "program packed" in found.stdout
    assert "tas_linear" in found.stdout and "GB/s reading" in found.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: expected a number from 1 to 2000, got 0"),
        (["--steps", "2001"], "--steps: expected a number from 1 to 2000, got 2001"),
        (["--prompt", "0"], "--prompt: expected a number from 1, got 0"),
        (["--rows", "1,x"], "--rows: expected numbers from 1 to 1024 such as 1,8, got '1,x'"),
        (["--rows", "0"], "--rows: expected numbers from 1 to 1024"),
        (["--by", "layer"], "--by: expected one of module, op, kernel, got 'layer'"),
        (["--plot", "none/profile.svg"], "there is no folder"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    found = RUNNER.invoke(app, ["profile", *options])
    assert found.exit_code == 2
    assert message in found.stderr and len(found.stderr.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = RUNNER.invoke(app, ["profile", "--out", str(tmp_path / "file")])
    assert found.exit_code == 2 and "expected a folder for new files" in found.stderr
