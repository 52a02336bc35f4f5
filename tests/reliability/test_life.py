"""Start, drain and end of the process, as its supervisor sees them."""

import concurrent.futures
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import openai
import psutil
from running_server import ENGINE, RunningServer
from server_process import START

from torchax_serve import SamplingParams, serve
from torchax_serve.server.context import Stage

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


NUM_IN_FLIGHT = 20
COMPILE_S = float(os.environ.get("TORCHAX_SERVE_COMPILE_S", "2"))


def metric(server, name):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"torchax_serve_{name} ")))


def test_sigterm_drains(started):
    server = started("--served-model-name", "tiny", "--pre-stop", "0.5").wait_until_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(index):
        return client.completions.create(
            model="tiny",
            prompt="Once upon a time",
            max_tokens=300,
            temperature=1,
            seed=index,
            extra_body={"ignore_eos": True},
        )

    known = [choice.choices[0].text for choice in map(ask, range(3))]
    with concurrent.futures.ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
        asked = [pool.submit(ask, index % 3) for index in range(NUM_IN_FLIGHT)]
        until = time.monotonic() + 30
        while metric(server, "http_in_flight") < NUM_IN_FLIGHT + 1:  # that of the metrics is one of them
            assert time.monotonic() < until
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert httpx.get(f"{server.url}/readyz").json()["status"] == "draining"
        assert httpx.get(f"{server.url}/livez").status_code == 200
        time.sleep(0.6)
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "Hi"})
        assert [each.result().choices[0].text for each in asked] == [known[index % 3] for index in range(NUM_IN_FLIGHT)]
    client.close()
    assert refused.status_code == 503
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("5", "close")
    assert server.end()[0] == 0
    assert running(children) == []


def running(processes):
    """Those that have not ended in some seconds; nobody may have waited for those that have."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    return [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def start_of(server, is_so):
    """Waits until the start of a server is so far."""
    until = time.monotonic() + 300
    while not is_so():
        assert server.process.poll() is None and time.monotonic() < until
        time.sleep(0.1)


def test_sigterm_while_programs_are_compiled(started, tmp_path):
    """No program is found in an empty folder; kernels are where they were."""
    server = started(warm_up=True, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    with httpx.Client(base_url=server.url) as http:

        def is_compiling():
            try:
                progress = http.get("/readyz").json().get("progress", {})
            except httpx.HTTPError:
                return False
            return progress.get("name") == "compiling programs" and progress["done"] < progress["total"]

        start_of(server, is_compiling)
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.end()
    assert status == 0, errors
    assert "error:" not in errors and "programs are ready" not in errors
    assert running(children) == []


def test_sigterm_while_kernels_are_built(started, tmp_path):
    server = started(warm_up=True, XDG_CACHE_HOME=str(tmp_path))
    process, compilers = psutil.Process(server.process.pid), []

    def is_building():
        compilers[:] = [child for child in process.children(recursive=True) if child.name() == "cc1plus"]
        return compilers

    start_of(server, is_building)
    children = process.children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.end()
    assert status == 0, errors
    assert running(children) == []
    assert not list(tmp_path.rglob("*.so"))


def test_a_second_signal_ends_at_once(started):
    server = started("--pre-stop", "30").wait_until_ready()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 1
    assert time.monotonic() - began < 1


def test_a_model_that_cannot_be_loaded_is_one_line(started, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    server = started(str(tmp_path))
    status, errors = server.end()
    assert status == 2
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in errors


def test_options_come_from_the_environment(started):
    server = started(TORCHAX_SERVE_API_KEY="from-the-environment", TORCHAX_SERVE_LOG_FORMAT="json").wait_until_ready()
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    headers = {"Authorization": "Bearer from-the-environment"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    version = httpx.get(f"{server.url}/version", headers=headers)
    assert "from-the-environment" not in version.text
    assert version.json()["options"]["log_format"] == "json"
    server.process.send_signal(signal.SIGINT)
    status, errors = server.end()
    assert status == 0
    assert "from-the-environment" not in errors
    (shown,) = (json.loads(line)["message"] for line in errors.splitlines() if "not the defaults" in line)
    changed = f'port={httpx.URL(server.url).port}, api_keys=1, log_format="json", warm_up=false'
    assert shown == f"options that are not the defaults: {changed}"


def test_warnings_of_the_library_are_lines_of_the_log(started):
    """Such as that about a cache folder that cannot be made; it comes while the model is loaded."""
    server = started(TORCHAX_SERVE_LOG_FORMAT="json", JAX_COMPILATION_CACHE_DIR="", XDG_CACHE_HOME="/dev/null/cache")
    assert server.process.stderr.readline() == f"listening on {server.url}\n"
    lines = map(json.loads, server.process.stderr)
    warning = next(line for line in lines if line["level"] == "warning")
    assert warning["message"].startswith("compiled programs are not kept: /dev/null/cache")
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.end()
    assert status == 0
    assert all(json.loads(line)["level"] in ("info", "warning") for line in errors.splitlines())


def test_a_port_in_use_is_one_line(server):
    command = [sys.executable, "-c", START, "serve", "--port", str(server.address[1])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "error:" in result.stderr and "Traceback" not in result.stderr


def test_an_engine_that_does_not_move_is_reported_dead(start_server, model):
    guarded = start_server(watchdog_s=0.5)
    model.engine._run_on_engine_thread(lambda: time.sleep(4))
    with httpx.Client(base_url=guarded.url, timeout=30) as http:
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 2})
        assert answer.status_code == 503
        assert http.get("/livez").status_code == 503
    guarded.thread.join(30)
    assert guarded.status == 70
    assert guarded.context.stage is Stage.DEAD


def test_an_engine_whose_thread_has_ended_is_reported_dead():
    def end_thread():
        raise SystemExit

    with serve(engine=ENGINE) as model:
        engine = model.engine
        guarded = RunningServer(model)
        with httpx.Client(base_url=guarded.url, timeout=30) as http:
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 400, "ignore_eos": True}
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                engine._run_on_engine_thread(lambda: time.sleep(0.5))
                running = pool.submit(http.post, "/v1/completions", json=body)
                engine._run_on_engine_thread(end_thread)
                assert running.result().status_code in (500, 503)
            while guarded.context.stage is not Stage.DEAD:
                assert guarded.thread.is_alive()
                time.sleep(0.01)
            assert http.get("/livez").status_code == 503
        guarded.thread.join(30)
        assert guarded.status == 70


def test_a_long_compilation_is_not_taken_for_death(start_server, model):
    from torchax_serve.compilation.compile_lock import CompileLock

    while model.engine.progress().is_due:  # the step of the test before
        time.sleep(0.1)
    patient = start_server(watchdog_s=0.5)

    def compile_for_long():
        with CompileLock():
            time.sleep(COMPILE_S)

    model.engine._run_on_engine_thread(compile_for_long)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
    with (
        httpx.Client(base_url=patient.url, timeout=COMPILE_S + 30) as http,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(http.post, "/v1/completions", json=body)
        while not answer.done():
            assert http.get("/livez").status_code == 200
            time.sleep(0.2)
        assert answer.result().status_code == 200
        assert http.get("/livez").status_code == 200


def test_a_clock_that_jumps_hurts_nobody(start_server, model, monkeypatch):
    """Deadlines, silence, limits of keys and statistics; only the time that answers show is the clock's."""
    server = start_server(
        request_timeout_s=60, queue_timeout_s=60, first_token_timeout_s=60, keep_alive_s=30, watchdog_s=30
    )
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    clock, jumps = time.time, itertools.cycle((0.0, 1e9, -1e9, 3600.0, -3600.0))

    def ask(http, stream):
        answer = http.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 200
        if not stream:
            return answer.json()["choices"][0]["text"]
        assert ": keep-alive" not in answer.text and answer.text.endswith("data: [DONE]\n\n")
        events = [json.loads(line) for line in answer.text.removesuffix("data: [DONE]\n\n").split("data: ")[1:]]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    with httpx.Client(base_url=server.url, timeout=60) as http:
        known = ask(http, False)
        monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
        assert {ask(http, stream) for stream in (True, False) * 3} == {known}
        assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
        monkeypatch.undo()
        assert ask(http, True) == known
        sums = [line for line in http.get("/metrics").text.splitlines() if "_seconds_sum" in line]
        assert sums and all(0 <= float(line.split()[-1]) < 1e6 for line in sums)
    assert server.pages_are_back(model)


def test_requests_of_the_process_itself_are_finished_too(start_server, model):
    drained = start_server()
    stream = model.stream("Once upon a time", SamplingParams(max_new_tokens=200, ignore_eos=True))
    next(stream)
    assert drained.stop() == 0
    assert model.engine.stats().scheduler.num_running == 0
    assert len(list(stream) and stream.token_ids) == 200


def test_an_engine_that_does_not_finish_in_time_is_cut_off(start_server, model):
    hurried = start_server(drain_timeout_s=0.1)
    model.engine._run_on_engine_thread(lambda: time.sleep(1))
    stream = model.stream("Once upon a time", SamplingParams(max_new_tokens=2))
    assert hurried.stop() == 1
    assert len(list(stream) and stream.token_ids) == 2
