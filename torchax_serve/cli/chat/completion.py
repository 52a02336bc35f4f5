"""Tab completion of a chat: commands after a slash, file names after commands with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document


class CommandCompleter(Completer):
    """Completes a line that begins with a slash; messages are not completed.

    Args:
        commands: Argument and explanation by name; the argument ``FILE`` is completed as a file name.
    """

    def __init__(self, commands: Mapping[str, tuple[str, str]]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yields the completions at the cursor; none if it is not on the first line."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            for each, (takes, does) in self._commands.items():
                if each.startswith(name):
                    yield Completion(f"{each} " if takes else each, -len(name), display=f"/{each}", display_meta=does)
        elif self._commands.get(name, ("", ""))[0] == "FILE":
            path = Document(argument.lstrip())
            yield from self._paths.get_completions(path, complete_event)
