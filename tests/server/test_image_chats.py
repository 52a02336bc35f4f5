"""Images in chats, as data URLs; what is no still picture of a reasonable size is a 400."""

import base64
import io
import struct
import sys
import zlib
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image
from running_server import serving
from transformers.image_utils import load_image

from torchax_serve.server.errors import ApiError
from torchax_serve.server.image_files import decode_image

sys.path.insert(0, str(Path(__file__).parents[1] / "multimodal"))

import llava_folder
from test_images import picture

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    llava_folder.make(path)
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def client(seeing):
    with openai.OpenAI(base_url=f"{seeing[0].url}/v1", api_key="none", max_retries=0) as found:
        yield found


def url_of(image, form="PNG", **options):
    data = io.BytesIO()
    image.save(data, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def ask(client, url, **fields):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this ?"}]
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], **{"max_tokens": 8, **fields}
    )


def test_an_answer_about_an_image_is_that_of_the_model(client, seeing):
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "What is this ?"}]
    from torchax_serve import SamplingParams

    expected = seeing[1].chat([{"role": "user", "content": content}], SamplingParams(max_new_tokens=8))
    answer = ask(client, url_of(picture()))
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 8 and answer.usage.prompt_tokens > 8
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, url_of(picture()), stream=True)]
    assert "".join(pieces) == expected
    other = ask(client, url_of(picture(1)), n=2)
    assert [choice.message.content for choice in other.choices] != [expected, expected]
    served = seeing[0].context.loaded[0].model
    assert served._single_engine is None  # all on the engine, and those of one image share pages
    assert served.engine.stats().scheduler.num_hit_tokens > 0


def test_an_image_of_ollamas_interface_is_that_of_a_url(client, seeing):
    expected = ask(client, url_of(picture())).choices[0].message.content
    message = {"role": "user", "content": "What is this ?", "images": [url_of(picture()).partition("base64,")[2]]}
    body = {"model": "tiny", "messages": [message], "stream": False, "options": {"num_predict": 8}}
    answer = httpx.post(f"{seeing[0].url}/api/chat", json=body, timeout=120).json()
    assert answer["message"]["content"] == expected
    body = {"model": "tiny", "prompt": message["content"], "images": message["images"], **body}
    del body["messages"]
    assert httpx.post(f"{seeing[0].url}/api/generate", json=body, timeout=120).json()["response"] == expected
    assert "vision" in httpx.post(f"{seeing[0].url}/api/show", json={"model": "tiny"}).json()["capabilities"]


FRAMES = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
SVG = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()


HUGE = ((1, 10**9), (10**9, 1), (31_623, 31_623))


def png_header(width, height):
    """The begin of a PNG file of a size that would take gigabytes."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(3 * 1000))
    pieces = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (chunk, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(pieces)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png;base64,!!!",
        "data:image/png;base64,aGVsbG8=",
        f"data:image/svg+xml;base64,{SVG}",
        url_of(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        url_of(Image.new("1", (10_000, 6_000))),
        url_of(picture())[:200],
        *(f"data:image/png;base64,{base64.b64encode(png_header(*size)).decode()}" for size in HUGE),
    ],
    ids=["remote", "file", "path", "no base64", "no image", "svg", "animated", "bomb", "truncated", *map(str, HUGE)],
)
def test_what_is_no_still_picture_is_refused(client, url):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, url)
    assert caught.value.param == "messages[0].content[0]"


def file_of(image, form, **options):
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_images_are_turned_by_their_orientation_as_transformers_does(form):
    exif = Image.Exif()
    for orientation in range(10):  # 0 and 9 say nothing
        exif[0x0112] = orientation
        data = file_of(picture(), form, exif=exif)
        assert decode_image(data, "x").tobytes() == load_image(Image.open(io.BytesIO(data))).tobytes()
    damaged = file_of(picture(), form, exif=exif.tobytes()[:-9])
    assert decode_image(damaged, "x").tobytes() == Image.open(io.BytesIO(damaged)).convert("RGB").tobytes()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP"])
def test_a_damaged_file_is_told_from_one_of_another_kind(form):
    with pytest.raises(ApiError, match=f"got a file that begins as {form} and is damaged or cut off"):
        decode_image(file_of(picture(), form)[:40], "x")
    with pytest.raises(ApiError, match="got something else"):
        decode_image(b"<svg/>", "x")


def test_a_model_of_texts_refuses_images(server):
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with plain, pytest.raises(openai.BadRequestError, match="which tiny does not take; leave them out") as caught:
        ask(plain, url_of(picture()))
    assert caught.value.param == "messages"
