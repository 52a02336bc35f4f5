"""``bundle verify --model`` and ``bench`` of a bundle."""

import json
import shutil

import pytest
from exported import ENGINE, with_other_weights
from typer.testing import CliRunner

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve.cli.main import app


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_verify_compares_tokens_with_those_of_eager_pytorch(bundle, command):
    done = command("bundle", "verify", bundle, "--model", EMBEDDED)
    assert done.exit_code == 0, done.stderr
    files, tokens = done.stdout.splitlines()
    assert files.endswith("all as they were written")
    assert tokens == "48 of 48 greedy tokens as in eager PyTorch, up to the first difference"


def test_verify_with_another_model_fails_and_says_by_how_much(bundle, command, tmp_path):
    shutil.copytree(bundle, tmp_path / "bundle")
    checkpoint = with_other_weights(tmp_path / "bundle", 2)
    done = command("bundle", "verify", bundle, "--model", checkpoint)
    assert done.exit_code == 1, done.stderr
    _, tokens, gap = done.stdout.splitlines()
    assert int(tokens.split(" of 48 ")[0]) < 48
    assert float(gap.removeprefix("the logits of two tokens that differ are ").split()[0]) > 0


def test_bench_has_a_row_for_each_number_of_requests(bundle, command):
    sizes = ["--batch", 1, "--batch", 4, "--prompt-len", 16, "--new-tokens", 8, "--repeats", 1]
    done = command("bench", bundle, *sizes, "--json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["batch"] for row in rows] == [1, 4]
    assert all(row["ttft_s"] > 0 and row["decode_tokens_per_s"] > 0 for row in rows)
    done = command("bench", bundle, *sizes)
    assert "decode tok/s" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "hf"], "--against: expected none with a bundle, which has no PyTorch model"),
        (["--dtype", "bfloat16"], "options of loading: expected none with a bundle"),
        (["--prompt-len", ENGINE.max_model_len], f"expected at most {ENGINE.max_model_len}, as the bundle was"),
    ],
)
def test_what_bench_cannot_do_with_a_bundle(bundle, command, options, message):
    done = command("bench", bundle, *options)
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
