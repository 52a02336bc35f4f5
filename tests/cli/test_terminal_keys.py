"""What is typed and when: during an answer, in earlier chats, pasted, completed; and streams that are closed."""

import io
import os
import pty
import signal
import stat
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

import pytest
from fake_terminal import CTRL_C, CTRL_D, TAB, TIMEOUT_S, UP, Terminal, environment
from prompt_toolkit.history import InMemoryHistory
from thorough import thorough

from torchax_serve.cli.chat import history
from torchax_serve.cli.shared import errors, question
from torchax_serve.cli.shared import terminal as terminal_module

ANSWERED = ("prompt + ", "new tokens", ">>>")


def shows_keys(terminal):
    return bool(termios.tcgetattr(terminal.fd)[3] & termios.ECHO)


@pytest.mark.parametrize("kind", ["xterm", thorough("dumb")])
def test_keys_typed_during_an_answer_are_the_next_message(kind):
    with Terminal("run", "--raw", "--max-new-tokens", "40", TERM=kind) as terminal:
        terminal.wait_for("/help lists the commands", ">>>")
        terminal.type("slow\r")
        terminal.wait_for("0 1 2 3 ")
        assert not shows_keys(terminal)
        terminal.type("typed\r")
        answer, end, _ = terminal.wait_for("cut at the length limit").partition("cut at the length limit")
        assert end
        assert "typed" not in answer
        terminal.wait_for("cut at the length limit", ">>>", "typed", "5 prompt + 6 new tokens", ">>>")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_terminal_is_restored_after_an_interrupt():
    """Ctrl-C stops the answer, and the terminal is as it was; no colours where none are wanted."""
    with Terminal("run", "be slow", TERM="xterm", NO_COLOR="1") as terminal:
        terminal.wait_for("0 1 2 3 ")
        assert not shows_keys(terminal)
        terminal.type(CTRL_C)
        terminal.wait_for("stopped", "interrupted")
        assert shows_keys(terminal)
        assert terminal.status() == 130
        assert "\x1b" not in terminal.seen


def test_history_of_earlier_chats(tmp_path):
    with Terminal("run", TERM="xterm", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">>>")
        terminal.type("first\r")
        terminal.wait_for("u(first)a(", *ANSWERED)
        terminal.type("second\\\rline\r")
        terminal.wait_for("u(second\r\nline)a(", *ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    file = tmp_path / "torchax-serve" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.chmod(0o644)  # as an older program may have left it
    with Terminal("run", TERM="xterm", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">>>")
        terminal.type(UP + UP + UP + "\r")  # through both lines of the second message
        terminal.wait_for("u(first)a(", *ANSWERED)
        terminal.type("/quit\r")
        assert terminal.status() == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(history, "MAX_MESSAGES", 3)
    kept = history.private_history()
    for index in range(7):
        kept.store_string(f"message {index}\nline")
    newest = [f"message {index}\nline" for index in (6, 5, 4)]
    assert list(history.private_history().load_history_strings()) == newest
    assert history.history_file().read_text().count("message") == 3
    assert stat.S_IMODE(history.history_file().stat().st_mode) == 0o600
    history.history_file().unlink()
    history.history_file().symlink_to(tmp_path / "elsewhere")  # is not followed
    assert list(history.private_history().load_history_strings()) == []
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def short_path():
    """A folder whose files' names fit on a line of the terminal; those of `tmp_path` may not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_tab_completes_pasted_lines_are_one_message_and_nothing_is_kept(tmp_path, short_path):
    (short_path / "talk-of-today.json").write_text("[]")
    with Terminal("run", "--no-history", TERM="xterm", XDG_STATE_HOME=str(tmp_path / "state")) as terminal:
        terminal.wait_for("/help lists the commands", ">>>")
        terminal.type("/sys" + TAB)
        terminal.wait_for("/sys", "tem")
        terminal.type("Be kind\r")
        terminal.wait_for("system prompt set", ">>>")
        terminal.type(f"/save {short_path}/talk" + TAB)
        terminal.wait_for("today.json")
        terminal.type("\r")
        terminal.wait_for("exists and is not of this conversation", ">>>")
        terminal.type("/sistem\r")
        terminal.wait_for("there is no command /sistem; did you mean /system?", ">>>")
        terminal.type("\x1b[200~one\r/two\rthree\x1b[201~\r")
        terminal.wait_for("u(one\r\n/two\r\nthree)a(", *ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    assert not (tmp_path / "state").exists()


def test_unwritable_history_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    assert isinstance(history.private_history(), InMemoryHistory)
    assert capsys.readouterr().err == (
        "what is typed is not kept for the next time: Not a directory (--no-history leaves this note out)\n"
    )


def test_passing_note_fits_on_one_line(monkeypatch):
    """A terminal takes away the line of the cursor alone."""
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", printed)
    monkeypatch.setattr(printed, "fileno", lambda: 2, raising=False)
    monkeypatch.setattr(terminal_module, "may_style", lambda stream: True)
    monkeypatch.setattr(terminal_module.os, "get_terminal_size", lambda descriptor: os.terminal_size((20, 10)))
    with terminal_module.passing_note("reading the prompt (a new shape is compiled first) ..."):
        pass
    text = printed.getvalue().partition("\x1b[2m")[2].partition("\x1b[0m")[0]
    assert text == "reading the prom..."
    assert printed.getvalue().endswith("\r\x1b[K")


CLOSED = """
import os, sys
sys.argv[0] = "torchax-serve"
from torchax_serve.cli.main import main
main()
"""


def closed(redirection, *arguments):
    """The program with a stream that bash has closed."""
    command = ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", CLOSED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())


def test_closed_streams():
    done = closed("<&-", "run", "qwen3-0.6b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the prompt is empty")
    done = closed("<&-", "embed", "qwen3-0.6b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: TEXT: expected at least one text, got none")
    done = closed(">&-", "--help")
    assert (done.returncode, done.stderr) == (
        2,
        "error: expected a stdout to write to, got a closed one; send it to a file or a pipe\n",
    )
    done = closed("2>&-", "--version")
    assert (done.returncode, done.stdout[:14]) == (0, "torchax-serve ")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["models", "--json"], []])
def test_closed_pipe_at_the_end_of_output(arguments):
    """``| head -1`` and the like: no traceback, and no status that means a failed check."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    process.stdout.close()
    with process.stderr:
        written = process.stderr.read()
    assert (process.wait(TIMEOUT_S), written) == (141, "")


def test_closed_pipe_does_not_fail_verify(monkeypatch):
    """rich leaves with 1, which is the status of a check that failed."""
    dropped = []
    monkeypatch.setattr(errors, "drop_output", dropped.append)

    def print_table():
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904

    assert errors.run_and_report(print_table, debug=False) == errors.EXIT_CLOSED_PIPE
    assert dropped == [sys.stdout]


STARTING = """
import builtins, os, signal, sys
original = builtins.__import__
def imported(name, *args, **kwargs):
    if name == {at!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return original(name, *args, **kwargs)
builtins.__import__ = imported
sys.argv = ["torchax-serve", *{arguments!r}]
from torchax_serve.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("at", "arguments"),
    [
        ("typer", ["--help"]),
        ("torchax_serve.planning.abstract_model", ["plan", "--topology", "cpu:1"]),
        ("model_adapters.ops", ["ops"]),
        ("huggingface_hub", ["models", "--downloaded"]),
        ("torchax_serve.diagnostics", ["doctor"]),
        ("torchax_serve.parity.verify", ["verify"]),
        ("torchax_serve.cli.shared.load_model", ["embed", "qwen3-0.6b", "Hi"]),
    ],
)
def test_ctrl_c_while_modules_are_imported(at, arguments):
    code = STARTING.format(at=at, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment()
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr


def test_ctrl_c_at_a_question(tmp_path):
    folder = tmp_path / "models--people--tiny"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "x.incomplete").write_bytes(b"1234")
    with Terminal("rm", "people/tiny", "--cache-dir", str(tmp_path), TERM="xterm") as terminal:
        terminal.wait_for("delete people/tiny, 0.0 kB, last used never?")
        terminal.type(CTRL_C)
        terminal.wait_for("interrupted")
        assert terminal.status() == 130
    assert folder.exists()


def test_ctrl_c_that_comes_before_a_question_reads_is_not_lost(monkeypatch, capsys):
    """A signal that does not interrupt the main thread's call, as one that comes in the moment before it."""
    fd, end = pty.openpty()
    interrupted = threading.Event()

    def press():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not interrupted.wait(10):
            os.write(fd, b"n\n")  # ends a read that has missed it

    thread = threading.Timer(0.2, press)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()  # before the signal is blocked, which threads inherit
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with open(end, closefd=True) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        try:
            with pytest.raises(KeyboardInterrupt):
                question.confirm("delete it?")
        finally:
            interrupted.set()
            thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGINT, handler)
    os.close(fd)
    assert capsys.readouterr().err == "delete it? [y/N]: "
