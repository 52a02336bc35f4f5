"""The script that runs the core of the suite with other releases: what it asks pip for, what it reports."""

import importlib.util
import tomllib

import pytest
from documents import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Stands for Python: makes an environment whose programs write down how they are called.
FAKE_PYTHON = """#!/bin/sh
[ "$1 $2 $3" = "-m venv .venv" ] || exit 99
mkdir -p .venv/bin
cat > .venv/bin/python <<"END"
#!/bin/sh
case "$2" in
    *importlib*) echo "Python, 3.99.0, torch 1.2, jax 3.4, transformers 5.6"; exit;;
esac
echo "$*" >> CALLS
case "$*" in
    *FAILING*) echo "===== 1 failed, 2 passed in 3.00s ====="; exit 1;;
    *pytest*) echo "===== 7 passed in 8.00s ====="; exit;;
esac
END
chmod +x .venv/bin/python
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("try_releases", ROOT / "packaging" / "try_releases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_oldest_are_the_lowest_that_the_project_takes(script):
    extra, *pinned = script.requirements_of("oldest", PROJECT)
    assert extra == ".[dev]"
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for pin in map(Requirement, pinned):
        (exact,) = pin.specifier
        bounds = [each.specifier for each in map(Requirement, needed) if each.name == pin.name]
        assert len(bounds) > 1
        assert exact.operator == "=="
        assert all(bound.contains(exact.version) for bound in bounds)
        assert not any(bound.contains("0.1") for bound in bounds)
        assert {each.version for bound in bounds for each in bound if each.operator == ">="} == {exact.version}
    assert [pin.partition("==")[0] for pin in pinned] == ["torch", "jax", "transformers"]


def test_a_package_without_a_lower_bound_is_named(script):
    project = {"name": "a", "dependencies": ["torch"], "optional-dependencies": {"dev": []}}
    with pytest.raises(SystemExit, match=r"expected a lower bound \(>=\) for torch, got none"):
        script.requirements_of("oldest", project)


def test_the_newest_lack_nothing_of_the_suite_but_upper_bounds(script):
    own, *others = script.requirements_of("newest", PROJECT)
    dev = PROJECT["optional-dependencies"]["dev"]
    assert own == dev[0].replace("torchax-serve[", ".[")
    for given, asked in zip(map(Requirement, dev[1:]), map(Requirement, others), strict=True):
        assert given.name == asked.name
        kept = [each for each in given.specifier if each.operator != "<" or given.name not in script.VARIED]
        assert sorted(map(str, asked.specifier)) == sorted(map(str, kept))


def test_what_is_run_exists(script):
    assert [name for name in script.CORE if not (ROOT / name).exists()] == []


def test_each_set_has_an_environment_and_a_line(script, tmp_path, monkeypatch, capfd):
    project, calls, python = tmp_path / "project", tmp_path / "calls", tmp_path / "python"
    project.mkdir()
    (project / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    python.write_text(FAKE_PYTHON.replace("CALLS", str(calls)))
    python.chmod(0o755)
    monkeypatch.setattr(script, "ROOT", project)

    assert script.main(["today", "--python", str(python), "--tests", "a.py"]) == 0
    said = capfd.readouterr().out.splitlines()
    line = "today: Python, 3.99.0, torch 1.2, jax 3.4, transformers 5.6"
    assert said[-1] == f"{line}: 7 passed in 8.00s; 7 passed in 8.00s"
    assert calls.read_text().splitlines() == [
        "-m pip install --quiet .[dev]",
        "-m pytest -m fast",
        "-m pytest a.py",
    ]
    assert sorted(path.name for path in project.iterdir()) == ["pyproject.toml"]

    assert script.main(["oldest", "today", "--python", str(python), "--tests", "FAILING"]) == 1
    lines = capfd.readouterr().out.splitlines()[-2:]
    assert [each.partition(":")[0] for each in lines] == ["oldest", "today"]
    assert all(each.endswith("7 passed in 8.00s; 1 failed, 2 passed in 3.00s") for each in lines)


def test_an_unknown_set_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["latest"])
    assert "expected sets of oldest, today, newest, got latest" in capsys.readouterr().err
