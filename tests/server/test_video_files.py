"""Videos in chats: frames of animations and single frames; what is neither is a 400 of one line."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from torchax_serve.server.errors import ApiError
from torchax_serve.server.image_files import decode_image
from torchax_serve.server.messages import plain_messages
from torchax_serve.server.video_files import MAX_FRAMES, decode_animation


def frames(number, size=(6, 4)):
    return [Image.new("RGB", size, (8 * index % 256, 255 - 8 * index % 256, 3)) for index in range(number)]


def file_of(images, form="PNG", **options):
    data = io.BytesIO()
    images[0].save(data, form, save_all=len(images) > 1, append_images=images[1:], **options)
    return data.getvalue()


def asked(url, kind="video_url"):
    content = [{"type": kind, "video_url": {"url": url}}]
    return plain_messages([{"role": "user", "content": content}], "")[0]["content"][0]


def base64_of(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(("form", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_frames_of_an_animation(form, options):
    images = frames(3)
    part = asked(f"data:video/x;base64,{base64_of(file_of(images, form, duration=250, **options))}")
    assert (part["type"], part["fps"]) == ("video", 4.0)
    assert [np.asarray(frame).tolist() for frame in part["video"]] == [np.asarray(frame).tolist() for frame in images]


def test_frames_of_a_long_animation_have_equal_distances():
    images = frames(80, (3, 2))
    found, fps = decode_animation(file_of(images, "PNG", duration=100), "here")
    assert len(found) == MAX_FRAMES and fps == 1000 * MAX_FRAMES / 8000
    chosen = [images[index * 80 // MAX_FRAMES] for index in range(MAX_FRAMES)]
    assert [np.asarray(frame).tolist() for frame in found] == [np.asarray(frame).tolist() for frame in chosen]


def test_single_frames():
    images = frames(2)
    part = asked(f"data:video/jpeg;base64,{','.join(base64_of(file_of([image])) for image in images)}")
    assert part["fps"] is None
    assert [np.asarray(frame).tolist() for frame in part["video"]] == [np.asarray(frame).tolist() for frame in images]


def test_16_bits_of_an_image_are_scaled():
    pixels = np.array([[0, 300, 40_000, 65_535]], np.uint16)
    image = decode_image(file_of([Image.fromarray(pixels)]), "here")
    assert np.asarray(image)[0, :, 0].tolist() == [0, 1, 156, 255]


PIXEL = base64_of(file_of(frames(1, (1, 1))))
LARGE = file_of(frames(40, (1400, 1200)))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/cat.mp4", "remote files are not fetched"),
        (f"data:video/mp4;base64,{base64_of(bytes(4) + b'ftypisom' + bytes(40))}", "other files are not decoded"),
        ("data:video/mp4;base64,!!", "expected base64"),
        (f"data:video/gif;base64,{base64_of(LARGE)}", "expected at most 50000000 pixels in 32 frames, got 1400 x 1200"),
        (f"data:video/jpeg;base64,{','.join([PIXEL] * 33)}", "expected at most 32 frames, got 33"),
        (f"data:video/jpeg;base64,{PIXEL},aGVsbG8=", "expected an image as PNG"),
        (None, "expected a URL data:"),
    ],
)
def test_what_is_no_video_is_refused(url, said):
    with pytest.raises(ApiError) as caught:
        asked(url)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.status == 400
