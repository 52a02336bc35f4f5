"""``torchax-serve run``: a chat in the terminal, or one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.cli.loading import followed
from torchax_serve.cli.options import DeviceOptions, LoadOptions, load_options
from torchax_serve.cli.terminal import is_terminal, note

_SAMPLING = "Decoding (default: what the model's generation_config says)"
STDIN = "-"


def _sampling(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, show_default=False, rich_help_panel=_SAMPLING)


@load_options
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            show_default=False,
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
    system: Annotated[str | None, typer.Option(show_default=False, help="System prompt of the chat.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(show_default=False, help="A picture to go with the (first) prompt; may be given several times."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per answer: text, token_ids, stats, model.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        _sampling(
            "--max-new-tokens", "Longest answer, in tokens; 1024 in a chat and 256 raw where the model says none."
        ),
    ] = None,
    min_new_tokens: Annotated[int | None, _sampling("--min-new-tokens", "Shortest answer, in tokens.")] = None,
    temperature: Annotated[
        float | None, _sampling("--temperature", "Above 1 more varied, below 1 less; 0 is greedy.")
    ] = None,
    top_k: Annotated[int | None, _sampling("--top-k", "Draw from the k likeliest tokens; 0 is off.")] = None,
    top_p: Annotated[
        float | None, _sampling("--top-p", "Draw from the likeliest tokens that have this probability together.")
    ] = None,
    min_p: Annotated[
        float | None, _sampling("--min-p", "Leave out tokens below this fraction of the likeliest one's probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", "Above 1 makes tokens that were said less likely.")
    ] = None,
    no_repeat_ngram_size: Annotated[
        int | None, _sampling("--no-repeat-ngram-size", "Never say the same n tokens twice; 0 is off.")
    ] = None,
    seed: Annotated[int | None, _sampling("--seed", "Same seed, same prompt, same answer.")] = None,
    stop: Annotated[list[str] | None, _sampling("--stop", "End before this text; may be given several times.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token.", rich_help_panel=_SAMPLING)
    ] = False,
    *,
    load: DeviceOptions,
) -> None:
    """Chat with a model in the terminal, or get one answer.

    Without MODEL the small model that comes with the package runs. With a PROMPT, or with a prompt in a pipe, there is
    one answer, and stdout carries nothing else:

    torchax-serve run "What is JAX?"

    echo "What is JAX?" | torchax-serve run qwen3-0.6b

    cat notes.txt | torchax-serve run qwen3-0.6b - -p "Sum this up:"

    torchax-serve run gemma-3-4b-it "What is in this picture?" --image cat.png
    """
    from torchax_serve.request import SamplingParams

    if followed(None if model is not None and prompt is None and _is_prompt(model) else model, load):
        return
    model, text = _model_and_prompt(model, prompt, prompt_option)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        do_sample=False if greedy else None,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        seed=seed,
        stop=tuple(stop) if stop else None,
    )
    _run(model, text, load, params, system=system, images=image or [], raw=raw, as_json=as_json)


def _run(
    name: str | None,
    text: str | None,
    load: LoadOptions,
    params: Any,
    *,
    system: str | None,
    images: list[Path],
    raw: bool,
    as_json: bool,
) -> None:
    from torchax_serve.cli.loading import loaded_model

    with loaded_model(name, load) as model:
        # Behind the loading, so that importing torch counts as loading and Ctrl-C ends it as well.
        from torchax_serve.cli.answers import write_answer
        from torchax_serve.cli.conversation import Conversation
        from torchax_serve.cli.interactive import InteractiveChat
        from torchax_serve.cli.interrupts import prompt_interrupts
        from torchax_serve.cli.reader import terminal_reader
        from torchax_serve.text.chat import has_chat_template

        if not raw and model.tokenizer is not None and not has_chat_template(model):
            note(f"{model.name} has no chat template: it continues your text (--raw, without this note)")
            raw = True
        conversation = Conversation(model, params, raw=raw)
        conversation.set_system(system)
        for image in images:
            conversation.attach(image)
        if text is None:
            _say_what_fits(model)
            InteractiveChat(conversation, terminal_reader(), as_json=as_json).run()
            return
        if not text.strip():
            raise _empty_prompt()
        with prompt_interrupts(leave_at=1):
            write_answer(conversation.answer(text), model_name=model.name, as_json=as_json)


def _say_what_fits(model: Any) -> None:
    try:
        note(model.engine.description)
    except UnsupportedModelError as error:
        note(f"one request at a time: {error}")


def _model_and_prompt(
    model: str | None, prompt: str | None, prompt_option: str | None
) -> tuple[str | None, str | None]:
    """Which argument is which; the prompt is None where the user is to be asked.

    Raises:
        InvalidArgumentError: two prompts, or an empty one.
    """
    if model is not None and prompt is None and _is_prompt(model):
        model, prompt = None, model
    if prompt == STDIN:
        prompt = _read_stdin()
        if prompt_option is not None:
            prompt_option, prompt = None, f"{prompt_option}\n\n{prompt}"
    if prompt is not None and prompt_option is not None:
        raise InvalidArgumentError(f"two prompts, {prompt!r} and --prompt {prompt_option!r}; give one of them")
    text = prompt if prompt is not None else prompt_option
    if text is not None and not text.strip():
        raise _empty_prompt()
    if text is None and not is_terminal(sys.stdin):
        text = _read_stdin()  # if nothing comes, a wrong name of the model is the better complaint
    return model, text


def _empty_prompt() -> InvalidArgumentError:
    return InvalidArgumentError("the prompt is empty; give some text as PROMPT, by --prompt, or in a pipe")


def _is_prompt(argument: str) -> bool:
    """Whether a lone argument is a prompt: no name of a model has a space in it, only a folder may."""
    return argument == STDIN or (any(c.isspace() for c in argument) and not Path(argument).exists())


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the prompt on stdin: expected UTF-8 text, got byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from error
