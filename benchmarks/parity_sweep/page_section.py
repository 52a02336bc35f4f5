"""`Section`: a part of docs/models.md, and the table of single results that stands elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torchax_serve.parity.result import EXECUTORS, PASSED, Result

RESULTS_PAGE = "benchmarks/results/models.md"
"""The page of all tables, from the root of the project."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of docs/models.md.

    Attributes:
        title: Its heading.
        lines: Its text.
        headings: Of the table of single results.
        rows: Of that table.
        legend: Explains the columns.
    """

    title: str
    lines: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str = ""

    def text(self) -> str:
        """Returns the section with a link to its table."""
        anchor = self.title.lower().replace(" ", "-")
        link = f"[All {len(self.rows)} results](../{RESULTS_PAGE}#{anchor})."
        return "\n".join([f"## {self.title}", "", *self.lines, "", link]) + "\n"

    def table(self) -> str:
        """Returns the table under the same heading."""
        legend = [self.legend, ""] if self.legend else []
        return "\n".join([f"## {self.title}", "", *legend, *table_lines(self.headings, self.rows)]) + "\n"


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table in Markdown."""
    return [f"| {' | '.join(each)} |" for each in (headings, ["---"] * len(headings), *rows)]


def names_by_executor(executors: Sequence[str], results: Mapping[str, Result]) -> list[str]:
    """Lists the types that pass, by the executor that runs them; all in one line without executors."""
    passed = [name for name, result in sorted(results.items()) if result.status == PASSED]
    if not executors:
        return [", ".join(passed) + "."]
    lists = {each: [name for name in passed if results[name].executor == each] for each in executors}
    return [
        f"* `{executor}`, {EXECUTORS[executor]} ({len(names)}): {', '.join(names)}."
        for executor, names in lists.items()
        if names
    ]


def inline(text: str) -> str:
    """Returns `text` as it may stand in a line or a cell of Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
