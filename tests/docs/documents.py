"""The documents of the project, and the fenced blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
]
LANGUAGES = {"python", "bash", "mermaid", "text"}
"""``text`` is what the command in the block before it prints."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `index` counts the blocks of one language in one document."""

    document: str
    language: str
    index: int
    text: str

    @property
    def name(self):
        return f"{self.document}:{self.index}"


def blocks(language):
    """All blocks of a language, in the order of reading."""
    found = []
    for path in DOCUMENTS:
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
        assert {name for name, _ in fences} <= LANGUAGES, f"{path}: a block of a language that no test runs"
        texts = [text for name, text in fences if name == language]
        name = str(path.relative_to(ROOT))
        found += [Block(name, language, index, text) for index, text in enumerate(texts)]
    return found


def commands():
    """(document, command line) of every bash block, comments left out."""
    found = []
    for block in blocks("bash"):
        for line in block.text.splitlines():
            if command := re.sub(r"(^|\s+)# .*", "", line):
                found.append((block.document, command))
    return found
