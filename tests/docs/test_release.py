"""The release script: versions, the changelog's section, the metadata of wheels."""

import datetime
import importlib.util
from email.parser import Parser

import pytest
from documents import ROOT

DAY = datetime.date(2030, 1, 2)
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n* A thing.\n\n## [0.1.0] - 2026-11-26\n\n* The first.\n"


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "packaging" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_unreleased_gets_version_and_day(release):
    made = release.dated_changelog(CHANGELOG, "0.2.0", DAY)
    assert made == CHANGELOG.replace("## [Unreleased]", "## [0.2.0] - 2030-01-02")
    assert release.section_of(made, "0.2.0") == "### Added\n\n* A thing."
    assert release.dated_changelog(made, "0.2.0", DAY) == made
    with pytest.raises(SystemExit, match=r"expected first the section \[0.2.0\] with its day, got ## \[Unreleased\]"):
        release.section_of(CHANGELOG, "0.2.0")


@pytest.mark.parametrize(
    ("text", "version", "said"),
    [
        (CHANGELOG, "0.1.0", r"no earlier section \[0.1.0\]"),
        (CHANGELOG.replace("* A thing.\n", ""), "0.2.0", r"expected entries in \[Unreleased\], got none"),
        (CHANGELOG.replace("* A thing.\n", "* A thing.\n* B.\n* A thing.\n"), "0.2.0", r"got twice: \* A thing"),
        (CHANGELOG.replace("Unreleased", "0.3.0"), "0.2.0", r"or \[0.2.0\], got 0.3.0"),
        ("# Changelog\n", "0.2.0", "got none"),
    ],
)
def test_changelogs_that_cannot_be_released(release, text, version, said):
    with pytest.raises(SystemExit, match=said):
        release.dated_changelog(text, version, DAY)


def test_versions(release):
    for version, before in (("0.1.0", "0.1.0"), ("0.10.0", "0.9.0"), ("1.0.0", "1.0.0rc2"), ("1.0.0rc2", "1.0.0b9")):
        release.check_version(version, before)
    for version, said in (
        ("1.0", "such as"),
        ("v1.0.0", "such as"),
        ("01.0.0", "such as"),
        ("0.0.9", "at least 0.1.0"),
    ):
        with pytest.raises(SystemExit, match=said):
            release.check_version(version, "0.1.0")


def test_the_version_of_this_tree_is_one_and_can_be_changed_everywhere(release):
    texts = {path: path.read_text("utf-8") for path in release.PLACES}
    (version,) = {each for path, text in texts.items() for each in release.versions_of(text, release.PLACES[path])}
    for path, text in texts.items():
        changed = release.with_version(text, release.PLACES[path], "9.8.7")
        assert set(release.versions_of(changed, release.PLACES[path])) == {"9.8.7"}
        assert changed.replace("9.8.7", version) == text
    with pytest.raises(SystemExit, match="expected a line"):
        release.with_version("name = 1\n", release.PLACES[release.PROJECT], "9.8.7")


def test_the_changelog_of_this_tree_can_be_released(release):
    text = release.CHANGELOG.read_text("utf-8")
    first = release._SECTION.search(text)[1]
    version = "99.0.0" if first == "Unreleased" else first
    assert release.section_of(release.dated_changelog(text, version, DAY), version)


HEADERS = "Version: 0.2.0\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n"
FILES = ["torchax_serve-0.2.0.dist-info/licenses/LICENSE"]


@pytest.mark.parametrize(
    ("headers", "more", "said"),
    [
        (HEADERS, [], None),
        (HEADERS.replace("0.2.0", "0.1.0"), [], "expected Version: 0.2.0, got 0.1.0"),
        (HEADERS.replace("Apache-2.0", "MIT"), [], "License-Expression"),
        (HEADERS, ["tests/a.py"], "packages alone, got tests/a.py"),
    ],
)
def test_metadata_of_a_wheel(release, headers, more, said):
    parsed = Parser().parsestr(headers, headersonly=True)
    check = release.check_metadata
    if said is None:
        check("torchax_serve-0.2.0-py3-none-any.whl", parsed, [*FILES, *release.NEEDED], "0.2.0")
        for left_out in (*FILES, *release.NEEDED):
            kept = [each for each in (*FILES, *release.NEEDED) if each != left_out]
            with pytest.raises(SystemExit, match="got none"):
                check("torchax_serve-0.2.0-py3-none-any.whl", parsed, kept, "0.2.0")
        check("torchax_serve_kernels-0.2.0-py3-none-linux_x86_64.whl", parsed, FILES, "0.2.0")
        return
    with pytest.raises(SystemExit, match=said):
        check("torchax_serve-0.2.0-py3-none-any.whl", parsed, [*FILES, *release.NEEDED, *more], "0.2.0")


def test_files_of_a_release(release):
    files = ["torchax_serve-0.2.0-py3-none-any.whl", "torchax_serve-0.2.0.tar.gz"]
    kernels = "torchax_serve_kernels-0.2.0-py3-none-linux_x86_64.whl"
    release.check_names(files, "0.2.0", has_kernels=False)
    release.check_names([*files, kernels], "0.2.0", has_kernels=True)
    for names, has_kernels in ((files[1:], False), (files, True), ([*files, kernels], False), ([], False)):
        with pytest.raises(SystemExit, match=r"expected torchax_serve-0\.2\.0-py3-none-any\.whl"):
            release.check_names(names, "0.2.0", has_kernels=has_kernels)
