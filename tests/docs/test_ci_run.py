"""``.ci/run``: the README's second command and the other checks, in order, failures kept."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import is_in_part, part

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "run"
TPU = [
    "pip install --quiet jax[tpu]==1.2.3",
    "pytest tests/aot/test_tpu_aot.py tests/aot/test_tpu_schedule.py tests/aot/test_recurrent_aot.py",
    "pytest tests/aot/test_quantized_aot.py tests/aot/test_plan_aot.py tests/aot/test_bundle_aot.py "
    "tests/aot/test_slices.py -k not gpu and not h200 --dist load",
]
GPU = [
    "pip install --quiet --no-deps jax-cuda13-pjrt==1.2.3 jax-cuda13-plugin==1.2.3 nvidia-cuda-nvcc==13.0.* "
    "nvidia-nvvm==13.0.* nvidia-cuda-runtime==13.0.*",
    "pytest tests/aot/test_gpu_aot.py tests/aot/test_gpu_recurrent_aot.py tests/aot/test_quantized_aot.py "
    "tests/aot/test_plan_aot.py tests/aot/test_bundle_aot.py -k gpu or h200 --dist load",
]
RAY = ["pip install --quiet .[ray]", "pytest tests/replicas"]
FORMATS = [
    "pip install --quiet --no-deps --target .venv/format-tools bitsandbytes>=0.50 torchao>=0.18 hqq>=0.2.8 einops "
    "termcolor autoawq auto-gptq",
    "pytest -n 0 tests/format_tools",
]
REAL = ["pip install --quiet .[real]", "python tests/real/fetch.py", "pytest -n 0 tests/real"]
BUNDLES = ["pip download --quiet --no-deps --dest .venv/wheels flatbuffers", "pytest -n 0 tests/bundles"]
TUNIX = [
    "pip install --quiet --no-deps --target .venv/tunix google-tunix>=0.1.7,<0.2 google-metrax clu jaxtyping "
    "wadler-lindig perfetto tensorboardX wrapt",
    "pytest -n 0 tests/tunix",
]
PAGE = ["pip install --quiet playwright", "python tests/page/fetch.py", "pytest -n 0 tests/page"]
CHART = ["pip install --quiet helm-python-sdk kubernetes-validate", "pytest -n 0 tests/chart"]
AGENTS = ["python tests/agents/fetch.py", "pytest -n 0 tests/agents"]
DIFFUSION = ["pip install --quiet .[diffusion]", "pytest tests/diffusion"]
AS_SERVED = (
    "pytest --as-served tests/engine/test_engine.py tests/ops/test_paged_attention_invariance.py "
    "tests/core/test_drop_in.py -k alone or same or logits or invariance or drop_in"
)
PARITY = [
    "python benchmarks/parity.py --part 1/12 --diff changes.diff",
    "python benchmarks/parity.py --task heads --part 1/12 --diff changes.diff",
    "python benchmarks/parity.py --task configurations --part 1/12",
]
SPEED = ["python benchmarks/weight_kinds.py --guard", "python benchmarks/types_speed.py --part 1/12 --guard"]
LINT = ["ruff check .", "ruff format --check .", "mypy"]
SUITE = ["pip install --quiet .[dev]", *LINT, "pip install .[dev]", "pytest", AS_SERVED]
FAST = [*LINT, "pytest -m fast"]
AGAIN = "-n 0 --last-failed --last-failed-no-failures none"
THOROUGH = "pytest --thorough --part 1/8"
CHECKS = [
    *SUITE,
    *PARITY,
    *SPEED,
    *TPU,
    *GPU,
    *RAY,
    *FORMATS,
    *REAL,
    *BUNDLES,
    *DIFFUSION,
    *PAGE,
    *CHART,
    *AGENTS,
    *TUNIX,
    THOROUGH,
]
COMPILERS = [
    TPU[0],
    GPU[0],
    RAY[0],
    FORMATS[0],
    REAL[0],
    REAL[1],
    BUNDLES[0],
    DIFFUSION[0],
    PAGE[0],
    PAGE[1],
    CHART[0],
    AGENTS[0],
    TUNIX[0],
]
SUITES = [
    TPU[1:],
    GPU[1:],
    RAY[1:],
    FORMATS[1:],
    REAL[1:],
    REAL[2:],
    BUNDLES[1:],
    DIFFUSION[1:],
    PAGE[1:],
    PAGE[2:],
    CHART[1:],
    AGENTS[1:],
    TUNIX[1:],
]

# Stands for python3: makes a virtual environment whose programs write down how they are called.
FAKE_PYTHON = """#!/bin/sh
[ "$1 $2 $3" = "-m venv .venv" ] || exit 99
test -f pyproject.toml || exit 98
mkdir -p .venv/bin
for name in pip pytest ruff mypy; do
    printf '#!/bin/sh\\necho "%s $*" >> "$CALLS"\\n[ "%s $*" != "$FAILING" ] || exit "${STATUS:-7}"\\n' \\
        $name $name > .venv/bin/$name
    chmod +x .venv/bin/$name
done
cat > .venv/bin/python <<"END"
#!/bin/sh
[ "$1" = -c ] && exec echo 1.2.3
echo "python $*" >> "$CALLS"
[ "python $*" != "$FAILING" ] || exit 7
END
chmod +x .venv/bin/python
"""


@pytest.fixture
def project(tmp_path):
    """A small project with the real script, and python3 replaced."""
    folder = tmp_path / "project"
    (folder / ".ci").mkdir(parents=True)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "old").touch()
    (folder / ".ci" / "run").write_bytes(SCRIPT.read_bytes())
    (folder / "pyproject.toml").touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text(FAKE_PYTHON)
    (programs / "python3").chmod(0o755)

    for name in ("ruff", "mypy", "pytest"):  # of the environment that is active
        (programs / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >> "$CALLS"\n[ "{name} $*" != "$FAILING" ] || exit 7\n'
        )
        (programs / name).chmod(0o755)

    def run(failing="", *arguments, status=7, seconds=0):
        calls, scratch = tmp_path / "calls", tmp_path / "scratch"
        calls.write_text("")
        scratch.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "FAILING": failing,
            "STATUS": str(status),
            "SECONDS": str(seconds),
            "TMPDIR": str(scratch),
        }
        done = subprocess.run(
            ["bash", folder / ".ci" / "run", *arguments], env=environment, stdin=subprocess.DEVNULL, timeout=60
        )
        assert not any(scratch.iterdir()), "the copy is left behind"
        assert [path.name for path in (folder / ".venv").iterdir()] == ["old"], "the user's environment was touched"
        return done.returncode, [line.strip() for line in calls.read_text().splitlines()]

    return run


def test_the_script_runs_the_second_command_of_the_readme():
    commands = re.findall(r"^```bash\n(python3 -m venv .*)\n```$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    assert commands[1] in SCRIPT.read_text().splitlines()
    assert os.access(SCRIPT, os.X_OK)


def test_all_checks_run_in_order(project):
    assert project() == (0, CHECKS)


def first_parts(calls):
    """The calls of any commit, with the parts of the first one."""
    return [re.sub(r"--part \d+/", "--part 1/", call) for call in calls]


def test_each_commit_checks_another_part(project, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "project", check=True)
    parts = []
    for _ in range(24):
        commit = [*git, "commit", "-q", "--allow-empty", "-m", "one more"]
        subprocess.run(commit, cwd=tmp_path / "project", check=True)
        parts.append([call.split()[call.split().index("--part") + 1] for call in project()[1] if "--part" in call])
    twelfths, eighths = [*range(2, 13), 1] * 2, [*range(2, 9), 1] * 3
    assert parts == [[*[f"{a}/12"] * 4, f"{b}/8"] for a, b in zip(twelfths, eighths, strict=True)]


def test_suites_with_packages_of_their_own_take_turns(project, tmp_path):
    folder = tmp_path / "project"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    always, runs = [*SUITE, *PARITY, *SPEED, THOROUGH], []
    for _ in range(3):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one more"], cwd=folder, check=True)
        runs.append(first_parts(project()[1]))
    assert all(set(always) <= set(each) for each in runs)
    owned = [each for each in CHECKS if each not in always]
    turns = [[each for each in run if each in owned] for run in runs]
    assert sorted(call for turn in turns for call in turn) == sorted(owned) and all(turns)
    assert first_parts(project("", "all")[1]) == CHECKS


def test_what_the_last_commit_changes_runs_whatever_its_turn(project, tmp_path):
    folder = tmp_path / "project"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / "tests" / "tunix").mkdir(parents=True)
    for number in range(3):
        (folder / "tests" / "tunix" / "test_it.py").write_text(f"# {number}\n")
        subprocess.run(["git", "add", "."], cwd=folder, check=True)
        subprocess.run([*git, "commit", "-q", "-m", "one more"], cwd=folder, check=True)
        assert number == 0 or set(TUNIX) <= set(project()[1])


def test_each_test_is_in_one_sixth_and_named_by_itself():
    names = [f"tests/a/test_{n}.py::test_it[{n}]" for n in range(60)]
    parts = [[name for name in names if is_in_part(name, number, 6)] for number in range(1, 7)]
    assert sorted(name for each in parts for name in each) == sorted(names) and min(map(len, parts)) > 3
    assert part("2/6") == (2, 6)
    for wrong in ("0/6", "7/6", "2", "a/b", "2/"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected N/M with N from 1 to M"):
            part(wrong)


def test_without_time_no_further_suite_begins(project, capfd):
    assert project(seconds=74 * 60) == (0, SUITE[:-1])
    named = re.findall(r"^left out after 74 minutes: (.*)", capfd.readouterr().out, re.M)
    assert len(named) == len(set(named)) == 18


def test_a_suite_that_would_take_too_long_is_left_out(project, capfd):
    assert project(seconds=55 * 60) == (0, [check for check in CHECKS if check not in TPU])
    assert capfd.readouterr().out == "left out after 55 minutes: kernels and programs for TPUs\n"


@pytest.mark.parametrize("lacking", COMPILERS)
def test_missing_extra_leaves_its_suite_out(project, lacking):
    index = CHECKS.index(lacking)
    suites = SUITES[COMPILERS.index(lacking)]
    assert project(lacking) == (0, [*CHECKS[: index + 1], *CHECKS[index + 1 + len(suites) :]])


@pytest.mark.parametrize("index", [i for i, check in enumerate(CHECKS) if check not in COMPILERS])
def test_the_first_failure_ends_it_with_its_status(project, index):
    failing = CHECKS[index] if " " in CHECKS[index] else CHECKS[index] + " "
    twice = [CHECKS[index]] if CHECKS[index] in SPEED else []
    assert project(failing) == (7, [*CHECKS[: index + 1], *twice])


TESTS = [index for index, check in enumerate(CHECKS) if check.startswith("pytest")]


@pytest.mark.parametrize("index", TESTS)
def test_failed_tests_run_once_more(project, index):
    """Status 1 of pytest: tests failed. The second run of the fake passes."""
    failing = CHECKS[index] if " " in CHECKS[index] else CHECKS[index] + " "
    again = f"{CHECKS[index]} {AGAIN}"
    assert project(failing, status=1) == (0, [*CHECKS[: index + 1], again, *CHECKS[index + 1 :]])


def test_tests_that_fail_twice_end_it(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    functions = SCRIPT.read_text()
    functions = functions[functions.index("check() {") : functions.index("# Whether there is time")]
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "pytest").symlink_to(Path(sys.executable).parent / "pytest")
    script = f"set -e\n{functions}\ncheck -q -p xdist test_it.py\necho reached\n"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout and "1 failed, 1 deselected" in done.stdout
    assert "reached" not in done.stdout


def test_a_process_of_tests_that_crashes_is_no_failed_test(tmp_path):
    (tmp_path / "conftest.py").write_text("from crashed_workers import pytest_sessionfinish, pytest_testnodedown\n")
    for number, body in enumerate(("import os; os._exit(1)", "pass")):
        (tmp_path / f"test_{number}.py").write_text(f"def test_it(): {body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--max-worker-restart", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stdout


def test_the_fast_checks_run_in_the_active_environment(project):
    assert project("", "fast") == (0, FAST)


@pytest.mark.parametrize("index", range(len(FAST)))
def test_the_first_fast_check_that_fails_ends_it(project, index):
    failing = FAST[index] if " " in FAST[index] else FAST[index] + " "
    assert project(failing, "fast") == (7, FAST[: index + 1])
