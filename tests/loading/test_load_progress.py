"""What is shown while loading, and where."""

import io

import pytest
from loading_models import tiny_folder
from rich.console import Console

from model_adapters.loading import RichProgress, SilentProgress, load_model
from model_adapters.loading.progress import hub_bar_class


def test_nothing_by_default(tmp_path, capfd):
    tiny_folder(tmp_path)
    capfd.readouterr()
    load_model(tmp_path)
    load_model(tmp_path, progress=SilentProgress())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_not_a_character_where_stderr_is_no_terminal(tmp_path, capfd):
    tiny_folder(tmp_path)
    capfd.readouterr()
    load_model(tmp_path, progress=RichProgress())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_bar_on_a_terminal(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    load_model(tiny_folder(tmp_path / "m"), progress=RichProgress(console))
    assert "loading" in screen.getvalue()
    assert "kB" in screen.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_terminal_is_as_before_after_an_error(error):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with pytest.raises(error), RichProgress(console).stage("compiling", 3, "items") as advance:
        advance(1)
        raise error
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # cursor hidden, shown


def test_an_unknown_total():
    screen = io.StringIO()
    with RichProgress(Console(file=screen, force_terminal=True)).stage("compiling", None, "items") as advance:
        advance(2)
    assert "compiling" in screen.getvalue()


def test_the_hubs_bars_only_count():
    counted = []
    bar_class = hub_bar_class(counted.append)
    with bar_class(unit="B", unit_scale=True, total=100, initial=10, desc="file", name="hub") as bar:
        bar.update(30)
        bar.update(60)
    assert sum(counted) == 100
    bar.reset(50)  # the hub starts a file again
    assert sum(counted) == 0
