"""``doctor``: what the report has, what makes it end with 1, and what it keeps to itself."""

import dataclasses
import functools
import importlib
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from model_adapters.ops import list_ops, registry
from torchax_serve.cli.main import app
from torchax_serve.cli.shared.errors import EXIT_INTERNAL, run_and_report
from torchax_serve.diagnostics import environment, imports, kernel_checks
from torchax_serve.diagnostics.report import Fact, Section, as_markdown, without_personal_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """This process stays as it is, and what is computed is small."""
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
    monkeypatch.setattr("torchax_serve.cli.doctor._HOST_BYTES", 2**22)


def doctor(*arguments):
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"HF_TOKEN": "hf_secret"})
    assert result.stderr == ""
    return result


def test_the_report():
    result = doctor("--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["problems"]) == (0, [])
    sections = {title: {each["name"]: each for each in facts} for title, facts in report["sections"].items()}
    for name in ("torch", "torchax", "jax", "jaxlib", "transformers"):
        assert sections["Versions"][name]["value"].startswith(importlib.metadata.version(name))
    assert {"python", "torchax-serve"} <= set(sections["Versions"])
    assert {"system", "processor", "instructions", "memory", "disk"} <= set(sections["Machine"])
    assert sections["Devices"]["platform"]["value"].startswith("cpu (cpu x ")
    assert set(sections["Kernels in use"]) == {op.name for op in list_ops()}
    assert {"downloads", "compiled programs", "kernels", "plans"} <= set(sections["Folders"])
    compared = {tuple(name.split(", ")) for name in sections["Numbers of the kernels"]}
    assert compared == {
        (op.name, each.name)
        for op in list_ops()
        for each in op.implementations
        if "cpu" in each.platforms and each.name != "sharded"
    }
    assert set(sections["Speed"]) >= {"memory"}
    assert all("GB/s" in fact["value"] for fact in sections["Speed"].values())


def test_the_report_as_text_has_neither_token_nor_home(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    result = doctor("--quick")
    assert result.exit_code == 0
    assert result.stdout.startswith("# torchax-serve doctor\n\n## Versions\n\n* torchax-serve: ")
    assert "Numbers of the kernels" not in result.stdout
    assert result.stdout.endswith("## Result\n\n* nothing is broken\n")
    assert "hf_secret" not in result.stdout
    home = str(Path.home())
    assert home == "/" or not re.search(rf"{re.escape(home)}\b", result.stdout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/.cache/hub, 3 files", "~/.cache/hub, 3 files"),
        ("/home/anna/x and /data/home/ann", "/home/anna/x and /data/home/USER"),
        ("/scratch/ann/models", "/scratch/USER/models"),
        ("https://ann:secret@hub.example/x", "https://hub.example/x"),
        ("--x=/home/ann", "--x=~"),
        ("annual report", "annual report"),
    ],
)
def test_personal_data_is_removed(text, expected):
    assert without_personal_data(text, "/home/ann", "ann") == expected


def put_in_place_of_the_kernel(monkeypatch, function):
    """Has `function` stand for the C++ kernel of ``row_sum``."""
    op = registry.find("row_sum")
    kernel = registry.Implementation("cpu-ffi", ("cpu",), function)
    implementations = [kernel if each.name == "cpu-ffi" else each for each in op.implementations]
    monkeypatch.setitem(registry._OPS, "row_sum", dataclasses.replace(op, implementations=implementations))


@pytest.mark.parametrize("damage", [0.5, float("nan")])
def test_a_kernel_that_computes_something_else_is_a_problem(monkeypatch, damage):
    put_in_place_of_the_kernel(monkeypatch, lambda x: jnp.sum(x.astype(jnp.float32), -1) + damage)
    monkeypatch.setattr(kernel_checks.ops, "list_ops", lambda: [registry.find("row_sum")])
    monkeypatch.setattr(kernel_checks, "bandwidth", lambda note, buffer_bytes: ())
    result = doctor()
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "row_sum, cpu-ffi:" in line and "PROBLEM" in line]
    assert "expected at most float32 0.0001" in line
    assert line.partition("PROBLEM: ")[2] in result.stdout.partition("## Result")[2]


def test_a_kernel_that_fails_is_a_problem(monkeypatch):
    def fails(x):
        raise RuntimeError("Mosaic failed to compile\nat length")

    put_in_place_of_the_kernel(monkeypatch, fails)
    expected_of = functools.partial(kernel_checks._expected, "row_sum", size=1)
    fact = kernel_checks._compared("row_sum", "cpu-ffi", 1, expected_of)
    assert fact.state == "problem"
    assert fact.value == "float32 fails with RuntimeError: Mosaic failed to compile"


def test_failing_section_is_a_problem_and_the_report_continues(monkeypatch):
    def fails():
        yield Fact("platform", "cpu")
        raise ImportError("libcudart.so.13: cannot open\nshared object file")

    monkeypatch.setattr(environment, "devices", fails)
    result = doctor("--quick")
    assert result.exit_code == 1
    said = "cannot be looked at: ImportError: libcudart.so.13: cannot open shared object file"
    assert f"* devices:  PROBLEM: {said}" in result.stdout
    assert "## Hub" in result.stdout


def test_a_missing_package_is_a_problem_and_another_version_a_note(monkeypatch):
    original = importlib.metadata.version

    def version(name):
        if name == "torchax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "4.0.0" if name == "transformers" else original(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    facts = {fact.name: fact for fact in environment.versions()}
    assert (facts["torchax"].state, facts["transformers"].state, facts["jax"].state) == ("problem", "note", "ok")
    found, _, expected = facts["transformers"].value.partition("; expected ")
    assert found == "4.0.0" and ">=5.17" in expected.split(",")  # in the order of whoever wrote the metadata


def test_extras_are_those_of_the_package(monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(environment.EXTRAS) == set(extras) - {"dev"}
    facts = {fact.name: fact for fact in environment.extras()}
    assert facts["images"].state == "ok"
    original = importlib.metadata.version

    def version(name):
        if name == "pillow":
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    facts = {fact.name: fact for fact in environment.extras()}
    assert facts["images"] == Fact(
        "images", "pillow not installed: models that see images; pip install 'torchax-serve[images]'", "note"
    )


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    ffi = tmp_path / "torchax-serve" / "kernels"
    ffi.mkdir(parents=True)
    (ffi / "a.so").write_bytes(b"x" * 1500)
    (ffi / "b.so").symlink_to(ffi / "a.so")
    ffi.chmod(0o777)
    (tmp_path / "torchax-serve" / "plans").write_text("a file where a folder should be")
    facts = {fact.name: fact for fact in environment.folders()}
    assert facts["downloads"] == Fact("downloads", f"{tmp_path}/hf/hub, not there yet")
    assert facts["kernels"].value.startswith(f"{ffi}, 1.5 kB in 1 files; others may write there")
    assert facts["kernels"].state == "note"
    assert facts["compiled programs"].value.endswith("not there yet")
    assert facts["plans"].state == "problem"


def test_hub_is_contacted_only_on_request(monkeypatch):
    from huggingface_hub import constants

    asked = []

    class Session:
        def head(self, url, timeout):
            asked.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    facts = {fact.name: fact for fact in environment.hub(online=False)}
    assert (facts["network"].state, asked) == ("ok", [])
    facts = {fact.name: fact for fact in environment.hub(online=True)}
    assert facts["network"].state == "problem"
    assert "does not answer (Name or service not known)" in facts["network"].value
    assert asked == [constants.ENDPOINT]


def test_without_a_compiler_the_references_are_a_note(monkeypatch):
    from model_adapters.ops.cpu import build, ffi

    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(ffi, "missing", lambda: "no C++ compiler found")
    compiler, library = environment.compiler()
    assert (compiler.state, library.state) == ("note", "note")
    facts = {fact.name: fact for fact in kernel_checks.kernels_in_use()}
    assert facts["linear"].state == "note"
    assert "linear, cpu-ffi: no C++ compiler found" in facts["linear"].value


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "tpu-pallas"), ("gpu", "gpu-triton")])
@pytest.mark.parametrize("op", ["decode_attention", "paged_attention"])
def test_kernel_cases_select_accelerator_kernels(platform, kernel, op):
    with registry.on_platform(platform):
        for dtype in kernel_checks.TOLERANCE:
            assert kernel_checks._unsupported_reason(op, kernel, kernel_checks.CASES[op](dtype, 4)) is None
        facts = {fact.name: fact for fact in kernel_checks.kernels_in_use()}
    assert facts[op].value == kernel


def test_an_accelerator_that_jax_does_not_see(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    facts = {fact.name: fact for fact in environment.devices()}
    assert facts["accelerator"].state == "note"
    assert "torchax-serve[cuda]" in facts["accelerator"].value


def test_differences_are_measured_against_both_sizes():
    expected = np.asarray([1.0, -1.0, 1.0, 101.0])
    rms = float(np.sqrt(np.mean(expected**2)))
    assert kernel_checks.largest_difference(expected + 0.1 * (np.arange(4) == 1), expected) == pytest.approx(
        0.1 / (1 + rms)
    )
    assert np.isnan(kernel_checks.largest_difference(np.asarray([np.nan]), np.asarray([1.0])))


def test_markdown_lists_problems_again():
    text = as_markdown([Section("One", (Fact("a", "fine"), Fact("longer", "bad", "problem")))])
    assert text.splitlines()[2:] == [
        "## One",
        "",
        "* a:      fine",
        "* longer: PROBLEM: bad",
        "",
        "## Result",
        "",
        "* longer: bad",
    ]


BROKEN = {"torchvision": "operator torchvision::nms does not exist", "sklearn": "numpy.dtype size changed"}


def put_broken_packages(folder, monkeypatch):
    """Makes packages that raise when they are imported, as those that were built for another torch do."""
    for name, reason in BROKEN.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError({reason!r})\n")
        for known in [each for each in sys.modules if each.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
    monkeypatch.syspath_prepend(folder)


def test_a_package_that_is_there_and_cannot_be_imported_is_a_problem(tmp_path, monkeypatch):
    put_broken_packages(tmp_path, monkeypatch)
    facts = {fact.name: fact for fact in imports.imports()}
    assert {name for name, fact in facts.items() if fact.state == "problem"} == set(BROKEN)
    for name, reason in BROKEN.items():
        assert f"cannot be imported (RuntimeError: {reason})" in facts[name].value
    assert "pip uninstall torchvision" in facts["torchvision"].value
    assert "pip uninstall scikit-learn" in facts["sklearn"].value
    assert facts["torch"] == Fact("torch", "imported")


def test_a_command_names_the_package_that_cannot_be_imported(tmp_path, monkeypatch, capsys):
    put_broken_packages(tmp_path, monkeypatch)

    def command():
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:  # as the lazy modules of transformers do
            raise ModuleNotFoundError("could not import AutoProcessor") from error

    assert run_and_report(command, debug=False) == EXIT_INTERNAL
    assert capsys.readouterr().err.endswith("(torchvision cannot be imported; torchax-serve doctor says more)\n")
