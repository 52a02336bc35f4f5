'''Input of a message of several lines: Alt-Enter, a backslash at the end, or a block in """.'''

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = ">>> "
CONTINUATION = "... "
_BLOCK = '"""'

ReadMessage = Callable[[], str]
"""Returns the next message; raises ``EOFError`` at Ctrl-D and ``KeyboardInterrupt`` at Ctrl-C."""


def is_open_block(text: str) -> bool:
    '''Returns whether `text` begins a block with """ that it does not end.'''
    text = text.strip()
    return text.startswith(_BLOCK) and (len(text) < 2 * len(_BLOCK) or not text.endswith(_BLOCK))


def continues(text: str) -> bool:
    """Returns whether Enter after `text` begins another line of the same message."""
    return is_open_block(text) or (not text.lstrip().startswith(_BLOCK) and text.endswith("\\"))


def without_mark(text: str) -> str:
    """Returns `text`, which `continues`, without the backslash at its end."""
    return text if is_open_block(text) else text[:-1]


def message_of(text: str) -> str:
    """Returns the message in the typed `text`: the inside of a block, or the text itself."""
    stripped = text.strip()
    if stripped.startswith(_BLOCK) and not is_open_block(stripped):
        return stripped[len(_BLOCK) : -len(_BLOCK)].strip("\n")
    return text


def read_lines(read_line: Callable[[str], str]) -> str:
    """Reads a message line by line by `read_line`, which is given the prompt to show."""
    text = read_line(PROMPT)
    while continues(text):
        text = without_mark(text) + "\n" + read_line(CONTINUATION)
    return message_of(text)


def terminal_reader(commands: Mapping[str, tuple[str, str]], *, with_history: bool) -> ReadMessage:
    """Returns a reader for the terminal of this process.

    Args:
        commands: Commands that Tab completes after a slash: argument and explanation by name.
        with_history: Whether messages are stored for later chats (`torchax_serve.cli.chat.history`).
    """
    if os.environ.get("TERM") in (None, "", "dumb"):
        # No cursor keys there; input() writes its prompt and nothing else.
        return lambda: read_lines(input)
    session = _prompt_session(commands, with_history)
    return lambda: message_of(session.prompt())


def _prompt_session(commands: Mapping[str, tuple[str, str]], with_history: bool) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    from torchax_serve.cli.chat.completion import CommandCompleter
    from torchax_serve.cli.chat.history import private_history

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if not continues(buffer.text):
            buffer.validate_and_handle()
            return
        buffer.text = without_mark(buffer.text)
        buffer.cursor_position = len(buffer.text)
        buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        PROMPT,
        multiline=True,
        key_bindings=bindings,
        prompt_continuation=lambda width, line_number, wrap_count: CONTINUATION,
        # Where stdout goes to a file, the prompt is shown on the terminal that stderr has.
        output=create_output(always_prefer_tty=True),
        enable_suspend=True,
        completer=CommandCompleter(commands),
        complete_while_typing=False,
        history=private_history() if with_history else InMemoryHistory(),
    )
