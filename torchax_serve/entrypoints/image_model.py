"""`ImageModel`: a diffusion pipeline that makes images of prompts."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import jax
import torch

from model_adapters.errors import (
    InvalidArgumentError,
    TorchaxServeError,
    UnsafeImageError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.loading.hub_pipeline import fetch_pipeline
from model_adapters.loading.progress import Progress, SilentProgress
from torchax_serve.diffusion.checks import check_pipeline
from torchax_serve.diffusion.loading import load_pipeline, put_on_jax
from torchax_serve.distributed.mesh import mesh_for
from torchax_serve.entrypoints.serve_arguments import PIPELINE, ServeArguments
from torchax_serve.pooling.queue import PoolingQueue, QueuedTexts, check_wanted
from torchax_serve.text.prompt import TextFacts
from torchax_serve.validation.argument_hints import refuses_unknown
from torchax_serve.validation.library_objects import is_pipeline_folder

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_WAITING_IMAGES = 256
"""Most images that wait; each takes seconds."""

OnStep = Callable[[int, int], None]
"""Called after each step with its number, from 1, and the number of steps."""


class ImageModel:
    """A pipeline of diffusers on JAX. A context manager: leaving it frees the weights.

    Attributes:
        name: The name by which the pipeline was loaded.
        class_name: Class of the pipeline.
        dtype_name: Name of its models' dtype, such as ``float32``.
        pipeline: The diffusers pipeline, whose models run on JAX, for everything that `generate_image` does not cover.
        methods: Names of its methods for requests, as of models with heads for images.
        text_tokenizer, running_engines, adapters: As of a `ServedModel`, which has more of them.
        text_facts: What the server asks of models of texts; nothing is known here.
    """

    writes_text = embeds = transcribes = False
    methods = ("generate_image",)
    text_tokenizer = None
    running_engines: Sequence[Any] = ()
    adapters: Mapping[str, str] = MappingProxyType({})

    def __init__(self, pipeline: Any, name: str) -> None:
        self.name = name
        self.class_name = type(pipeline).__name__
        self.dtype_name = str(pipeline.dtype).removeprefix("torch.")
        self.text_facts = TextFacts(name, False, None, None, None, None)
        self.pipeline: Any = pipeline
        self._lock = threading.Lock()  # a scheduler's state is that of one call
        self._queue = PoolingQueue(MAX_WAITING_IMAGES)
        pipeline.set_progress_bar_config(disable=True)

    def __repr__(self) -> str:
        state = "closed" if self.pipeline is None else f"{type(self.pipeline).__name__} on {self.device_description}"
        return f"<ImageModel {self.name!r}: {state}>"

    @property
    def device_description(self) -> str:
        """Kind of the device, such as ``cpu`` or ``TPU v6 lite``."""
        return str(jax.devices()[0].device_kind)

    @refuses_unknown
    def generate_image(
        self,
        prompt: str | Sequence[str],
        *,
        negative_prompt: str | Sequence[str] | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        width: int | None = None,
        height: int | None = None,
        seed: int | None = None,
        on_step: OnStep | None = None,
    ) -> Image | list[Image]:
        """Returns an image of a prompt, or a list of images of several.

        Args:
            prompt: What to draw; several prompts are one batch.
            negative_prompt: What not to draw, for each prompt.
            num_inference_steps: Number of denoising steps; None: the pipeline's default.
            guidance_scale: Weight of the prompt; None: the pipeline's default.
            width: Of the image in pixels; None: the pipeline's default.
            height: Likewise.
            seed: Of the noise; None: a new one for each call.
            on_step: Called after each step with its number and the number of steps.

        Raises:
            InvalidArgumentError: an empty prompt, a size or number that the pipeline does not take.
            UnsupportedArgumentError: an argument that this pipeline does not have; names it.
            UnsupportedModelError: the pipeline takes no prompt, or makes no images.
            UnsafeImageError: the pipeline's safety checker has removed an image.
        """
        given = {
            "negative_prompt": _prompts("negative_prompt", negative_prompt),
            "num_inference_steps": _at_least_one("num_inference_steps", num_inference_steps),
            "guidance_scale": guidance_scale,
            "width": self._pixels("width", width),
            "height": self._pixels("height", height),
        }
        given = {name: value for name, value in given.items() if value is not None}
        prompts = _prompts("prompt", prompt)
        self._check_arguments(given)
        seed = secrets.randbits(32) if seed is None else _seed(seed)
        generator = torch.Generator("cpu").manual_seed(seed)
        with self._lock, _errors_of_arguments():
            output = self._pipeline()(prompt=prompts, generator=generator, **given, **self._callback(on_step, given))
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise UnsafeImageError("the pipeline's safety checker has removed the image; change the prompt or the seed")
        images: list[Image] = list(output.images)
        for axis, wanted in (("width", width), ("height", height)):
            if wanted is not None and getattr(images[0], axis) != wanted:
                raise InvalidArgumentError(
                    f"{axis}: expected one that the pipeline can make, got {wanted}; the next one is "
                    f"{getattr(images[0], axis)}"
                )
        return images[0] if isinstance(prompt, str) else images

    async def agenerate_image(
        self,
        prompts: Sequence[str],
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> list[Image]:
        """Returns an image of each prompt, without blocking the event loop.

        Cancelling ends it behind a step. Images are made one by one, image ``i`` by `generate_image` with the seed
        ``seed + i``: it does not depend on what is made next to it.

        Args:
            prompts: What to draw.
            seed: Of the first image's noise; None: a new one for each.
            timeout_s: Seconds after which the call ends with an error, looked at before each step; None: never.
            queue_timeout_s: The same for a call that has not begun by then.
            **options: Of `generate_image`.

        Raises:
            InvalidArgumentError: as of `generate_image`.
            QueueFullError: too many images are waiting.
            DeadlineError: a time limit has passed.
        """

        def call(items: Sequence[tuple[str, int | None]]) -> list[Any]:
            found = []
            for prompt, own in items:
                check_wanted()
                found.append(self.generate_image(prompt, seed=own, on_step=lambda *_: check_wanted(), **options))
            return found

        numbered = [(each, None if seed is None else _seed(seed) + index) for index, each in enumerate(prompts)]
        return await QueuedTexts(self._queue, object(), call, numbered).run_async(timeout_s, queue_timeout_s)

    def stats(self) -> None:
        """Returns None: there is no engine."""

    def weight_counts(self) -> tuple[int, int]:
        """Returns the bytes of the weights, and their numbers."""
        parts = [each for each in self._pipeline().components.values() if isinstance(each, torch.nn.Module)]
        tensors = [tensor for part in parts for tensor in part.parameters()]
        return sum(each.numel() * each.element_size() for each in tensors), sum(each.numel() for each in tensors)

    def _pipeline(self) -> Any:
        if self.pipeline is None:
            raise TorchaxServeError("expected an open model, this one is closed; call serve() again")
        return self.pipeline

    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(type(self._pipeline()).__call__).parameters)

    def _check_arguments(self, given: dict[str, Any]) -> None:
        """Raises an error if the pipeline makes no images of prompts, or lacks one of the arguments."""
        kind, parameters = type(self._pipeline()).__name__, self._parameters()
        required = [
            name
            for name, parameter in inspect.signature(type(self.pipeline).__call__).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in ("self", "prompt")
        ]
        if "prompt" not in parameters or required:
            needs = ", ".join(required) or "no prompt"
            raise UnsupportedModelError(
                f"generate_image: expected a pipeline that takes a prompt alone, got {kind}, which takes {needs}; call "
                "model.pipeline(...) with diffusers' own arguments"
            )
        if missing := [name for name in given if name not in parameters]:
            raise UnsupportedArgumentError(
                f"{missing[0]}: expected an argument of {kind}, which has no such one; leave it out"
            )

    def _pixels(self, name: str, value: int | None) -> int | None:
        """Returns the checked width or height.

        Raises:
            InvalidArgumentError: not a multiple of the size that a latent stands for; names the next ones.
        """
        _at_least_one(name, value)
        pipeline = self._pipeline()
        unit = getattr(pipeline, "vae_scale_factor", None)
        if value is None or not isinstance(unit, int):
            return value
        unit *= 2 if hasattr(pipeline, "_pack_latents") else 1  # four neighbouring latents are one token
        if value % unit:
            below = value // unit * unit
            near = f"{below} or {below + unit}" if below else f"{unit}"
            raise InvalidArgumentError(f"{name}: expected a multiple of {unit} pixels, got {value}; take {near}")
        return value

    def _callback(self, on_step: OnStep | None, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the argument by which the pipeline calls `on_step`.

        None where it has no such argument.
        """
        if on_step is None or "callback_on_step_end" not in self._parameters():
            return {}

        def called(pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1, given.get("num_inference_steps") or len(pipeline.scheduler.timesteps))
            return values

        return {"callback_on_step_end": called}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights. Closing twice does nothing; any other call afterwards raises."""
        self._queue.close("the model was closed")
        self.pipeline = None

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes the pipeline into a folder, as diffusers does."""
        self._pipeline().save_pretrained(save_directory, **kwargs)


def load_image_model(options: ServeArguments) -> ImageModel:
    """Returns the pipeline that `serve` was asked for.

    Args:
        options: Options of `serve`; ``model`` is a folder with a pipeline, a hub id, or a pipeline.

    Raises:
        UnsupportedArgumentError: an argument that only language models have; names it.
        TorchaxServeError: the pipeline cannot be loaded.
    """
    for name, value in options.refused_by(PIPELINE).items():
        raise UnsupportedArgumentError(
            f"{name}: expected none with a pipeline of diffusers, got {value!r}; leave it out"
        )
    model, mesh = options.model, mesh_for(options.mesh, options.tensor_parallel)
    if not isinstance(model, str | os.PathLike):
        if options.dtype != "auto":
            raise UnsupportedArgumentError(
                f"dtype: expected auto with a pipeline object, got {options.dtype!r}; call pipeline.to first"
            )
        check_pipeline(model)
        return ImageModel(put_on_jax(model, mesh=mesh), type(model).__name__)
    progress = options.progress or SilentProgress()
    folder = _folder(options, progress)
    with progress.stage(f"loading {model}", None):
        pipeline = load_pipeline(folder, dtype=options.dtype, allow_pickle=options.allow_pickle, mesh=mesh)
    return ImageModel(pipeline, str(model))


def _folder(options: ServeArguments, progress: Progress) -> Path:
    """Returns the folder of the pipeline, which is downloaded if it is one of the hub."""
    model = os.fspath(options.model)
    if is_pipeline_folder(model):
        if options.revision is not None:
            raise UnsupportedArgumentError(
                f"revision: expected none with the folder {model}, got {options.revision!r}; leave it out"
            )
        return Path(model).expanduser()
    return fetch_pipeline(options.hub_request(model.strip(), allow_pickle=options.allow_pickle), progress)


@contextlib.contextmanager
def _errors_of_arguments() -> Iterator[None]:
    """Turns what diffusers says about its arguments into one line."""
    try:
        yield
    except TorchaxServeError:
        raise
    except ValueError as error:
        raise InvalidArgumentError(" ".join(str(error).split())) from error


def _prompts(name: str, value: str | Sequence[str] | None) -> str | list[str] | None:
    if value is None and name != "prompt":
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgumentError(f"{name}: expected a text or a list of texts, got {value!r}; give a text")
    if name == "prompt" and not all(text.strip() for text in texts):
        raise InvalidArgumentError("prompt: expected a text, got an empty one; say what to draw")
    return value if isinstance(value, str) else list(texts)


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidArgumentError(f"{name}: expected a whole number >= 1, got {value!r}; correct it")
    return value


def _seed(value: int) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidArgumentError(f"seed: expected a whole number from 0 to 2**63 - 1, got {value!r}; correct it")
    return value
