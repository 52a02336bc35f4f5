"""Transcripts with times, streamed ones and asynchronous ones, against transformers' own in eager PyTorch."""

import asyncio
import contextlib
import time

import pytest
import torch
import transformers
from timed_whisper import NO_SPEECH, RATE, START, noise, timed_whisper, tokenizer

from torchax_serve import DeadlineError, EngineOptions, QueueFullError, UnsupportedModelError, serve

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NEW = {"max_new_tokens": 12, "language": "en"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("timed")


@pytest.fixture(scope="module")
def eager(folder):
    return timed_whisper(folder)


@pytest.fixture(scope="module")
def model(eager, folder):
    with serve(folder, engine=EngineOptions(max_num_seqs=2, max_num_waiting=2)) as served:
        yield served


@pytest.fixture(scope="module")
def pipeline(eager, folder):
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    return transformers.pipeline(
        "automatic-speech-recognition", model=eager, tokenizer=tokenizer(), feature_extractor=extractor
    )


def features(folder, audio, **options):
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    if len(audio) > 2 * RATE:
        options |= {"truncation": False, "padding": "longest"}
    return extractor(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **options)


def is_idle(model, within_s=20):
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        stats = model.stats()  # None until a request has made an engine
        if stats is None or not (stats.scheduler.num_running or stats.scheduler.num_waiting):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("seconds", [1.3, 5.2])
def test_segments_and_their_probabilities(eager, model, folder, seconds):
    audio = noise(seconds, 3)
    inputs = features(folder, audio)
    asked = {"return_timestamps": True, "return_segments": True, "return_dict_in_generate": True, "output_logits": True}
    expected = eager.generate(**inputs, **asked, **NEW)["segments"][0]
    found = model.transcribe_with_times(audio, sampling_rate=RATE, **NEW)
    assert found.duration_s == pytest.approx(seconds)
    assert found.language == "english" and found.words is None
    assert len(found.segments) == len(expected) > (seconds > 2)
    for segment, other in zip(found.segments, expected, strict=True):
        assert segment.token_ids == other["tokens"].tolist()
        assert (segment.start_s, segment.end_s) == pytest.approx((float(other["start"]), float(other["end"])), abs=2e-3)
        assert segment.text == tokenizer().decode(other["tokens"], skip_special_tokens=True)
        prompt_len = len(other["result"]["sequences"]) - len(other["result"]["logits"])
        logprobs = torch.stack(list(other["result"]["logits"])).log_softmax(-1)
        chosen = logprobs.gather(1, other["result"]["sequences"][prompt_len:, None])
        assert segment.avg_logprob == pytest.approx(chosen.mean().item(), abs=1e-4)
        window = torch.nn.functional.pad(inputs["input_features"][:, :, segment.seek : segment.seek + 200], (0, 200))
        with torch.no_grad():
            logits = eager(input_features=window[..., :200], decoder_input_ids=torch.tensor([[START]])).logits[0, 0]
        assert segment.no_speech_prob == pytest.approx(logits.softmax(-1)[NO_SPEECH].item(), abs=1e-5)
        assert segment.compression_ratio > 0
    assert found.text == model.transcribe(audio, sampling_rate=RATE, return_timestamps=True, **NEW)


@pytest.mark.parametrize("seconds", [1.3, 5.2])
def test_words_are_those_of_the_pipeline(pipeline, model, seconds):
    audio = noise(seconds, 4)
    expected = pipeline(
        {"raw": audio, "sampling_rate": RATE}, return_timestamps="word", generate_kwargs={**NEW, "num_beams": 1}
    )
    found = model.transcribe_with_times(audio, sampling_rate=RATE, words=True, **NEW)
    assert [(word.text, word.start_s, word.end_s) for word in found.words] == [
        (chunk["text"].strip(), *chunk["timestamp"]) for chunk in expected["chunks"]
    ]
    assert len(found.words) > (seconds > 2)


def test_the_language_is_that_which_the_model_detects(eager, model, folder):
    audio = noise(1.3, 5)
    detected = eager.detect_language(features(folder, audio)["input_features"])
    found = model.transcribe_with_times(audio, sampling_rate=RATE, max_new_tokens=6)
    assert found.language == {42: "english", 43: "german"}[int(detected)]


def test_what_a_model_lacks_is_named(folder, eager, tmp_path, model):
    timed_whisper(tmp_path, alignment_heads=None)
    with serve(tmp_path) as served:
        assert served.transcribe_with_times(noise(1), sampling_rate=RATE, max_new_tokens=4).segments
        with pytest.raises(UnsupportedModelError, match="expected a generation_config with alignment_heads"):
            served.transcribe_with_times(noise(1), sampling_rate=RATE, words=True)
        del served.generation_config.no_timestamps_token_id
        with pytest.raises(UnsupportedModelError, match="whose generation_config has no_timestamps_token_id"):
            served.transcribe_with_times(noise(1), sampling_rate=RATE)


def test_asynchronous_transcripts_are_those_of_the_blocking_calls(model):
    audio, long = noise(1.5, 6), noise(4.4, 7)
    texts = [model.transcribe(each, sampling_rate=RATE, **NEW) for each in (audio, long)]
    timed = model.transcribe_with_times(audio, sampling_rate=RATE, **NEW)

    async def streamed(each):
        return [piece async for piece in model.astream_transcript(each, sampling_rate=RATE, **NEW)]

    async def main():
        found = await asyncio.gather(
            *(model.atranscribe(each, sampling_rate=RATE, **NEW) for each in (audio, long)),
            model.atranscribe_with_times(audio, sampling_rate=RATE, **NEW),
        )
        assert found == [*texts, timed]
        pieces = await streamed(audio)
        assert "".join(pieces) == texts[0]
        assert len(pieces) > 1
        pieces = await streamed(long)
        assert "".join(pieces) == texts[1]
        assert len(pieces) > 1

    asyncio.run(main())


def test_cancelled_transcriptions_end(model):
    """Also those that wait, and those in the middle of long audio."""

    async def main():
        long = noise(60, 8)
        calls = [
            model.atranscribe(long, sampling_rate=RATE, **NEW),
            model.atranscribe_with_times(long, sampling_rate=RATE, **NEW),
            model.atranscribe(noise(1.5), sampling_rate=RATE, language="en", max_new_tokens=30),
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.2)
        pieces = model.astream_transcript(long, sampling_rate=RATE, **NEW)
        async with contextlib.aclosing(pieces):
            with pytest.raises(QueueFullError, match="expected at most 4 calls at a time, 2 of them waiting"):
                for _ in range(4):
                    tasks.append(asyncio.create_task(model.atranscribe(long, sampling_rate=RATE)))
                    await asyncio.sleep(0)
                    if tasks[-1].done():
                        await tasks[-1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert is_idle(model)
        return await asyncio.wait_for(model.atranscribe(noise(1.5, 6), sampling_rate=RATE, **NEW), 60)

    assert asyncio.run(main()) == model.transcribe(noise(1.5, 6), sampling_rate=RATE, **NEW)


def test_the_time_limit_is_that_of_all_windows(model):
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="timeout_s, which has passed"):
        model.transcribe(noise(600, 9), sampling_rate=RATE, timeout_s=1.0, **NEW)
    with pytest.raises(DeadlineError):
        asyncio.run(model.atranscribe_with_times(noise(600, 9), sampling_rate=RATE, timeout_s=1.0, **NEW))
    assert time.monotonic() - began < 30
    assert is_idle(model)
