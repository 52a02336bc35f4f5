"""``torchax-serve speak``: a spoken text, as a wav file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import complete_model
from torchax_serve.cli.shared.result_files import check_output, model_with
from torchax_serve.validation.extras import require_package

ENDINGS = (".wav", ".flac", ".ogg")


@option_groups
def speak(
    model: Annotated[str, typer.Argument(help="Hub id or folder.", autocompletion=complete_model)],
    text: Annotated[str, typer.Argument(help="What to say.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help=f"File: a name that ends with {', '.join(ENDINGS)}.")],
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, show_default=False, help="Of the voice's noise; random without.")
    ] = None,
    speaker: Annotated[
        int | None, typer.Option("--speaker", min=0, show_default=False, help="Number of one of the model's speakers.")
    ] = None,
    speaking_rate: Annotated[
        float | None, typer.Option("--speaking-rate", show_default=False, help="Larger is quicker; the model's own.")
    ] = None,
    speaker_embedding: Annotated[
        Path | None,
        typer.Option("--speaker-embedding", show_default=False, help="File of NumPy with a voice, for SpeechT5."),
    ] = None,
    load: LoadOptions,
) -> None:
    """Say a text, into a file.

    torchax-serve speak facebook/mms-tts-eng "Hello from JAX." --output hello.wav
    """
    require_package("soundfile", "speak", extra="server")
    check_output(output, 1, ENDINGS)
    from torchax_serve.cli.shared.terminal import print_note

    with model_with(("speak",), "speak", model, load) as (served, _):
        voice = None if speaker_embedding is None else _read(speaker_embedding)
        speech = served.speak(text, seed=seed, speaker=speaker, speaking_rate=speaking_rate, speaker_embedding=voice)
    import soundfile

    try:
        soundfile.write(output, speech.samples, speech.sampling_rate)
    except (OSError, soundfile.SoundFileError) as error:
        raise InvalidArgumentError(f"--output: {output} cannot be written ({error}); choose another file") from error
    print_note(f"{len(speech.samples) / speech.sampling_rate:.2f} s at {speech.sampling_rate} Hz in {output}")


def _read(path: Path) -> Any:
    """Returns the array in a file of NumPy."""
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidArgumentError(
            f"--speaker-embedding: expected a file of NumPy (.npy), got {path}, which is something else or missing"
        ) from error


COMMAND = Command("speak", speak, position=24)
