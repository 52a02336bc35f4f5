"""Commands of models with heads for further tasks: what they print, and the files that they write."""

import json

import numpy as np
import pytest
import soundfile
import task_models
from PIL import Image
from typer.testing import CliRunner

from torchax_serve import serve
from torchax_serve.cli.main import app
from torchax_serve.cli.shared.result_files import with_boxes, with_masks
from torchax_serve.tasks.results import Box, Detection, Segment

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),  # TimesFM's own code
]


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models by name, with pictures and a sound next to them."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("vit", "segformer", "vits", "timesfm", "sam"):
        (folder / name).mkdir()
        getattr(task_models, name)(folder / name)
    for index, image in enumerate(task_models.images()[:2]):
        image.save(folder / f"{index}.png")
    return folder


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_classify(models):
    files = [models / "0.png", models / "1.png"]
    with serve(models / "vit") as served:
        expected = served.classify_images(files, top_k=2)
    printed = call("classify", models / "vit", *files, "--top-k", 2)
    assert printed.exit_code == 0, printed.stderr
    lines = [f"{path}: {e.label} {e.score:.4f}" for path, row in zip(files, expected, strict=True) for e in row]
    assert printed.stdout.splitlines() == lines
    found = json.loads(call("classify", models / "vit", files[0], "--top-k", 1, "--json").stdout)
    assert [row["file"] for row in found] == [str(files[0])]
    assert found[0]["labels"][0]["label"] == expected[0][0].label
    refused = call("detect", models / "vit", files[0])
    assert refused.exit_code == 2 and "whose methods are classify_images, embed_images" in refused.stderr


@pytest.mark.thorough
def test_segment_into_pictures(models, tmp_path):
    files = [models / "0.png", models / "1.png"]
    with serve(models / "segformer") as served:
        expected = served.segment(files)
    done = call("segment", models / "segformer", *files, "--output", tmp_path, "--json")
    assert done.exit_code == 0, done.stderr
    for path, row, parts in zip(files, json.loads(done.stdout), expected, strict=True):
        assert [each["label"] for each in row["segments"]] == [each.label for each in parts]
        assert sum(each["share"] for each in row["segments"]) == pytest.approx(1)
        with Image.open(path) as image, Image.open(tmp_path / path.name) as drawn:
            assert drawn.size == image.size and (np.asarray(drawn) != np.asarray(image)).any()
    for output, message in [
        (tmp_path / "masks.txt", "expected a name that ends with .png"),
        (tmp_path / "none" / "masks.png", "expected a folder that is there"),
    ]:
        refused = call("segment", models / "segformer", files[0], "--output", output)
        assert refused.exit_code == 2 and message in refused.stderr
    refused = call("segment", models / "segformer", tmp_path / "none.png")
    assert refused.exit_code == 2 and "FILE: expected a file that is there" in refused.stderr


def test_segment_at_points_and_in_boxes(models, tmp_path):
    files = [models / "0.png", models / "1.png"]
    with serve(models / "sam") as served:
        at_points = [served.masks(file, points=[(10, 12), (30, 25)], labels=[1, 0]) for file in files]
        in_boxes = served.masks(files[0], boxes=[(5, 4, 30, 20), (10, 10, 38, 30)])
    done = call("segment", models / "sam", *files, "--point", "10,12", "--outside", "30,25", "-o", tmp_path, "--json")
    assert done.exit_code == 0, done.stderr
    for path, row, objects in zip(files, json.loads(done.stdout), at_points, strict=True):
        (best,) = (masks[0] for masks in objects)
        (shown,) = row["segments"]
        assert (shown["label"], shown["share"]) == ("object 1", pytest.approx(best.mask.mean(), abs=1e-3))
        assert shown["score"] == pytest.approx(best.score, abs=1e-5)
        with Image.open(path) as image, Image.open(tmp_path / path.name) as drawn:
            changed = (np.asarray(drawn) != np.asarray(image)).any(-1)
        assert (changed == best.mask).mean() > 0.99
    done = call("segment", models / "sam", files[0], "--box", "5,4,30,20", "--box", "10,10,38,30")
    lines = [f"{files[0]}: object {i} {masks[0].score:.4f}" for i, masks in enumerate(in_boxes, 1)]
    assert [line.rpartition(" ")[0] for line in done.stdout.splitlines()] == lines
    for name, options, message in (
        ("sam", (), "--point: expected a point or a box"),
        ("sam", ("--point", "10"), "--point: expected X,Y in pixels, got '10'"),
        ("sam", ("--box", "1,2,x,4"), "--box: expected LEFT,TOP,RIGHT,BOTTOM in pixels"),
        ("sam", ("--outside", "1,2"), "--outside: expected with --point or --box"),
        ("sam", ("--point", "1,2", "--threshold", 0.5), "--threshold: expected none"),
        ("segformer", ("--point", "1,2"), "--point, --box: expected none"),
    ):
        refused = call("segment", models / name, files[0], *options)
        assert refused.exit_code == 2 and message in " ".join(refused.stderr.split()), refused.stderr


@pytest.mark.thorough
def test_speak(models, tmp_path):
    with serve(models / "vits") as served:
        expected = served.speak("a small cat", seed=3).samples
    done = call("speak", models / "vits", "a small cat", "--seed", 3, "--output", tmp_path / "cat.wav")
    assert done.exit_code == 0, done.stderr
    samples, rate = soundfile.read(tmp_path / "cat.wav")
    assert rate == 16_000
    np.testing.assert_allclose(samples, np.clip(expected, -1, 1), atol=1e-4)


def test_boxes_are_drawn():
    image = Image.new("RGB", (60, 40), "white")
    found = [Detection("cat", 0.9, Box(5, 10, 30, 30)), Detection("dog", 0.8, Box(20, 12, 50, 35))]
    drawn = np.asarray(with_boxes(image, found))
    assert np.asarray(image).min() == 255 and drawn.shape == (40, 60, 3)
    assert tuple(drawn[30, 10]) == tuple(drawn[20, 5]) != tuple(drawn[35, 40]) != (255, 255, 255)


def test_masks_are_drawn():
    image = Image.new("RGB", (60, 40), "white")
    mask = np.zeros((40, 60), bool)
    mask[10:20, 5:25] = True
    drawn = np.asarray(with_masks(image, [Segment("cat", None, mask)]))
    assert ((drawn != 255).any(-1) == mask).all()


def test_forecast(models, tmp_path):
    series = [float(index % 7) for index in range(40)]
    with serve(models / "timesfm") as served:
        expected = served.forecast(series, horizon=5)
    file = tmp_path / "sales.csv"
    file.write_text("day,sold,note\n" + "".join(f"{index},{value},x\n" for index, value in enumerate(series)))
    picture = tmp_path / "sales.png"
    done = call("forecast", models / "timesfm", file, "--column", "sold", "--horizon", 5, "-o", picture, "--json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)
    np.testing.assert_allclose([row["mean"] for row in rows], expected.mean, rtol=1e-6)
    assert list(rows[0]["quantiles"]) == [str(level) for level in expected.levels]
    with Image.open(picture) as image:
        assert image.size == (800, 400)
    for content, arguments, message in (
        ("day,sold\n1,2\n2,\n", ("--column", "sold"), "expected a number in line 3"),
        ("day,sold\n1,2\n", ("--column", "price"), "--column: expected one of day, sold, got price"),
        ("1\n2\n", ("--column", "sold"), "expected none for a file without names"),
        ("1\nnan\n2\n", (), "got nan at 1; fill gaps first"),
    ):
        file.write_text(content)
        refused = call("forecast", models / "timesfm", file, *arguments)
        assert refused.exit_code == 2 and message in " ".join(refused.stderr.split()), refused.stderr
