"""``torchax-serve run``: a chat in the terminal, or one answer."""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError
from model_adapters.loading.model_source import bundle_folder
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.engine_options import EngineFlags, ServeOptions
from torchax_serve.cli.shared.load_model import end_if_explained, loaded_model, run_as_follower
from torchax_serve.cli.shared.load_options import option_groups
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.cli.shared.sampling_options import DecodingOptions
from torchax_serve.cli.shared.terminal import hidden_keys, is_terminal, print_note
from torchax_serve.validation.extras import require_package

if TYPE_CHECKING:
    from torchax_serve import EngineOptions
    from torchax_serve.cli.chat.conversation import Conversation
    from torchax_serve.sampling_params import SamplingParams

STDIN = "-"


@dataclass(frozen=True)
class RunOptions:
    """Options of the conversation and of the output."""

    system: Annotated[
        str | None, typer.Option("--system", "--system-prompt", show_default=False, help="System prompt of the chat.")
    ] = None
    image: Annotated[
        list[Path] | None,
        typer.Option(show_default=False, help="A picture to go with the (first) prompt; may be given several times."),
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without chat template.")] = (
        False
    )
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per answer: text, token_ids, stats, model.")
    ] = False
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Neither read nor write the file with the messages typed before.")
    ] = False

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise InvalidArgumentError(
                "--system: expected without --raw, as a system prompt needs a chat; leave one of them out"
            )
        if self.raw and self.image:
            raise InvalidArgumentError("--image: expected without --raw, as an image needs a chat; leave one out")
        if self.image:
            require_package("PIL", "--image", extra="images", package="pillow")
        for image in self.image or []:
            if not image.is_file():
                raise InvalidArgumentError(f"--image: expected a file with a picture, and there is none at {image}")


@option_groups
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            show_default=False,
            autocompletion=complete_model,
            help="Short name, hub id or folder; without it the small model of the package. "
            "A lone argument with a space in it is the PROMPT.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(show_default=False, help="Answer this and end; - reads it from stdin.")
    ] = None,
    prompt_option: Annotated[
        str | None,
        typer.Option("--prompt", "-p", show_default=False, help="PROMPT; with - as PROMPT it stands before stdin."),
    ] = None,
    *,
    chat: RunOptions,
    decoding: DecodingOptions,
    engine: EngineFlags,
    load: ServeOptions,
) -> None:
    """Chat with a model in the terminal, or get one answer.

    Without MODEL the small model that comes with the package runs. With a PROMPT, or with a prompt in a pipe, there is
    one answer, and stdout carries nothing else:

    torchax-serve run "What is JAX?"

    echo "What is JAX?" | torchax-serve run qwen3-0.6b

    cat notes.txt | torchax-serve run qwen3-0.6b - -p "Sum this up:"

    torchax-serve run gemma-3-4b-it "What is in this picture?" --image cat.png
    """
    model, prompt = _model_first(model, prompt)
    _check_name(model, load.revision)
    end_if_explained(model, load)
    if run_as_follower(model, load):
        return
    text = _text(prompt, prompt_option)
    made = functools.partial(_engine, model, engine)
    with loaded_model(model, load, engine=made, starts_chat=not chat.raw) as served:
        with prompt_interrupts(leave_at=1), hidden_keys():
            conversation = _conversation(served, _with_adapter(decoding.params(), load), chat)
            if text is None:
                _say_what_fits(served)
        if text is None:
            _talk(conversation, chat)
        else:
            _answer(conversation, text, as_json=chat.as_json)


# Imported after loading has begun, so that importing torch counts as loading and Ctrl-C ends it as well.


def _engine(model: str | None, flags: EngineFlags) -> EngineOptions | None:
    """Returns the engine's options: one request at a time; a bundle has sizes of its own."""
    if bundle_folder(model) is not None:
        return flags.options() if flags.given else None
    return flags.options(max_num_seqs=1)


def _with_adapter(params: SamplingParams, load: ServeOptions) -> SamplingParams:
    """Returns a conversation's parameters with the adapter of ``--adapter NAME=FOLDER``."""
    _, named = load.adapters()
    if len(named) > 1:
        raise InvalidArgumentError(f"--adapter: expected one adapter of a conversation, got {', '.join(named)}")
    return dataclasses.replace(params, adapter=next(iter(named), None))


def _conversation(model: Any, params: SamplingParams, options: RunOptions) -> Conversation:
    """Returns an empty conversation."""
    from torchax_serve.cli.chat.conversation import Conversation
    from torchax_serve.text.chat import has_chat_template

    if not getattr(model, "writes_text", True):
        raise UnsupportedModelError(
            f"run: expected a model that writes text, and {model.name} is an encoder; for embeddings of texts: "
            f"torchax-serve embed {model.name} TEXT"
        )
    is_raw = options.raw
    if not is_raw and model.text_tokenizer is not None and not has_chat_template(model):
        print_note(f"{model.name} has no chat template: it continues your text (--raw, without this note)")
        is_raw = True
    conversation = Conversation(model, params, raw=is_raw)
    conversation.set_system(options.system)
    for image in options.image or []:
        conversation.attach(image)
    return conversation


def _talk(conversation: Conversation, options: RunOptions) -> None:
    """Runs a chat at the terminal."""
    from torchax_serve.cli.chat.input import terminal_reader
    from torchax_serve.cli.chat.repl import COMMANDS, InteractiveChat

    read_message = terminal_reader(COMMANDS, with_history=not options.no_history)
    InteractiveChat(conversation, read_message, as_json=options.as_json).run()


def _answer(conversation: Conversation, text: str, *, as_json: bool) -> None:
    """Prints one answer on stdout."""
    from torchax_serve.cli.chat.output import write_answer

    with prompt_interrupts(leave_at=1):
        write_answer(conversation.answer(text), model_name=conversation.model.name, as_json=as_json)


def _say_what_fits(model: Any) -> None:
    try:
        print_note(model.engine.description)
    except UnsupportedModelError as error:
        print_note(f"one request at a time: {error}")


def _check_name(model: str | None, revision: str | None) -> None:
    """Raises ModelNotFoundError for a name that is no model, before any heavy import.

    A single word may be meant as a prompt.
    """
    try:
        check_model(model, revision)
    except ModelNotFoundError as error:
        if model is None or "/" in model:
            raise
        raise ModelNotFoundError(f'{error}; to ask the embedded model, give the prompt as -p "{model}"') from error


def _model_first(model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """Returns the model and the prompt; a single argument may be the prompt."""
    return (None, model) if model is not None and prompt is None and _is_prompt(model) else (model, prompt)


def _text(prompt: str | None, prompt_option: str | None) -> str | None:
    """Returns the text to answer; None if the user is to be asked.

    Raises:
        InvalidArgumentError: two prompts, or an empty one.
    """
    if prompt == STDIN:
        prompt = _read_stdin()
        if prompt_option is not None:
            prompt_option, prompt = None, f"{prompt_option}\n\n{prompt}"
    if prompt is not None and prompt_option is not None:
        raise InvalidArgumentError(f"two prompts, {prompt!r} and --prompt {prompt_option!r}; give one of them")
    text = prompt if prompt is not None else prompt_option
    if text is None and not is_terminal(sys.stdin):
        text = _read_stdin()
    if text is not None and not text.strip():
        raise InvalidArgumentError("the prompt is empty; give some text as PROMPT, by --prompt, or in a pipe")
    return text


def _is_prompt(argument: str) -> bool:
    """Returns whether a single argument is a prompt.

    Names of models have no space, but folders may.
    """
    return argument == STDIN or (any(c.isspace() for c in argument) and not Path(argument).exists())


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the prompt on stdin: expected UTF-8 text, got byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from error


COMMAND = Command(
    "run",
    run,
    position=10,
    examples=(
        ("run", "chat with the small model that comes with the package"),
        ('run "What is JAX?"', "ask it one question"),
        ("run qwen3-0.6b", "chat with a model of the Hugging Face hub"),
        ("run ./my-model -p Hello", "a folder of your own, one answer"),
    ),
)
