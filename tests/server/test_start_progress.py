"""How far a start is, as ``/readyz`` says it."""

from torchax_serve.server.context import Stage
from torchax_serve.server.start_progress import StartProgress


def test_readyz_says_how_far_the_programs_are(server, http):
    assert "progress" not in http.get("/readyz").json()
    with server.context.start.stage("compiling programs", 3, "items") as advance:
        advance(1)
        server.context.stage = Stage.WARMING_UP
        try:
            answer = http.get("/readyz")
        finally:
            server.context.stage = Stage.READY
    assert answer.status_code == 503
    expected = {"name": "compiling programs", "done": 1, "total": 3, "unit": "items"}
    assert answer.json() == {"status": "warming up", "progress": expected}


def test_readyz_says_that_weights_are_read_whenever_they_are(server, http):
    for name in ("loading tiny", "downloading org/tiny", "drawing random weights for tiny"):
        with server.context.start.stage(name, 10):
            server.context.stage = Stage.WARMING_UP  # a start from a record that has to trace
            try:
                status = http.get("/readyz").json()
            finally:
                server.context.stage = Stage.READY
        assert status["status"] == "loading the model"
        assert status["progress"]["name"].startswith(name.split()[0])


def test_names_of_models_are_left_out():
    progress = StartProgress()
    assert progress.shown() == {}
    with progress.stage("loading /home/someone/model", 10) as advance:
        advance(4)
        assert progress.shown() == {"name": "loading", "done": 4, "total": 10, "unit": "bytes"}
    assert progress.shown() == {}
