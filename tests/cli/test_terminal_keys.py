"""What is typed and when: during an answer, in earlier chats, pasted, completed; and streams that are closed."""

import stat
import subprocess
import sys
import termios

import pytest
from fake_terminal import CTRL_C, CTRL_D, TAB, TIMEOUT_S, UP, Terminal, environment, start

ANSWERED = ("prompt + ", "new tokens", ">>>")


def shows_keys(terminal):
    return bool(termios.tcgetattr(terminal.fd)[3] & termios.ECHO)


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_keys_typed_during_an_answer_are_the_next_message(kind):
    with Terminal("run", "--raw", "--max-new-tokens", "40", TERM=kind) as terminal:
        terminal.wait_for("/help lists the commands", ">>>")
        terminal.type("slow\r")
        terminal.wait_for("0 1 2 3 ")
        assert not shows_keys(terminal)
        terminal.type("typed\r")
        answer = terminal.wait_for("cut at the length limit")
        assert "typed" not in answer
        terminal.wait_for("cut at the length limit", ">>>", "typed", "5 prompt + 6 new tokens", ">>>")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_the_terminal_is_given_back_after_an_interruption():
    """The first Ctrl-C stops the answer, the end of the program leaves the terminal as it was."""
    with Terminal("run", "be slow", TERM="xterm") as terminal:
        terminal.wait_for("0 1 2 3 ")
        assert not shows_keys(terminal)
        terminal.type(CTRL_C)
        terminal.wait_for("stopped", "interrupted")
        assert shows_keys(terminal)
        assert terminal.status() == 130


def test_messages_of_earlier_chats_come_back(tmp_path):
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
    before = file.read_bytes()
    with Terminal("run", "--no-history", TERM="xterm", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">>>")
        terminal.type("third\r")
        terminal.wait_for("u(third)a(", *ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    assert file.read_bytes() == before


def test_a_history_does_not_grow_without_end(tmp_path, monkeypatch):
    from torchax_serve.cli.chat import history

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(history, "MOST_MESSAGES", 3)
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


def test_tab_completes_commands_and_files(tmp_path):
    (tmp_path / "talk-of-today.json").write_text("[]")
    with Terminal("run", TERM="xterm") as terminal:
        terminal.wait_for("what is typed is not kept for the next time", ">>>")
        terminal.type("/sys" + TAB)
        terminal.wait_for("tem ")  # the rest of the name
        terminal.type("Be kind\r")
        terminal.wait_for("system prompt set", ">>>")
        terminal.type(f"/save {tmp_path}/talk" + TAB)
        terminal.wait_for("-of-today.json")
        terminal.type("\r")
        terminal.wait_for("talk-of-today.json exists and is not of this conversation", ">>>")
        terminal.type("/sistem\r")
        terminal.wait_for("there is no command /sistem; did you mean /system?", ">>>")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_pasted_lines_are_one_message():
    with Terminal("run", TERM="xterm") as terminal:
        terminal.wait_for(">>>")
        terminal.type("\x1b[200~one\r/two\rthree\x1b[201~\r")
        terminal.wait_for("u(one\r\n/two\r\nthree)a(", *ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_no_colours_where_none_are_wanted():
    with Terminal("run", "Hi there", TERM="xterm", NO_COLOR="1") as terminal:
        terminal.wait_for("u(Hi there)a(", "new tokens")
        assert terminal.status() == 0
        assert "\x1b" not in terminal.seen


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


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["ops"], ["models", "--downloaded"], []])
def test_nobody_reads_the_end(arguments):
    """``| head -1`` and the like: no traceback, and no status that means a failed check."""
    process = start(*arguments)
    process.stdout.close()
    _, said = process.stderr.read(), process.wait(TIMEOUT_S)
    process.stderr.close()
    assert said == 141


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
        ("torchax_serve.planning.abstract", ["plan", "--topology", "cpu:1"]),
        ("model_adapters.ops", ["ops"]),
        ("huggingface_hub", ["models", "--downloaded"]),
        ("torchax_serve.diagnostics", ["doctor"]),
        ("torchax_serve.verify", ["verify"]),
        ("torchax_serve.cli.loading", ["embed", "qwen3-0.6b", "Hi"]),
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
