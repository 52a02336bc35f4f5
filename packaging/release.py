"""Prepares a release: checks, the dated section of the changelog, wheels and a source archive, their checks.

    python packaging/release.py 0.2.0           # writes the version and the changelog's section, to be committed
    python packaging/release.py 0.2.0 --build   # of a clean tree: builds, checks, prints the commands to publish

The first call changes the version where it stands and the changelog, the second one nothing. Both publish nothing. The
environment has the project with its extra ``dev`` and ``twine``; ``--no-kernels`` leaves the wheel of built kernels
out, which needs a C++ compiler and some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
PROJECT = ROOT / "pyproject.toml"
PLACES = {
    PROJECT: r'^(version = ")([^"]+)(")$',
    ROOT / "packaging" / "kernels" / "pyproject.toml": r'^(version = ")([^"]+)(")$',
    ROOT / "torchax_serve" / "__init__.py": r'^(__version__ = ")([^"]+)(")$',
    ROOT / "deploy" / "chart" / "Chart.yaml": r"^((?:v|appV)ersion: )(\S+)()$",
}
"""Where the version stands, and the lines that have it."""
UNRELEASED = "## [Unreleased]"
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc)\d+)?")
_SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.M)
LICENSE = "Apache-2.0"
NEEDED = ("torchax_serve/embedded/model.safetensors", "model_adapters/ops/cpu/simd.h", "torchax_serve/py.typed")
"""Files that are no Python, of which a wheel without has lost its data."""


def check_version(version: str, before: str) -> None:
    """Raises `SystemExit` unless a version has the form of one and is not below the one before."""
    if not _VERSION.fullmatch(version):
        raise SystemExit(f"expected a version such as 1.2.3 or 1.2.3rc1, got {version!r}")
    if _order(version) < _order(before):
        raise SystemExit(f"expected a version of at least {before}, got {version}")


def _order(version: str) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if numbers is None:
        raise SystemExit(f"expected a version such as 1.2.3 in pyproject.toml, got {version!r}")
    stage = {"a": 0, "b": 1, "rc": 2, None: 3}[numbers[4]]
    return (*map(int, numbers.group(1, 2, 3)), stage, int(numbers[5] or 0))


def dated_changelog(text: str, version: str, day: datetime.date) -> str:
    """Returns a changelog whose section of what is unreleased is that of a version.

    A changelog whose first section is the version's already gets the day.

    Raises:
        SystemExit: There is nothing to release, or the version has a section further down.
    """
    sections = [(each[1], each.start(), each.end()) for each in _SECTION.finditer(text)]
    names = [name for name, _, _ in sections]
    if not sections or names[0] not in ("Unreleased", version):
        found = names[0] if names else "none"
        raise SystemExit(f"CHANGELOG.md: expected first a section {UNRELEASED} or [{version}], got {found}")
    if version in names[1:]:
        raise SystemExit(f"CHANGELOG.md: expected no earlier section [{version}], got one; choose another version")
    _, start, end = sections[0]
    rest = text[end : sections[1][1]] if len(sections) > 1 else text[end:]
    if not re.search(r"^\* ", rest, re.M):
        raise SystemExit(f"CHANGELOG.md: expected entries in [{names[0]}], got none")
    if repeated := sorted(
        {line for line in rest.splitlines() if line.startswith("* ") and rest.count(f"{line}\n") > 1}
    ):
        raise SystemExit(f"CHANGELOG.md: expected each entry once, got twice: {repeated[0]}")
    return f"{text[:start]}## [{version}] - {day.isoformat()}{text[end:]}"


def section_of(text: str, version: str) -> str:
    """Returns the notes of the version of the first section; `SystemExit` if that is another, or has no day."""
    first = _SECTION.search(text)
    if first is None or first[1] != version or first[2] is None:
        got = "none" if first is None else first[0]
        raise SystemExit(f"CHANGELOG.md: expected first the section [{version}] with its day, got {got}")
    following = _SECTION.search(text, first.end())
    return text[first.end() : following.start() if following else len(text)].strip()


def with_version(text: str, lines: str, version: str) -> str:
    """Returns a file whose `lines`, a pattern of three groups, have another version."""
    changed, count = re.subn(lines, rf"\g<1>{version}\g<3>", text, flags=re.M)
    if not count:
        raise SystemExit(f"expected a line {lines} in the file, got none")
    return changed


def versions_of(text: str, lines: str) -> list[str]:
    """Returns the versions of the `lines` of a file that have one."""
    return [each[2] for each in re.finditer(lines, text, re.M)]


def check_metadata(name: str, headers: Message, files: Iterable[str], version: str) -> None:
    """Raises `SystemExit` for a wheel whose metadata, licences or files are not those of the release."""
    files = set(files)
    wanted = {"Version": version, "License-Expression": LICENSE, "License-File": "LICENSE"}
    for key, value in wanted.items():
        if headers[key] != value:
            raise SystemExit(f"{name}: expected {key}: {value}, got {headers[key]}")
    if not any(each.endswith(".dist-info/licenses/LICENSE") for each in files):
        raise SystemExit(f"{name}: expected the text of the licence in it, got none")
    if name.startswith("torchax_serve-") and (missing := [each for each in NEEDED if each not in files]):
        raise SystemExit(f"{name}: expected {', '.join(missing)} in it, got none")
    if left := [each for each in files if each.startswith(("tests/", "benchmarks/", "examples/"))]:
        raise SystemExit(f"{name}: expected packages alone, got {left[0]}")


def check_names(names: Sequence[str], version: str, *, has_kernels: bool) -> None:
    """Raises `SystemExit` unless files are those of a release: a source archive and its wheels."""
    expected = [f"torchax_serve-{version}-py3-none-any.whl", f"torchax_serve-{version}.tar.gz"]
    kernels = [name for name in names if name.startswith(f"torchax_serve_kernels-{version}-") and name.endswith(".whl")]
    if sorted(set(names) - set(kernels)) != expected or len(kernels) != has_kernels:
        raise SystemExit(
            f"expected {', '.join(expected)}{' and kernels' * has_kernels}, got {', '.join(names) or 'none'}"
        )


def check_wheel(path: Path, version: str) -> None:
    """Raises `SystemExit` for a wheel that is not one of the release."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (metadata,) = (each for each in names if each.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(metadata).decode(), headersonly=True)
    check_metadata(path.name, headers, names, version)


def check_sources(path: Path, version: str) -> None:
    """Raises `SystemExit` for a source archive without what its wheel is built from."""
    with tarfile.open(path) as archive:
        names = {each.partition("/")[2] for each in archive.getnames()}
    if missing := [each for each in (*NEEDED, "LICENSE", "README.md", "pyproject.toml") if each not in names]:
        raise SystemExit(f"{path.name}: expected {', '.join(missing)} in it, got none")
    if not path.name.endswith(f"-{version}.tar.gz"):
        raise SystemExit(f"{path.name}: expected an archive of {version}, got another")


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> str:
    """Returns what a command prints; `SystemExit` with the end of its output if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def check_clean() -> None:
    """Raises `SystemExit` if the working tree differs from its commit."""
    if changed := run(["git", "status", "--porcelain"]).splitlines():
        raise SystemExit(
            f"expected a tree as it is committed, got {len(changed)} changed files, such as {changed[0][3:]}"
        )


def build(out: Path, version: str, *, has_kernels: bool) -> list[Path]:
    """Builds wheels and the source archive from what is committed, and checks them; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"--out: expected an empty folder, got {out} with files; choose another")
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "sources"
        sources.mkdir()
        run(["git", "archive", "--format=tar", "-o", Path(scratch) / "sources.tar", "HEAD"])
        with tarfile.open(Path(scratch) / "sources.tar") as archive:
            archive.extractall(sources, filter="data")
        for kind in ("sdist", "wheel"):  # setuptools builds one in a process
            make = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
            run([sys.executable, "-c", make, out.resolve()], cwd=sources)
        if has_kernels:
            run([sys.executable, sources / "packaging" / "kernels" / "build.py", "--out", out.resolve()], cwd=sources)
    made = sorted(out.iterdir())
    check_names([path.name for path in made], version, has_kernels=has_kernels)
    for path in made:
        if path.suffix == ".whl":
            check_wheel(path, version)
        else:
            check_sources(path, version)
    print(run([sys.executable, "-m", "twine", "check", "--strict", *made]), end="")
    return made


def main() -> None:
    """Prepares the release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of the release, such as 1.2.3")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="empty folder for wheels and source archive")
    parser.add_argument("--build", action="store_true", help="build what is committed, after the changelog is")
    parser.add_argument("--no-kernels", action="store_true", help="leave the wheel of built kernels out")
    asked = parser.parse_args()
    texts = {path: path.read_text("utf-8") for path in PLACES}
    check_version(asked.version, versions_of(texts[PROJECT], PLACES[PROJECT])[0])
    check_clean()
    if f"v{asked.version}" in run(["git", "tag", "--list"]).split():
        raise SystemExit(f"expected a version without a tag, got v{asked.version}, which has one")
    if not asked.build:
        changelog = dated_changelog(CHANGELOG.read_text("utf-8"), asked.version, datetime.date.today())
        changed = {path: with_version(text, PLACES[path], asked.version) for path, text in texts.items()}
        for path, text in {**changed, CHANGELOG: changelog}.items():
            path.write_text(text, "utf-8")
        print(f"changed for {asked.version}; run .ci/run, then:")
        print(f"git commit -am 'release: {asked.version}' && python packaging/release.py {asked.version} --build")
        return
    for path, text in texts.items():
        if (found := versions_of(text, PLACES[path])) != [asked.version] * len(found) or not found:
            raise SystemExit(f"{path.relative_to(ROOT)}: expected version {asked.version}, got {', '.join(found)}")
    notes = section_of(CHANGELOG.read_text("utf-8"), asked.version)
    made = build(asked.out, asked.version, has_kernels=not asked.no_kernels)
    print(f"{len(notes.splitlines())} lines of notes; to publish:")
    print(f"git tag -a v{asked.version} -m 'torchax-serve {asked.version}' && git push origin v{asked.version}")
    print(f"twine upload {' '.join(str(path) for path in made)}")


if __name__ == "__main__":
    main()
