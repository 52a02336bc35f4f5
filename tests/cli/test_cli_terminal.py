"""The program in a process of its own: at a terminal, with Ctrl-C, and with nobody reading what it writes."""

import json
import signal
import subprocess
import sys
import time

import pytest
from fake_terminal import ALT_ENTER, CTRL_C, CTRL_D, TIMEOUT_S, Terminal, environment, start


def test_a_conversation(tmp_path):
    file = tmp_path / "talk.json"
    with Terminal("run", TERM="xterm") as terminal:
        terminal.wait_for("/help lists the commands", ">>>")
        terminal.type("one\r")
        terminal.wait_for("u(one)a(", "8 prompt + 9 new tokens", ">>>")
        terminal.type("/system Be kind\r")
        terminal.wait_for("system prompt set", ">>>")
        # every way to write several lines, and the history before them
        terminal.type("two\\\rthree\r")
        terminal.wait_for("s(Be kind)u(one)a(u(one)a()u(two\r\nthree)a(", "tokens/s", ">>>")
        terminal.type("/reset\r")
        terminal.wait_for("begins anew", ">>>")
        terminal.type(f"four{ALT_ENTER}five\r")
        terminal.wait_for("s(Be kind)u(four\r\nfive)a(", "tokens/s", ">>>")
        terminal.type("/reset\r")
        terminal.wait_for("begins anew", ">>>")
        terminal.type('"""six\rseven\\\reight"""\r')
        terminal.wait_for("u(six\r\nseven\\\r\neight)a(", "tokens/s", ">>>")
        terminal.type("/reset\r")
        terminal.wait_for("begins anew", ">>>")
        # Ctrl-C stops the answer and not the program
        terminal.type("slow\r")
        terminal.wait_for("0 1 2 3 ")
        terminal.type(CTRL_C)
        assert "stopped" in terminal.wait_for("prompt + ", ">>>")
        terminal.type("half" + CTRL_C)
        terminal.wait_for("Ctrl-D or /quit leaves", ">>>")
        terminal.type(f"/save {file}\r")
        terminal.wait_for("3 messages written", ">>>")
        terminal.type(f"/save {file}\r")
        terminal.wait_for("3 messages written", ">>>")  # again over its own file
        terminal.type("/system off\r")
        terminal.wait_for("taken away", ">>>")
        terminal.type("/nonsense\r")
        terminal.wait_for("there is no command /nonsense", ">>>")
        terminal.type("/help\r")
        terminal.wait_for("/quit", "Alt-Enter", ">>>")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be kind"
    assert messages[1]["content"] == "slow"
    assert messages[2]["content"].startswith("0 1 2 3")


def test_a_dumb_terminal_without_colours(tmp_path):
    other = tmp_path / "precious.json"
    other.write_text("mine")
    with Terminal("run", TERM="dumb") as terminal:
        terminal.wait_for("cache of 7 pages", ">>>")
        terminal.type("/stats\n")
        terminal.wait_for("nothing has been asked yet", ">>>")
        terminal.type("one\\\n")
        terminal.wait_for("... ")
        terminal.type("two\n")
        terminal.wait_for("u(one\r\ntwo)a(", "tokens/s", ">>>")
        terminal.type("/stats\n")
        terminal.wait_for("1 asked", ">>>")
        terminal.type(f"/save {other}\n")
        terminal.wait_for("exists and is not of this conversation", ">>>")
        terminal.type(f"/save {tmp_path / 'no' / 'folder.json'}\n")
        terminal.wait_for("error: cannot write", "No such file or directory", ">>>")
        terminal.type("x" * 3000 + "\n")  # a terminal line holds no more than 4095
        terminal.wait_for("tokens/s", ">>>")
        terminal.type("/save\n/system\n/quit\n")
        terminal.wait_for("needs the name of a file", "system prompt: none")
        assert terminal.status() == 0
        assert "\x1b" not in terminal.seen
    assert other.read_text() == "mine"


def test_stdout_closed_ends_quietly():
    process = start("run", "be slow")
    assert process.stdout.read(4) == "0 1 "
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(TIMEOUT_S) == 141


def test_interrupted_answer_ends_with_130_and_one_line():
    process = start("run", "be slow")
    assert process.stdout.read(4) == "0 1 "
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    stats, last = err.splitlines()
    assert "stopped" in stats
    assert last == "interrupted"


# As XLA while it compiles: C code that holds the main thread for a minute and looks at no signal.
DEAF = """
import hashlib
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.errors import run_and_report
def compile():
    with prompt_interrupts(leave_at={leave_at}):
        print("compiling", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)
raise SystemExit(run_and_report(compile, debug=False))
"""


@pytest.mark.parametrize("leave_at", [1, 2])
def test_ctrl_c_in_compiled_code(leave_at):
    command = [sys.executable, "-c", DEAF.format(leave_at=leave_at)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout.readline() == "compiling\n"
        time.sleep(2)  # into the C code
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        if leave_at == 2:
            assert (
                process.stderr.readline() == "waiting for a compilation to end; Ctrl-C once more leaves the program\n"
            )
            process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert time.monotonic() - start_s < 20
        assert process.stderr.read() == "interrupted\n"


def test_library_error_caused_by_an_interrupt():
    """Libraries turn a KeyboardInterrupt in their middle into other errors."""
    code = """
import os, signal, time
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.errors import run_and_report
def load():
    with prompt_interrupts(leave_at=1):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ImportError("initialisation failed") from None
raise SystemExit(run_and_report(load, debug=False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


LOST = """
import gc, os, signal, time
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.errors import run_and_report
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10): pass
def answer():
    with prompt_interrupts(leave_at={leave_at}):
        last = Last()
        del last  # what is raised in there is reported and lost
        print("on it goes", flush=True)
        time.sleep({seconds})
raise SystemExit(run_and_report(answer, debug=False))
"""


@pytest.mark.parametrize(("leave_at", "seconds"), [(1, 0), (1, 30), (2, 0), (2, 30)])
def test_lost_interrupt_is_raised_at_the_end(leave_at, seconds):
    code = LOST.format(leave_at=leave_at, seconds=seconds)
    start_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "on it goes\n", "interrupted\n")
    assert time.monotonic() - start_s < 20
