"""A server of the embedded model, on a free port of this machine, for all tests of a folder."""

import contextlib
import threading
import time

import httpx
import pytest
import task_models

from torchax_serve import EngineOptions, serve
from torchax_serve.engine.engine import Engine
from torchax_serve.server.context import Stage
from torchax_serve.server.lifespan import Server
from torchax_serve.server.model_pool import ModelSpec
from torchax_serve.server.options import ServerOptions

ENGINE = EngineOptions(max_num_seqs=8, max_num_waiting=64, max_model_len=512)


class RunningServer:
    """A server in a thread of its own."""

    def __init__(self, model, **options):
        self.options = ServerOptions(port=0, **{"warm_up": False, "served_model_names": ("tiny",), **options})
        self.model = model
        self.server = Server(self.options, [ModelSpec((), lambda: _Unclosed(model))])
        self.status = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.url = self.server.addresses[0]
        self.context = self.server.context
        until = time.monotonic() + 300  # a process that renders templates starts meanwhile
        while self.context.stage is not Stage.READY:
            assert time.monotonic() < until and self.thread.is_alive()
            time.sleep(0.01)

    def _run(self):
        self.status = self.server.run()

    @property
    def address(self):
        return ("127.0.0.1", int(self.url.rpartition(":")[2]))

    def stop(self):
        if self.thread.is_alive():
            self.server.stop()
        self.thread.join(60)
        for engine in map(vars(self.model).get, ("_engine", "_single_engine")):
            if isinstance(engine, Engine):  # it was drained with its server, and others go on with it
                engine.admission.refusal = None
        assert not self.thread.is_alive()
        return self.status

    def pages_are_back(self, model, within_s=5.0):
        """Whether no request is left within some seconds."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            scheduler = model.engine.stats().scheduler
            if not (scheduler.num_running or scheduler.num_waiting or any(g.num_used for g in scheduler.pages)):
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def serving(path, *, engine=None, **options):
    """A server of the model in a folder."""
    with serve(path, engine=engine) as model:
        running = RunningServer(model, **options)
        try:
            yield running, model
        finally:
            running.stop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Starts a server of a model of `task_models`, once."""
    found = {}

    def of(name):
        if name not in found:
            path = tmp_path_factory.mktemp(name)
            getattr(task_models, name)(path)
            found[name] = opened.enter_context(serving(path))
        return found[name]

    with contextlib.ExitStack() as opened:
        yield of


class _Unclosed:
    """The model of all tests, which one server's end does not close."""

    def __new__(cls, model):
        model_of_server = object.__new__(type(model))
        vars(model_of_server).update(vars(model))
        model_of_server.close = lambda: None
        return model_of_server


@pytest.fixture(scope="session")
def model():
    with serve(engine=ENGINE) as served:
        served.engine.check_integrity = True
        yield served


@pytest.fixture(scope="session")
def server(model):
    running = RunningServer(model, metrics_compat="vllm")
    yield running
    running.stop()


@pytest.fixture(scope="session")
def start_server(model):
    """Starts a server with options of its own."""
    running = []

    def start(**options):
        running.append(RunningServer(model, **options))
        return running[-1]

    yield start
    for each in running:
        each.stop()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=300) as client:  # programs are compiled at their first use
        yield client


@pytest.fixture(scope="session")
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


__all__ = ["ENGINE", "RunningServer", "client", "http", "model", "server", "servers", "serving", "start_server"]
