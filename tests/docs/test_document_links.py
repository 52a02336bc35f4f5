"""What the documents point to is there."""

import re

import pytest
from documents import DOCUMENTS, ROOT, blocks

# Words that no other project uses for these things; docs/vocabulary.md has those to write. docs/models.md is generated.
PRIVATE_WORDS = re.compile(r"\b(roads?|rungs?|tickets?|seats?|roster|heard|lone|fast loop)\b", re.IGNORECASE)
PACKAGES = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(path):
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    files = re.findall(r"`([\w./-]+/[\w.-]+\.\w+)`", text)
    for link in links:
        assert (path.parent / link).exists(), f"{path.name} links to {link}"
    for file in files:
        assert (ROOT / file).exists(), f"{path.name} speaks of {file}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_use_the_terms_of_the_field(path):
    text = "" if path.name == "models.md" else path.read_text()
    assert not [line for line in text.splitlines() if PRIVATE_WORDS.search(line)]


def test_architecture_diagram_names_existing_modules():
    picture = blocks("mermaid")[0].text
    shown = {}
    for package in ("torchax_serve", "model_adapters"):
        inside = picture.partition(f"subgraph {package}\n")[2].partition("\n    end")[0]
        labels = re.findall(r'\["([\w, ]+):', inside)
        shown[package] = {name for label in labels for name in label.split(", ")}
    assert {package: len(names) for package, names in shown.items()} == {"torchax_serve": 23, "model_adapters": 11}
    for package, names in shown.items():
        for name in names:
            module = ROOT / package / name
            assert module.is_dir() or module.with_suffix(".py").is_file(), f"there is no {package}.{name}"
    for name in PACKAGES:
        assert name in picture
