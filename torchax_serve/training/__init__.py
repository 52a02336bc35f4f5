"""Fine-tuning of unmodified models by JAX: forward as a function, loss, optax's steps.

>>> from torchax_serve.training import TrainingOptions, train
>>> train("qwen3-0.6b", "chats.jsonl", out="adapter", lora="r=16,alpha=32", options=TrainingOptions(num_steps=200))

`torchax_serve.training.tunix` connects a model and its engine to Tunix's trainers.
"""

from pytree_registry.lazy_exports import lazy_exports

__all__ = ["RolloutLoop", "RolloutOptions", "TrainingOptions", "TrainingResult", "train"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "RolloutLoop": ".rollouts",
        "RolloutOptions": ".rollouts",
        "TrainingOptions": ".options",
        "TrainingResult": ".trainer",
        "train": ".trainer",
    },
)
