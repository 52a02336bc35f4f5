"""The error tree of the project.

::

    TorchaxServeError
    ├── ModelNotFoundError      a name, folder or hub id that leads to no model
    ├── CheckpointError         the model is there, its files are not what they should be
    ├── UnsupportedModelError   an architecture or a task that this call cannot run
    │   └── IsPipelineError     a pipeline of diffusers, where a model of transformers was expected
    ├── InvalidArgumentError    an argument with an invalid value (also a ValueError)
    │   └── OperatorArgumentError  one that PyTorch's own operator refuses (also what PyTorch raises there)
    ├── UnsupportedArgumentError  an argument that exists in transformers and is not honoured here (also a ValueError)
    ├── ChatTemplateError       no chat template, or one that does not render
    ├── HostsError              hosts of one model that do not find each other, or are not alike
    ├── QueueFullError          more requests wait for an engine than it lets wait; ask again later
    │   └── QueueTokensError    more tokens of prompts wait than it lets wait
    ├── RequestError            a request that was taken has failed
    │   ├── NoTokenLeftError    its options forbid every token
    │   ├── UnsafeImageError    the pipeline's safety checker has removed the image
    │   └── DeadlineError       its time limit has passed
    │       └── QueueDeadlineError  its time limit for waiting has passed, before it began
    └── OutOfMemoryError        weights or cache do not fit; says how much was needed

A message says what was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class TorchaxServeError(Exception):
    """Base of every error that the project raises on purpose."""


class ModelNotFoundError(TorchaxServeError):
    """A name, folder or hub id that leads to no model."""


class CheckpointError(TorchaxServeError):
    """The files of a model are missing, damaged, or do not match its architecture."""


class UnsupportedModelError(TorchaxServeError):
    """An architecture or a task that this call cannot run."""


class IsPipelineError(UnsupportedModelError):
    """A repository with a pipeline of diffusers, where a model of transformers was expected."""


class InvalidArgumentError(TorchaxServeError, ValueError):
    """An argument with an invalid value."""


class OperatorArgumentError(InvalidArgumentError, RuntimeError, IndexError):
    """An argument that PyTorch's own operator refuses; code that expects its errors gets one."""


class UnsupportedArgumentError(TorchaxServeError, ValueError):
    """An argument that transformers knows and this project does not honour."""


class ChatTemplateError(TorchaxServeError):
    """A chat was asked of a model without a chat template, or the template does not render."""


class HostsError(TorchaxServeError):
    """Hosts that share a model do not find each other, or differ."""


class QueueFullError(TorchaxServeError):
    """More requests wait for an engine than it accepts (``EngineOptions(max_num_waiting=...)``)."""


class QueueTokensError(QueueFullError):
    """More tokens of prompts wait for an engine than it accepts.

    The limit is ``EngineOptions(max_num_waiting_tokens=...)``.
    """


class RequestError(TorchaxServeError):
    """A request that was taken has failed; the message says why. Others are not concerned."""


class NoTokenLeftError(RequestError):
    """The options of a request, such as a grammar next to bad words, forbid every token.

    Args:
        options: Names of the options that forbid them together; ``masks`` are those of a grammar.
        num_tokens: Tokens of the answer before.
        reason: What the one option says itself; None: nothing.

    Attributes:
        options, num_tokens, reason: As the arguments.
    """

    def __init__(self, options: Sequence[str], num_tokens: int, reason: str | None = None) -> None:
        self.options, self.num_tokens, self.reason = tuple(options), num_tokens, reason
        names = ", ".join(self.options)
        together = " together" if len(self.options) > 1 else ""
        super().__init__(
            f"expected options that leave a token after {num_tokens} of the answer, got {names}, which forbid all"
            f"{together}{'' if reason is None else f' ({reason})'}; leave one of them out, or allow more"
        )

    def __reduce__(self) -> tuple[type[NoTokenLeftError], tuple[Sequence[str], int, str | None]]:
        """Returns what pickle makes it of: the arguments, not the message."""
        return type(self), (self.options, self.num_tokens, self.reason)


class UnsafeImageError(RequestError):
    """The safety checker of a pipeline has removed an image."""


class DeadlineError(RequestError):
    """The time limit of a request has passed."""


class QueueDeadlineError(DeadlineError):
    """The time limit of a request for waiting has passed before it began."""


class OutOfMemoryError(TorchaxServeError, MemoryError):
    """Weights or cache do not fit into the available memory."""
