"""Videos: on the engine beside images and eager PyTorch, in conversations, and what is refused."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from parity_sweep.tiny.images import image_model, inputs_of
from torchax_serve import EngineOptions, serve
from torchax_serve.multimodal.processor import media_inputs
from torchax_serve.multimodal.video import MOST_PIXELS, checked_frames, metadata_of
from torchax_serve.text.messages import checked_conversation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
NUM_FRAMES = 2


def video_inputs(config, seed):
    """Arguments of ``generate`` for a video of two pairs of frames; Qwen2.5-VL counts seconds between them."""
    vision, generator = config.vision_config, torch.Generator().manual_seed(seed)
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    placeholders = [config.video_token_id] * (NUM_FRAMES * 16 // vision.spatial_merge_size**2)
    begin, end = config.vision_start_token_id, config.vision_end_token_id
    ids = torch.tensor([[4, 5, 6, begin, *placeholders, end, 7, 8]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == config.video_token_id).long(),
        "pixel_values_videos": torch.randn(NUM_FRAMES * 16, width, generator=generator),
        "video_grid_thw": torch.tensor([[NUM_FRAMES, 4, 4]]),
        "second_per_grid_ts": torch.tensor([1.0 + seed]),
    }


def test_videos_share_steps_with_images():
    eager = image_model("qwen2_5_vl").eval()
    asked = [video_inputs(eager.config, 0), video_inputs(eager.config, 1), inputs_of(eager, "qwen2_5_vl", 0)]
    asked.append({**asked[0], "second_per_grid_ts": torch.tensor([3.0])})  # other positions of the same pixels
    expected = [eager.generate(**copy.deepcopy(one), **GREEDY)[0, -6:].tolist() for one in asked]
    assert expected[0] != expected[1]
    options = EngineOptions(
        max_model_len=64, max_num_seqs=4, page_size=4, max_num_batched_tokens=11, kv_cache_memory_bytes=1 << 20
    )
    with serve(copy.deepcopy(eager), engine=options) as served:
        served.engine.check_integrity = True
        config = copy.deepcopy(served.generation_config)
        config.update(**GREEDY)
        streams = [served.iter_tokens((), config, inputs=one) for one in asked]
        assert [list(stream) for stream in streams] == expected
        assert served._single_engine is None


def test_an_image_and_a_video_in_both_orders():
    """The same pixels in both prompts, of which other tokens come first: neither features nor pages are the other's."""
    eager = image_model("qwen2_5_vl").eval()
    config = eager.config
    image, video = inputs_of(eager, "qwen2_5_vl", 0), video_inputs(config, 0)
    pixels = {name: value for name, value in {**video, **image}.items() if "ids" not in name and "mask" not in name}
    begin, end = config.vision_start_token_id, config.vision_end_token_id
    parts = [
        [begin, *each["input_ids"][torch.isin(each["input_ids"], torch.tensor([token]))].tolist(), end]
        for each, token in ((image, config.image_token_id), (video, config.video_token_id))
    ]
    asked = []
    for first, second in (parts, parts[::-1]):
        ids = torch.tensor([[4, 5, 6, *first, *second, 7, 8]])
        types = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id).long()
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        asked.append({**pixels, **texts})
    expected = [eager.generate(**copy.deepcopy(one), **GREEDY)[0, -6:].tolist() for one in asked]
    assert expected[0] != expected[1]
    options = EngineOptions(max_model_len=64, max_num_seqs=2, page_size=4, kv_cache_memory_bytes=1 << 20)
    with serve(copy.deepcopy(eager), engine=options) as served:
        config = copy.deepcopy(served.generation_config)
        config.update(**GREEDY)
        assert [list(served.iter_tokens((), config, inputs=one)) for one in asked] == expected
        assert served._single_engine is None


@dataclasses.dataclass
class Processor:
    """Keeps what it is called with, in place of a processor of transformers, whose videos need torchvision."""

    video_processor: Any
    image_processor: Any = True
    chat_template: str = "{{ messages }}"

    def apply_chat_template(self, conversation, **options):
        self.conversation, self.options = conversation, options
        return {"input_ids": torch.ones(1, 1)}


class Model:
    name = "tiny"
    torch_model = torch.nn.Identity()
    torch_model.dtype = torch.float32

    def __init__(self, processor):
        self._processor = lambda: processor


def question(**part):
    return [{"role": "user", "content": [{"type": "video", **part}, {"type": "text", "text": "What ?"}]}]


def test_frames_and_their_rate_reach_the_processor():
    processor = Processor(video_processor=True)
    pictures = [Image.new("RGB", (6, 4), color) for color in ("red", "blue")]
    asked = checked_conversation(question(video=pictures, fps=4), None)
    assert set(media_inputs(Model(processor), asked)) == {"input_ids"}
    part, _ = processor.conversation[0]["content"]
    assert (part["type"], part["video"].shape, set(part)) == ("video", (2, 4, 6, 3), {"type", "video"})
    assert part["video"][:, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255]]
    (metadata,) = processor.options["processor_kwargs"]["video_metadata"]
    assert (metadata["fps"], metadata["duration"], metadata["frames_indices"]) == (4.0, 0.5, [0, 1])
    media_inputs(Model(processor), checked_conversation(question(video=np.zeros((3, 4, 6, 3), np.uint8)), None))
    assert processor.options["processor_kwargs"]["video_metadata"][0]["fps"] == 2.0


def test_bad_videos():
    picture = Image.new("RGB", (6, 4))
    for video, said in (
        ("cat.mp4", "expected a list of PIL images or an array uint8.*, got str"),
        (np.zeros((2, 4, 6, 3), np.float32), r"got float32\[2, 4, 6, 3\]"),
        ([], "expected frames of 1 to .* got 0 in"),
        ([picture, Image.new("RGB", (5, 4))], "expected frames of one size, got 5x4, 6x4"),
        ([picture, "cat.png"], "expected frames that are PIL images, got str"),
        (np.broadcast_to(np.uint8(0), (MOST_PIXELS, 1, 2, 3)), "choose fewer of them"),
        (np.zeros((2, 0, 6, 3), np.uint8), "expected frames of 1 to"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            checked_frames(video)
    for fps in (0, -1, float("nan"), float("inf"), "2", True):
        with pytest.raises(InvalidArgumentError, match="fps: expected the frames per second"):
            metadata_of(np.zeros((1, 2, 2, 3), np.uint8), fps)
    with pytest.raises(UnsupportedModelError, match="expected a processor with a part for videos, got Processor"):
        media_inputs(Model(Processor(None)), checked_conversation(question(video=[picture]), None))
    with pytest.raises(UnsupportedArgumentError, match=r'video_url.*write {"type": "video", "video": frames'):
        checked_conversation([{"role": "user", "content": [{"type": "video_url"}]}], None)
