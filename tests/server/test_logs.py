"""The handler that writes log lines in a thread, on a real pipe."""

import logging
import os
import threading
import time

import pytest

from torchax_serve.server.logs import StderrHandler, TextFormatter


@pytest.fixture
def pipe():
    """The ends of a pipe: one to read bytes, one to write text."""
    reader, writer = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "w"), strict=True))
    with reader, writer:
        yield reader, writer


def logger_of(stream, max_lines):
    lines = StderrHandler(stream, max_lines)
    lines.setFormatter(TextFormatter())
    logger = logging.Logger("test")
    logger.addHandler(lines)
    return logger, lines


def test_lines_are_written_in_order_and_flushed(pipe):
    reader, writer = pipe
    logger, lines = logger_of(writer, 100)
    for index in range(50):
        logger.warning("line %d", index)
    lines.flush()
    numbers = [line.split()[-1] for line in os.read(reader.fileno(), 1 << 16).splitlines()]
    assert numbers == [b"%d" % index for index in range(50)]


def test_a_pipe_that_nobody_reads_holds_up_nobody(pipe):
    reader, writer = pipe
    logger, lines = logger_of(writer, 10)
    began = time.monotonic()
    for index in range(2000):  # 200 KB; a pipe takes 64 KiB
        logger.warning("%d %s", index, "x" * 100)
    assert time.monotonic() - began < 5
    received = []
    reading = threading.Thread(target=lambda: received.extend(reader))
    reading.start()
    lines.flush()
    logger.warning("the next one")
    lines.flush()
    writer.close()
    reading.join()
    written = sum(line.endswith(b"x" * 100 + b"\n") for line in received)
    dropped = sum(int(line.split()[3]) for line in received if b"log lines were dropped: stderr took none" in line)
    assert 0 < dropped == 2000 - written
    assert received[-1].endswith(b"the next one\n")


def test_a_reader_that_has_gone_is_no_error(pipe):
    reader, writer = pipe
    logger, lines = logger_of(writer, 10)
    reader.close()
    logger.warning("nobody reads it")
    logger.warning("nor this")
    lines.flush()
    assert logger.handlers == [lines]
    with pytest.raises(BrokenPipeError):
        writer.close()
