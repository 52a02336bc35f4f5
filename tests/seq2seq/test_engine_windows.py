"""Windows of Whisper on the engine: times, long audio and further temperatures, as transformers has them alone."""

import asyncio
import functools

import pytest
import torch
import transformers
from steps_taken import steps_taken
from threads import at_once
from timed_whisper import RATE, noise, timed_whisper, tokenizer
from transformers.generation import GenerateEncoderDecoderOutput

from torchax_serve import DeadlineError, EngineOptions, serve
from torchax_serve.generation import engine_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NEW = {"max_new_tokens": 12, "language": "en"}
TIMES = {**NEW, "return_timestamps": True, "return_segments": True}
SECONDS = [1.3, 5.2, 4.4]  # of sounds in windows of two seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def eager(folder):
    return timed_whisper(folder, max_initial_timestamp_index=30)


@pytest.fixture(scope="module")
def model(eager, folder):
    with serve(folder, engine=EngineOptions(max_num_seqs=4, page_size=4)) as served:
        served.engine.check_integrity = True
        yield served


@functools.cache
def sound(index):
    return noise(SECONDS[index], 10 + index)


def features(folder, audio):
    options = {"truncation": False, "padding": "longest"} if len(audio) > 2 * RATE else {}
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    return dict(extractor(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **options))


def segments_of(found):
    return [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in found["segments"][0]]


def text_of(tokens):
    return tokenizer().batch_decode(getattr(tokens, "sequences", tokens), skip_special_tokens=True)[0].strip()


def ours(model, inputs, **options):
    before = steps_taken(model)
    found = model.generate(**inputs, **options)
    assert steps_taken(model) > before  # on the engine
    return found


@pytest.mark.parametrize(
    ("index", "options"),
    [
        (0, {}),
        (1, {}),
        (1, {"condition_on_prev_tokens": True, "suppress_tokens": [3, 4]}),
        (2, {"prompt_ids": torch.tensor([46, 3, 9]), "repetition_penalty": 1.3}),
    ],
)
def test_segments_are_those_of_transformers(eager, model, folder, index, options):
    inputs = features(folder, sound(index))
    expected = eager.generate(**inputs, **TIMES, **options)
    assert segments_of(ours(model, inputs, **TIMES, **options)) == segments_of(expected)


# One token at any temperature is the likeliest: what is drawn is known.
FALLBACK = {"temperature": (0.0, 0.4, 1.0), "top_k": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"compression_ratio_threshold": 0.1},  # every attempt fails, the last one counts
        {"logprob_threshold": -1.0, "no_speech_threshold": 0.01},
        {"logprob_threshold": -0.5, "compression_ratio_threshold": 0.72, "condition_on_prev_tokens": True},
    ],
)
def test_windows_that_are_decoded_again(eager, model, folder, options):
    inputs = features(folder, sound(1))
    # What transformers hears as no speech it leaves out, so there may be no segment.
    expected = eager.generate(**inputs, **TIMES, **FALLBACK, **options)
    before = steps_taken(model)
    timed = model.transcribe_with_times(sound(1), sampling_rate=RATE, **NEW, **FALLBACK, **options)
    assert steps_taken(model) > before
    assert [(each.start_s, each.end_s, each.token_ids) for each in timed.segments] == [
        (pytest.approx(start, abs=2e-3), pytest.approx(end, abs=2e-3), ids) for start, end, ids in segments_of(expected)
    ]


def test_an_attempt_is_scored_as_in_transformers(eager, model, folder, monkeypatch):
    """Mean log-probabilities of attempts, those at a temperature included."""

    expected, outputs, mean_of = [], [], eager._retrieve_avg_logprobs

    def record_mean(*args):
        expected.append(float(mean_of(*args)))
        return torch.tensor(expected[-1])

    def record_output(**fields):
        outputs.append(GenerateEncoderDecoderOutput(**fields))
        return outputs[-1]

    monkeypatch.setattr(eager, "_retrieve_avg_logprobs", record_mean)
    monkeypatch.setattr(engine_rows, "GenerateEncoderDecoderOutput", record_output)
    options = {"temperature": (0.0, 0.7), "top_k": 1, "logprob_threshold": 0.5, "suppress_tokens": [5, 6]}
    eager.generate(**features(folder, sound(0)), **TIMES, **options)
    model.transcribe_with_times(sound(0), sampling_rate=RATE, **NEW, **options)
    found = [float(torch.cat([step[0] for step in output.scores]).mean()) for output in outputs]
    assert found == pytest.approx(expected, abs=1e-4)
    assert len(found) >= 2 and found[0] < -0.1


def test_sounds_beside_each_other(eager, model, folder):
    """Long ones and short ones with and without times, of one call and of several threads, in the same steps."""
    expected = [
        text_of(eager.generate(**features(folder, sound(index)), **{**TIMES, "return_segments": False}))
        for index in range(3)
    ]
    plain = text_of(eager.generate(features(folder, sound(0))["input_features"], **NEW))
    calls = [
        lambda: model.transcribe(
            [sound(index) for index in range(3)], sampling_rate=RATE, return_timestamps=True, **NEW
        ),
        lambda: model.transcribe(sound(1), sampling_rate=RATE, **NEW),
        lambda: model.transcribe(sound(0), sampling_rate=RATE, **NEW),
        lambda: model.transcribe_with_times(sound(2), sampling_rate=RATE, **NEW).text,
    ]
    assert at_once(lambda call: call(), calls) == [expected, expected[1], plain, expected[2]]


def test_seeds_follow_from_torch(model):
    options = {"sampling_rate": RATE, "temperature": 0.9, "return_timestamps": True, **NEW}

    def transcribe():
        torch.manual_seed(5)
        return model.transcribe([sound(0), sound(1)], **options)

    first = transcribe()
    assert transcribe() == first
    assert model.transcribe([sound(0), sound(1)], **options) != first


def test_a_stream_has_no_attempt_that_was_dropped(model):
    options = {"sampling_rate": RATE, **NEW, "temperature": (0.0, 0.4), "top_k": 2, "compression_ratio_threshold": 0.1}

    async def streamed(audio):
        torch.manual_seed(6)
        return "".join([piece async for piece in model.astream_transcript(audio, **options)])

    for index in (0, 1):
        text = asyncio.run(streamed(sound(index)))
        torch.manual_seed(6)
        assert text == model.transcribe(sound(index), **options)


def test_loops_of_transformers_end_at_their_time(model):
    """A processor of the caller's own: each loop waits on the queue of single requests, and is ended there."""
    processors = transformers.LogitsProcessorList([transformers.TopKLogitsWarper(50)])
    options = {"sampling_rate": RATE, "logits_processor": processors, **NEW}
    text = model.transcribe(sound(0), return_timestamps=True, **options)
    assert text == model.transcribe(sound(0), sampling_rate=RATE, return_timestamps=True, **NEW)
    with pytest.raises(DeadlineError):
        model.transcribe(noise(600, 9), timeout_s=0.5, **options)
