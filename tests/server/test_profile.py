"""Profiles of a running server."""

import concurrent.futures
import warnings

import httpx
import jax
import pytest

from torchax_serve.server import profiler

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "profiles"


@pytest.fixture
def profiled(start_server, folder):
    running = start_server(profile_dir=folder)
    with httpx.Client(base_url=running.url, timeout=120) as http:
        yield running, http


def event_names(folder):
    (file,) = folder.rglob("*.xplane.pb")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = jax.profiler.ProfileData.from_file(str(file))
    return {event.name for plane in data.planes for line in plane.lines for event in line.events}


def test_a_profile_has_the_programs_that_ran(profiled, folder):
    _, http = profiled
    assert http.post("/start_profile").status_code == 200
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert http.post("/stop_profile").status_code == 200
    assert any("Execute" in name or name.startswith("jit_") for name in event_names(folder))
    assert http.post("/stop_profile").status_code == 409


def test_one_profile_at_a_time(profiled, folder):
    _, http = profiled

    def statuses(path):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: http.post(path), range(4)))
        refused = [answer.json()["error"] for answer in answers if answer.status_code != 200]
        assert all(error["code"] == "conflict" and error["message"].startswith("expected") for error in refused)
        return sorted(answer.status_code for answer in answers)

    assert statuses("/start_profile") == [200, 409, 409, 409]
    assert statuses("/stop_profile") == [200, 409, 409, 409]
    assert list(folder.rglob("*.xplane.pb"))


def test_the_end_of_the_server_writes_the_profile(profiled, folder):
    running, http = profiled
    assert http.post("/start_profile").status_code == 200
    assert running.stop() == 0
    assert list(folder.rglob("*.xplane.pb"))


def test_a_forgotten_profile_ends_by_itself(profiled, folder, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_PROFILE_S", 0.1)
    _, http = profiled
    assert http.post("/start_profile").status_code == 200
    for _ in range(600):
        if list(folder.rglob("*.xplane.pb")):
            break
        http.get("/livez")
    assert http.post("/stop_profile").status_code == 409
    assert http.post("/start_profile").status_code == 200
    assert http.post("/stop_profile").status_code in (200, 409)


def test_a_profile_of_some_seconds_names_modules(profiled, folder, model):
    _, http = profiled
    assert http.post("/v1/completions", json=BODY).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/profile", json={"seconds": 1.0})
        while not answer.done():
            assert http.post("/v1/completions", json=BODY).status_code == 200
        found = answer.result()
    assert found.status_code == 200, found.text
    rows = found.json()["rows"]
    names = {row["name"] for row in rows if row["name"] is not None}
    assert "model.layers.0.mlp.down_proj" in names
    assert names <= set(dict(model.torch_model.named_modules()))
    assert (folder / "plugins" / "profile" / found.json()["trace"]).is_dir()
    assert str(folder) not in found.text


@pytest.mark.parametrize("body", [{"seconds": 0}, {"seconds": 61}, {"by": "layer"}, {"folder": "/tmp"}, []])
def test_a_wrong_body_is_refused(profiled, body):
    _, http = profiled
    assert http.post("/profile", json=body).status_code == 400
    assert http.post("/stop_profile").status_code == 409


def test_a_folder_that_is_gone_is_said_without_its_path(start_server, tmp_path):
    running = start_server(profile_dir=tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("")
    with httpx.Client(base_url=running.url) as http:
        answer = http.post("/start_profile")
        assert answer.status_code == 503 and str(tmp_path) not in answer.text
        assert http.post("/stop_profile").status_code == 409


def test_there_are_no_profiles_without_a_folder(http):
    for path in ("/start_profile", "/stop_profile", "/profile"):
        answer = http.post(path, json={})
        assert answer.status_code == 404 and "--profile-dir" in answer.json()["error"]["message"]
