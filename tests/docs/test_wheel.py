"""What an installation gets: every file of the packages, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

from documents import ROOT

PACKAGES = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")
LARGEST_EMBEDDED_BYTES = 10_000_000


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    leave_out = shutil.ignore_patterns("__pycache__", "*.so")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, project / name, ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    for name in ("tests", "examples", "benchmarks"):
        (project / name).mkdir()
        (project / name / "module.py").touch()
    expected = {
        str(path.relative_to(project)) for name in PACKAGES for path in (project / name).rglob("*.*") if path.is_file()
    }

    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=project, check=True, capture_output=True, timeout=120
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        (metadata,) = (archive.read(name).decode() for name in sizes if name.endswith(".dist-info/METADATA"))
        (commands,) = (archive.read(name).decode() for name in sizes if name.endswith(".dist-info/entry_points.txt"))
    assert {name for name in sizes if ".dist-info/" not in name} == expected
    assert {
        "torchax_serve/embedded/model.safetensors",
        "model_adapters/ops/cpu/simd.h",
        "torchax_serve/py.typed",
    } <= expected
    headers = Parser().parsestr(metadata, headersonly=True)
    assert (headers["License-Expression"], headers["License-File"]) == ("Apache-2.0", "LICENSE")
    assert (headers["Requires-Python"], headers["Description-Content-Type"]) == (">=3.11", "text/markdown")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in sizes)
    assert "Typing :: Typed" in headers.get_all("Classifier") and "tpu" in headers["Keywords"].split(",")
    assert "torchax-serve = torchax_serve.cli.main:main" in commands
    embedded = {name: size for name, size in sizes.items() if name.startswith("torchax_serve/embedded/")}
    assert sum(embedded.values()) <= LARGEST_EMBEDDED_BYTES
