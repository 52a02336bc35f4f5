"""The page at ``/`` by what a person does there: with a mouse, by keyboard alone, on a narrow screen."""

import re
import shutil
import threading
import time

import pytest
from playwright.sync_api import expect
from running_server import RunningServer
from scripted_model import write_scripted_model

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions, serve
from torchax_serve.server.lifespan import Server
from torchax_serve.server.model_pool import ModelSpec
from torchax_serve.server.options import ServerOptions

KEY = "page-key-0123"
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
SCRIPT = {
    " me tags": "<b>bold</b> <img src=x onerror=alert(1)> <script>alert(2)</script>",
    " about it": "<think>First this, then that.</think>The answer is 4.",
    " then": "Then it ends.",
    "": "I do not know.",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted") / "model"
    write_scripted_model(folder, SCRIPT)
    with serve(folder, engine=EngineOptions(max_num_seqs=4, max_model_len=1024)) as served:
        yield served


@pytest.fixture(scope="module")
def server(model):
    running = RunningServer(model, response_template="think")
    yield running
    running.stop()


@pytest.fixture
def page(browser, request):
    """An empty page; what it logs as an error, and what it asks of other servers, fails the test."""
    context = browser.new_context(viewport=getattr(request, "param", WIDE))
    made = context.new_page()
    problems = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}") or dialog.dismiss())
    made.on(
        "request",
        lambda asked: problems.append(asked.url) if not asked.url.startswith(("http://127.0.0.1", "data:")) else None,
    )
    yield made
    context.close()
    assert problems == []


def ask(page, text):
    page.get_by_label("message", exact=True).fill(text)
    page.get_by_role("button", name="send").click()


def last(page):
    return page.locator(".message").last


def test_models_and_a_conversation(page, server):
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text(re.compile("ready, version"))
    expect(page.locator("#models tr")).to_have_count(1)
    expect(page.locator("#models td").first).to_have_text("tiny")
    expect(page.locator("#memory")).to_have_text(re.compile(r"[\d.]+ [MG]B"))
    ask(page, "Think about it")
    answer = last(page)
    expect(answer.locator(".content")).to_have_text("The answer is 4.")
    thought = answer.locator("details")
    expect(thought.locator("pre")).not_to_be_visible()
    thought.locator("summary").click()
    expect(thought.locator("pre")).to_have_text("First this, then that.")
    expect(answer.locator(".speed")).to_have_text(re.compile(r"\d+ tokens"))
    ask(page, "And then")
    expect(last(page).locator(".content")).to_have_text("Then it ends.")
    page.get_by_role("button", name="new conversation").click()
    expect(page.locator(".message")).to_have_count(0)


def test_what_a_model_writes_is_shown_as_text(page, server):
    page.goto(server.url)
    ask(page, "Show me tags")
    expect(last(page).locator(".content")).to_have_text(SCRIPT[" me tags"])
    assert page.locator("#messages b, #messages script, #messages img").count() == 0


def test_by_keyboard_alone(page, server):
    page.goto(server.url)
    expect(page.locator("#models tr")).to_have_count(1)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "text":
            break
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("And")
    page.keyboard.press("Shift+Enter")
    assert page.locator("#text").input_value() == "And\n"
    page.keyboard.press("Backspace")
    page.keyboard.type(" then")
    page.keyboard.press("Enter")
    expect(last(page).locator(".content")).to_have_text("Then it ends.")
    assert page.evaluate("document.activeElement.id") == "text"


@pytest.mark.parametrize("page", [NARROW], indirect=True)
def test_on_a_narrow_screen(page, server):
    page.goto(server.url)
    ask(page, "Think about it")
    expect(last(page).locator(".content")).to_have_text("The answer is 4.")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for name in ("send", "stop", "new conversation"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"] and box["height"] >= 24


def test_a_key_is_asked_for_and_used(page, model):
    running = RunningServer(model, api_keys=(("person", KEY),))
    try:
        page.goto(running.url)
        expect(page.locator("#state")).to_have_text("needs an API key")
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="use").click()
        expect(page.locator("#state")).to_have_text(re.compile("ready"))
        ask(page, "And then")
        expect(last(page).locator(".content")).to_have_text("Then it ends.")
        assert KEY not in page.content()
    finally:
        running.stop()


def test_an_answer_can_be_stopped_and_errors_are_shown(page, server, model):
    page.goto(server.url)
    page.get_by_label("tokens at most").fill("100000")
    ask(page, "And then")
    expect(last(page).locator(".content")).to_have_text(re.compile("maximum context length is 1024 tokens"))
    page.get_by_label("tokens at most").fill("900")
    page.get_by_label("temperature").fill("2")  # random tokens, which seldom end
    ask(page, "zzz")
    page.get_by_role("button", name="stop").click()
    expect(page.get_by_role("button", name="stop")).to_be_disabled()
    until = time.monotonic() + 20
    while model.engine.stats().scheduler.num_running:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_server_that_is_gone_is_told(page, model):
    running = RunningServer(model)
    page.goto(running.url)
    expect(page.locator("#state")).to_have_text(re.compile("ready"))
    running.stop()
    expect(page.locator("#state")).to_have_text("the server does not answer", timeout=20_000)


def test_several_models(page, tmp_path):
    paths = {name: shutil.copytree(EMBEDDED, tmp_path / name) for name in ("first", "second")}
    specs = [ModelSpec((name,), lambda path=path: serve(path), str(path)) for name, path in paths.items()]
    several = Server(ServerOptions(port=0, warm_up=False, max_loaded_models=1), specs)
    thread = threading.Thread(target=several.run)
    thread.start()
    try:
        while not several.addresses:
            time.sleep(0.05)
        page.goto(several.addresses[0])
        statuses = page.locator("#models td:nth-child(2)")
        expect(statuses).to_have_text(["unloaded", "unloaded"])
        for name, loaded in (("second", ["unloaded", "loaded"]), ("first", ["loaded", "unloaded"])):
            page.get_by_label("model", exact=True).select_option(name)
            page.get_by_label("tokens at most").fill("8")
            ask(page, "Hi")
            expect(last(page).locator(".content")).to_have_text(re.compile("Hello"), timeout=60_000)
            expect(statuses).to_have_text(loaded)
    finally:
        several.stop()
        thread.join(60)
