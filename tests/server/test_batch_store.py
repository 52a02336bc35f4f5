"""Files and batches on disk: against a model in memory, killed at any byte, on a full disk, of keys that change."""

import asyncio
import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from echo_batches import EchoApp, ended, lines_of, stored
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.auth import ApiKeys
from torchax_serve.server.batch import scan, worker
from torchax_serve.server.batch.files import FileLimits, FileStore
from torchax_serve.server.batch.jobs import BatchJobs
from torchax_serve.server.batch.lines import answer_line, encoded
from torchax_serve.server.batch.records import open_folder
from torchax_serve.server.batch.scan import PartialResults, line_id
from torchax_serve.server.errors import ApiError

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder in memory: a disk takes long to confirm so many small files."""
OWNERS = st.sampled_from(["alice", "bob"])
LIMITS = FileLimits(max_files=4, max_bytes=1000, max_file_bytes=400, max_age_s=50)


class StoreMachine(RuleBasedStateMachine):
    """The store next to a dict, through restarts and the passing of time."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.now, self.model, self.pinned = 1000, {}, set()  # model: id -> (owner, content, expires)
        self.open()

    def open(self):
        self.store = FileStore(Path(self.folder.name), LIMITS, lambda: self.now)

    def teardown(self):
        self.folder.cleanup()

    def of(self, owner):
        return {
            file_id: content
            for file_id, (whose, content, expires) in self.model.items()
            if whose == owner and (expires > self.now or file_id in self.pinned)
        }

    @rule(owner=OWNERS, parts=st.lists(st.binary(max_size=200), max_size=4), age=st.none() | st.integers(1, 80))
    def add(self, owner, parts, age):
        held = sum(len(content) for whose, content, _ in self.model.values() if whose == owner)
        size = sum(map(len, parts))
        try:
            upload = self.store.begin(owner)
        except ApiError as error:
            assert error.code == "storage_full" and len(self.of(owner)) >= LIMITS.max_files
            return
        assert len(self.of(owner)) < LIMITS.max_files
        try:
            for part in parts:
                upload.write(part)
        except ApiError as error:
            upload.abandon()
            assert (error.status == 413 and size > LIMITS.max_file_bytes) or (
                error.code == "storage_full" and held + size > LIMITS.max_bytes
            )
            return
        assert size <= LIMITS.max_file_bytes and held + size <= LIMITS.max_bytes
        file = upload.finish("in.jsonl", "batch", age)
        assert file.id not in self.model
        self.model[file.id] = owner, b"".join(parts), self.now + min(age or 50, 50)

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 11), owner=OWNERS)
    def delete(self, index, owner):
        file_id = list(self.model)[index % len(self.model)]  # ids are random
        if file_id not in self.of(owner):
            with pytest.raises(ApiError, match="unknown or was dropped"):
                self.store.delete(owner, file_id)
        elif file_id in self.pinned:
            with pytest.raises(ApiError, match="no batch reads"):
                self.store.delete(owner, file_id)
        else:
            self.store.delete(owner, file_id)
            del self.model[file_id]

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 11), owner=OWNERS)
    def pin_or_unpin(self, index, owner):
        file_id = list(self.model)[index % len(self.model)]  # ids are random
        if file_id in self.pinned:
            self.store.unpin(file_id)
            self.pinned.discard(file_id)
        elif file_id in self.of(owner):
            self.store.pin(owner, file_id)
            self.pinned.add(file_id)

    @rule(seconds=st.integers(1, 40), is_swept=st.booleans())
    def wait(self, seconds, is_swept):
        self.now += seconds
        if is_swept:
            self.store.drop_old()
            old = [key for key, (_, _, expires) in self.model.items() if expires <= self.now]
            for file_id in set(old) - self.pinned:
                del self.model[file_id]

    @rule(owner=OWNERS)
    def kill_in_an_upload(self, owner):
        try:
            upload = self.store.begin(owner)
        except ApiError:
            return
        with upload._file, contextlib.suppress(ApiError):
            upload.write(b"half of it")
        self.restart()

    @rule()
    def restart(self):
        (Path(self.folder.name) / "notes.txt").write_text("not ours")
        self.open()
        for file_id in self.pinned:
            self.store.restore_pin(file_id)
        self.store.sweep(())
        assert {path.name for path in Path(self.folder.name).iterdir()} == {
            "notes.txt",
            *self.model,
            *(f"{file_id}.json" for file_id in self.model),
        }

    @invariant()
    def owners_have_their_own(self):
        for owner in ("alice", "bob"):
            expected = self.of(owner)
            listed = self.store.list(owner)
            assert {each.id for each in listed} == expected.keys()
            assert [each.created_s for each in listed] == sorted((each.created_s for each in listed), reverse=True)
            for file_id, content in expected.items():
                file, opened = self.store.open(owner, file_id)
                with opened:
                    assert opened.read() == content and file.num_bytes == len(content)


StoreMachine.TestCase.settings = hypothesis.settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(bodies=st.lists(st.text(max_size=30), min_size=1, max_size=6), data=st.data())
def test_answers_that_are_cut_at_any_byte_go_on(bodies, data):
    class Request:
        custom_id = 'a"}\n'

    lines = [
        encoded(answer_line(Request, 200, "r", {"text": body}, line_id=line_id("batch_" + "ab" * 16, number)))
        for number, body in enumerate(bodies)
    ]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    num_kept = sum(len(b"".join(lines[: index + 1])) <= cut for index in range(len(lines)))
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "out"
        path.write_bytes(content[:cut])
        results = PartialResults(path)
        assert list(results.recover()) == list(enumerate(lines[:num_kept]))
        for line in lines[num_kept:]:
            results.write(json.loads(line))
        results.close()
        assert path.read_bytes() == content


def test_a_server_that_is_killed_again_and_again_answers_each_line_once(tmp_path):
    """Twelve times SIGKILL while answers are written: none is lost, repeated or damaged."""
    total = 300
    stored(tmp_path, total).create("anybody", "/tokenize", "file-in", "1h", None, None)
    script = Path(__file__).with_name("echo_batches.py")
    killer = subprocess.run(
        [sys.executable, script, tmp_path, "12"], capture_output=True, text=True, timeout=300, check=False
    )
    assert killer.returncode == 0, killer.stderr
    sent = [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    jobs = BatchJobs(tmp_path / "batches", FileStore(tmp_path / "files", LIMITS))
    (batch,) = jobs.list("anybody")
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", total, total - 30, 30)
    assert (batch.usage["input_tokens"], batch.usage["output_tokens"]) == (3 * (total - 30), 2 * (total - 30))
    answers, errors = lines_of(jobs, batch.output_id), lines_of(jobs, batch.error_id)
    found = {line["custom_id"]: line["response"]["body"]["echo"] for line in [*answers, *errors]}
    assert len(answers) == total - 30 and len(errors) == 30
    assert found == {f"line {index}": index for index in range(total)}
    num_kills = int(killer.stdout)
    assert num_kills > 3 and total <= len(sent) <= total + num_kills  # one was in flight at each kill
    assert {path.name for path in (tmp_path / "files").iterdir()} == {
        name for file in ("file-in", batch.output_id, batch.error_id) for name in (file, f"{file}.json")
    }


def run_one(jobs, app, until=ended, within_s=30):
    """Runs the batches of a store until a batch is as it should be."""

    async def run():
        running = worker.BatchWorker(app, jobs)
        running.start()
        try:
            async with asyncio.timeout(within_s):
                while not until(jobs):
                    await asyncio.sleep(0.01)
        finally:
            await running.close()

    asyncio.run(run())
    return jobs.list("anybody")[0]


def test_answers_wait_for_room_on_the_disk(tmp_path, monkeypatch):
    jobs, attempts, write = stored(tmp_path, 20), [], PartialResults.write
    jobs.create("anybody", "/tokenize", "file-in", "1h", None, None)

    def refuse(self, line):
        attempts.append(line["custom_id"])
        if len(attempts) in (3, 4, 11):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, line)

    monkeypatch.setattr(PartialResults, "write", refuse)
    monkeypatch.setattr(worker, "DISK_RETRY_S", 0.05)
    app = EchoApp(tmp_path)
    batch = run_one(jobs, app)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 18, 2)
    assert len(attempts) == 23 and app.num_sent == 20


def test_a_record_that_the_disk_refuses_changes_nothing(tmp_path, monkeypatch):
    jobs = stored(tmp_path, 3)
    batch = jobs.create("anybody", "/tokenize", "file-in", "1h", None, None)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ApiError, match="the disk says: No space left on device") as raised:
        jobs.cancel("anybody", batch.id)
    assert raised.value.status == 503
    with pytest.raises(ApiError, match="No space left"):
        jobs.create("anybody", "/tokenize", "file-in", "1h", None, None)
    upload = jobs.files.begin("anybody")
    upload.write(b"abc")
    with pytest.raises(ApiError, match="No space left"):
        upload.finish("in", "batch")
    upload.abandon()
    monkeypatch.undo()
    again = BatchJobs(tmp_path / "batches", FileStore(tmp_path / "files", LIMITS))
    for each in (jobs, again):
        assert [found.status for found in each.list("anybody")] == ["validating"]
        assert [file.id for file in each.files.list("anybody")] == ["file-in"]


def test_cancelled_and_expired_batches_keep_what_they_have(tmp_path):
    jobs = stored(tmp_path, 40)
    jobs.create("anybody", "/tokenize", "file-in", "1h", None, None)
    app = EchoApp(tmp_path, delay_s=0.02)
    cancelled = False

    def cancel_midway(jobs):
        nonlocal cancelled
        (batch,) = jobs.list("anybody")
        if batch.completed >= 5 and not cancelled:
            cancelled = jobs.cancel("anybody", batch.id).status == "cancelling"
        return batch.is_ended

    batch = run_one(jobs, app, cancel_midway)
    assert batch.status == "cancelled" and 5 <= batch.completed < 30
    assert len(lines_of(jobs, batch.output_id)) == batch.completed
    with pytest.raises(ApiError, match="got one that is cancelled"):
        jobs.cancel("anybody", batch.id)
    late = jobs.create("anybody", "/tokenize", "file-in", "1s", None, None)
    batch = run_one(jobs, EchoApp(tmp_path, delay_s=0.1), lambda jobs: late.is_ended)
    assert (late.status, late.total, late.completed + late.failed) == ("expired", 40, 40)
    codes = [line["error"] and line["error"]["code"] for line in lines_of(jobs, late.error_id)]
    assert late.completed and codes.count("batch_expired") == 40 - len(lines_of(jobs, late.output_id)) - codes.count(
        None
    )


def test_requests_of_batches_run_behind_those_of_clients(tmp_path):
    app, jobs = EchoApp(tmp_path), stored(tmp_path, 0)
    bodies = [{"prompt": "x"}, {"prompt": "x", "priority": -5}, {"prompt": "x", "priority": 2000}]
    lines = [
        json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body})
        for index, body in enumerate(bodies)
    ]
    upload = jobs.files.begin("anybody")
    upload.write("\n".join(lines).encode())
    jobs.create("anybody", "/v1/completions", upload.finish("in", "batch").id, "1h", None, None)
    run_one(jobs, app)
    assert sorted(body["priority"] for body in app.bodies) == [1000, 1000, 2000]


def test_queues_and_limits_that_are_full_are_waited_for(tmp_path):
    jobs = stored(tmp_path, 10)
    jobs.create("anybody", "/tokenize", "file-in", "1h", None, None)
    app = EchoApp(tmp_path, num_refused=4)
    batch = run_one(jobs, app)
    assert (batch.completed, batch.failed, app.num_sent) == (9, 1, 14)


def test_the_batch_of_a_key_that_is_gone_fails(tmp_path):
    jobs = stored(tmp_path, 3, owner="name alice")
    batch = jobs.create("name alice", "/tokenize", "file-in", "1h", None, None)
    app = EchoApp(tmp_path)
    with pytest.raises(IndexError):
        run_one(jobs, app, lambda jobs: batch.is_ended)
    assert batch.status == "failed" and batch.errors[0]["code"] == "invalid_api_key" and not app.num_sent


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b'{"custom_id": "a", "method": "POST", "url": "/tokenize", "bo', "invalid_line", 1),
        (b'\n{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_line", 2),
        (b'{"custom_id": "a", "method": "POST", "url": "/tokenize", "body": {"model": "x"}}', "invalid_line", 1),
        (b'{"custom_id": "a", "method": "POST", "url": "/tokenize", "body": {}}\n' * 3, "duplicate_custom_id", 2),
    ],
)
def test_files_that_cannot_be_answered_fail_as_a_whole(tmp_path, content, code, line):
    jobs = stored(tmp_path, 0)
    upload = jobs.files.begin("anybody")
    upload.write(content)
    jobs.create("anybody", "/tokenize", upload.finish("in", "batch").id, "1h", None, None)
    app = EchoApp(tmp_path)
    batch = run_one(jobs, app)
    assert batch.status == "failed" and not app.num_sent
    assert (batch.errors[0]["code"], batch.errors[0]["line"]) == (code, line)
    assert batch.shown()["errors"]["object"] == "list" and batch.times["failed"]


def test_errors_of_a_long_file_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "PAUSE_SHARE", 0.0)
    jobs = stored(tmp_path, 0)
    upload = jobs.files.begin("anybody")
    upload.write(b'{"custom_id": "half\n' * 400)
    jobs.create("anybody", "/tokenize", upload.finish("in", "batch").id, "1h", None, None)
    assert len(run_one(jobs, EchoApp(tmp_path)).errors) == scan.MAX_ERRORS


def test_owners_stay_the_same_and_follow_no_position(tmp_path):
    lock, secret = open_folder(tmp_path / "x")
    with pytest.raises(InvalidArgumentError, match="which another one has"):
        open_folder(tmp_path / "x")
    lock.close()
    lock, again = open_folder(tmp_path / "x")
    lock.close()
    assert secret == again

    def owners(*keys):
        made = ApiKeys(keys, secret=secret)
        return [made.key_of([(b"x-api-key", text.split()[0].encode())]).owner for _, text in keys]

    first = owners(("key-0", "key-of-a-person"), ("alice", "key-of-alice"))
    later = owners(("key-0", "another-one"), ("key-1", "key-of-a-person max_concurrency=2"), ("alice", "key-anew-0"))
    assert later[1] == first[0] != later[0] and later[2] == first[1] == "name alice"
