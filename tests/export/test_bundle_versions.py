"""Versions of a bundle: written anew without the model, verified, watched; other weights and formats of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from exported import ENGINE, NUM_TOKENS, PROMPTS, eager_tokens, manifest_of, with_other_weights
from typer.testing import CliRunner

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import SamplingParams, serve
from torchax_serve.cli.main import app
from torchax_serve.export import versions, watch, writer
from torchax_serve.export.manifest import write_manifest
from torchax_serve.export.versions import new_version
from torchax_serve.export.watch import WatchedBundle

GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)


def tokens_of(model, prompts=PROMPTS):
    return [each.token_ids for each in model.generate_batch([list(prompt) for prompt in prompts], GREEDY)]


@pytest.fixture
def folder(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)

    def run(*arguments):
        done = CliRunner().invoke(app, ["bundle", *map(str, arguments)])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    return run


def test_info_and_verify(bundle, command):
    found = json.loads(command("info", bundle, "--json"))
    assert found["folder"] == str(bundle / "1")
    assert "max_num_seqs=4" in command("info", bundle)
    assert "all as they were written" in command("verify", bundle)


def test_refresh_writes_a_version_with_the_same_tokens(folder, command, expected):
    assert f"{folder / '2'}: " in command("refresh", folder)
    old, new = (manifest_of(folder / number) for number in "12")
    changed = {name for name in old["files"] if old["files"][name] != new["files"][name]}
    assert changed <= {entry["file"] for each in old["variants"].values() for entry in each["programs"].values()}
    with serve(folder) as model:
        assert model.manifest.folder == folder / "2"
        assert tokens_of(model) == expected


def test_two_exports_at_once_are_two_versions(tmp_path):
    out = tmp_path / "bundle"
    with new_version(out, 0) as first, new_version(out, 0) as second:
        made = []
        for each in (first, second):
            manifest = write_manifest(each.folder, {})
            with pytest.MonkeyPatch.context() as patch:
                seen = iter([[], [1]])  # first as it was before the other one was complete
                patch.setattr(versions, "_numbers", lambda out, seen=seen: next(seen))
                made.append(each.completed(manifest).folder.name)
    assert made == ["1", "2"]
    assert sorted(path.name for path in out.iterdir()) == ["1", "2"]


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_new_version_is_taken_while_requests_of_the_old_one_end(folder, expected, monkeypatch):
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    model = WatchedBundle(folder, poll_s=0.05)
    try:
        old = model.current
        old.engine.warm_up()
        old._executables.wait_for_writes()
        stream = old.stream(list(PROMPTS[0]), SamplingParams(max_new_tokens=100, ignore_eos=True))
        first = [next(stream)]
        checkpoint = with_other_weights(folder, 2)
        wait_for(lambda: model.version == 2)
        executables = model.current._executables
        num_programs = sum(each.num_programs for each in executables.functions.values())
        assert num_programs == executables.num_loaded > 0, "its programs are those of version 1, compiled before"
        rest = [*first, *stream]
        assert stream.token_ids[:NUM_TOKENS] == expected[0]
        assert len(stream.token_ids) == 100 and rest
        assert tokens_of(model.current) == eager_tokens(checkpoint) != expected
        wait_for(lambda: old._is_closed)
    finally:
        model.close()
    assert not [each for each in threading.enumerate() if each.name == "end-version"] or model.current is not old


def test_a_version_that_is_damaged_or_unlike_the_old_one_is_passed_over(folder, caplog, expected):
    model = WatchedBundle(folder, poll_s=0.05)
    try:
        shutil.copytree(folder / "1", folder / ".partial-new")
        (folder / ".partial-new" / "weights.safetensors").write_bytes(b"")
        (folder / ".partial-new").rename(folder / "2")
        wait_for(lambda: "version 2" in caplog.text)
        assert "weights.safetensors" in caplog.text
        content = manifest_of(folder / "1")
        shutil.copytree(folder / "1", folder / ".partial-new")
        for name in ("format", "format_version", "files", "digest"):
            del content[name]
        (folder / ".partial-new" / "chat_template.jinja").write_text("other")
        write_manifest(folder / ".partial-new", content)
        (folder / ".partial-new").rename(folder / "3")
        wait_for(lambda: "version 3" in caplog.text)
        assert "chat template" in caplog.text
        assert (model.version, tokens_of(model.current)) == (1, expected)
    finally:
        model.close()


def test_quantized_weights_and_bfloat16(tmp_path):
    with serve(EMBEDDED, engine=ENGINE, dtype="bfloat16", quantization="int8") as quantized:
        expected = tokens_of(quantized)
        quantized.export(tmp_path / "bundle", reference=False)
    with serve(tmp_path / "bundle") as model:
        assert "int8" in model.load_report.quantization
        assert model.dtype_name == "bfloat16"
        assert tokens_of(model) == expected
    names = manifest_of(tmp_path / "bundle" / "1")["weights"]["names"]
    assert any(isinstance(each, dict) and each["scheme"]["bits"] == 8 for each in names.values())


def test_weights_of_orbax(served, bundle, tmp_path, expected, monkeypatch):
    pytest.importorskip("orbax.checkpoint", reason="the extra orbax brings it")
    programs = manifest_of(bundle / "1")["variants"]

    def copied(self, target):  # the programs do not depend on the format of the weights
        shutil.copytree(bundle / "1" / "programs" / target.name, self.programs.root / "programs" / target.name)
        return programs[target.name]

    monkeypatch.setattr(writer.StepExporter, "export", copied)
    served.export(tmp_path / "bundle", weights="orbax")
    assert not (tmp_path / "bundle" / "1" / "weights.safetensors").exists()
    with serve(tmp_path / "bundle") as model:
        assert tokens_of(model) == expected


def test_the_weights_lie_as_they_are_mapped(bundle):
    with open(bundle / "1" / "weights.safetensors", "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    assert all((8 + size + entry["data_offsets"][0]) % 64 == 0 for name, entry in entries.items() if ":" not in name)


EXPORTING = """
import sys, time
from pathlib import Path
from torchax_serve.export.versions import new_version
with new_version(Path(sys.argv[1]), 0) as made:
    print(made.folder.name, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_export_leaves_goes_with_the_next_one(folder, command, caplog):
    (folder / ".partial-copy" / "programs").mkdir(parents=True)  # of somebody who copies a version
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTING, folder], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        name = process.stdout.readline().strip()
        assert versions.unfinished(folder) == []  # it is being written
        assert "unfinished" not in json.loads(command("info", folder, "--json"))
        process.send_signal(signal.SIGKILL)
    assert (folder / name / "programs").is_dir()
    found = json.loads(command("info", folder, "--json"))
    assert found["unfinished"] == f"{name}, of exports that were killed; the next one removes it"
    with caplog.at_level("WARNING", "torchax_serve"), new_version(folder, 0):
        pass
    assert f"{name} is removed: its export was killed" in caplog.text
    assert not (folder / name).exists() and (folder / ".partial-copy" / "programs").is_dir()
    assert "unfinished" not in json.loads(command("info", folder, "--json"))
