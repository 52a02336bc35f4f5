"""Loop of the chat in the terminal: reads messages, answers, and runs commands."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from model_adapters.errors import TorchaxServeError
from torchax_serve.cli.chat.conversation import Conversation
from torchax_serve.cli.chat.input import ReadMessage
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.chat.output import write_answer
from torchax_serve.cli.shared.errors import one_line, print_error
from torchax_serve.cli.shared.terminal import print_note

COMMANDS = {
    "help": ("", "this text"),
    "reset": ("", "discard the conversation; the system prompt stays"),
    "system": ("TEXT", "set the system prompt; /system alone shows it, /system off takes it away"),
    "image": ("FILE", "a picture that goes with your next message"),
    "save": ("FILE", "write the conversation to FILE as JSON"),
    "stats": ("", "requests, pages of the cache, prefix hits, tokens/s"),
    "quit": ("", "leave (also Ctrl-D)"),
}
"""Commands by name: argument, and explanation."""
HELP = "\n".join(
    [
        *(f"{f'/{name} {argument}':<15} {does}" for name, (argument, does) in COMMANDS.items()),
        'Alt-Enter, or \\ at the end of a line, begins a new line; """ begins and ends a block of lines.',
        "Tab completes commands and names of files, the arrow keys fetch what was typed before.",
        "Ctrl-C stops the answer; what is typed meanwhile is your next message.",
    ]
)
_COMMAND = re.compile(r"/(?P<name>[a-z]+)(?:\s+(?P<argument>.*))?", re.DOTALL)


class InteractiveChat:
    """Interactive conversation at a terminal.

    Args:
        conversation: State of the conversation.
        read_message: Returns the next message.
        as_json: Whether to print each answer as one JSON object.
    """

    def __init__(self, conversation: Conversation, read_message: ReadMessage, *, as_json: bool) -> None:
        self._conversation = conversation
        self._read_message = read_message
        self._as_json = as_json
        self._saved_to: set[Path] = set()
        self._commands = {
            "help": lambda argument: print_note(HELP),
            "reset": self._reset,
            "system": self._system,
            "image": self._image,
            "save": self._save,
            "stats": self._stats,
        }

    def run(self) -> None:
        """Reads and answers until the user leaves."""
        print_note("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                text = self._read_message()
            except KeyboardInterrupt:
                print_note("Ctrl-D or /quit leaves")
                continue
            except EOFError:
                return
            command = _COMMAND.fullmatch(text.strip())
            if command and command["name"] in ("quit", "exit"):
                return
            try:
                if command:
                    self._obey(command["name"], (command["argument"] or "").strip())
                elif text.strip():
                    self._answer(text)
            except TorchaxServeError as error:
                print_error(one_line(error))

    def _answer(self, text: str) -> None:
        num_discarded = self._conversation.make_room(text)
        if num_discarded:
            print_note(f"the conversation outgrew the model's memory: its oldest {num_discarded} messages are left out")
        answer = None
        try:
            with prompt_interrupts(leave_at=2):
                answer = self._conversation.answer(text)
                write_answer(answer, model_name=self._conversation.model.name, as_json=self._as_json)
        except KeyboardInterrupt:
            if answer is not None:
                answer.close()
        if answer is not None and answer.text:
            self._conversation.record(text, answer.text)

    def _obey(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            print_note(f"there is no command /{name}; " + (f"did you mean /{near[0]}?" if near else "/help lists them"))
            return
        command(argument)

    def _reset(self, argument: str) -> None:
        self._conversation.reset()
        print_note("the conversation begins anew")

    def _system(self, argument: str) -> None:
        if not argument:
            print_note(f"system prompt: {self._conversation.system or 'none'}")
            return
        self._conversation.set_system(None if argument == "off" else argument)
        print_note("system prompt " + ("taken away" if argument == "off" else "set"))

    def _image(self, argument: str) -> None:
        if not argument:
            print_note("/image needs the name of a file")
            return
        self._conversation.attach(Path(argument).expanduser())
        print_note(f"{Path(argument).name} goes with your next message")

    def _stats(self, argument: str) -> None:
        stats = self._conversation.model.stats()
        print_note("nothing has been asked yet" if stats is None else str(stats))

    def _save(self, argument: str) -> None:
        if not argument:
            print_note("/save needs the name of a file")
            return
        path = Path(argument).expanduser()
        if path.exists() and path.absolute() not in self._saved_to:
            print_error(f"{path} exists and is not of this conversation; choose another name")
            return
        messages = self._conversation.transcript()
        try:
            path.write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            print_error(f"cannot write {path}: {error.strerror}; choose another place")
            return
        self._saved_to.add(path.absolute())
        print_note(f"{len(messages)} messages written to {path}")
