"""``torchax-serve deploy``: replicas of a model on a Ray cluster, behind one address."""

from __future__ import annotations

from typing import Annotated

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import (
    DTYPES,
    MaxModelLen,
    check_choice,
    check_quantization,
    complete_dtype,
    complete_quantization,
)
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.validation.extras import require_package

Model = Annotated[
    str | None,
    typer.Argument(
        autocompletion=complete_model,
        help="Short name, hub id or folder that every node has; without it the embedded model.",
    ),
]
Name = Annotated[str, typer.Option("--name", help="Of the application; the same name again updates it.")]
Replicas = Annotated[
    str, typer.Option("--replicas", help="A number, or LEAST:MOST, between which Ray chooses by the load.")
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help="Requests that a replica runs at once.")]
KVCacheDtype = Annotated[
    str | None,
    typer.Option("--kv-cache-dtype", help="int8 or fp8: keys and values in 8 bits; by default as the model."),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", "--torch-dtype", autocompletion=complete_dtype, help="auto, float32, bfloat16 or float16."),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        show_default=False,
        autocompletion=complete_quantization,
        help="Weights with fewer bits: a preset such as int4, or a file of rules that every node has.",
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tensor-parallel", "--tensor-parallel-size", "--tp", min=1, help="Devices of a replica."),
]
Accelerator = Annotated[
    str | None, typer.Option("--accelerator", help="GPU or TPU: what replicas take; processor cores by default.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Of the Ray cluster, such as auto; a cluster of this machine by default."),
]


def deploy(
    model: Model = None,
    name: Name = "model",
    replicas: Replicas = "1",
    max_num_seqs: MaxNumSeqs = 32,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KVCacheDtype = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = None,
    accelerator: Accelerator = None,
    address: Address = None,
    host: Annotated[str, typer.Option("--host", help="Where HTTP listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Where HTTP listens.")] = 8000,
) -> None:
    """Serve a model by replicas on Ray: autoscaling, health checks, updates without a gap."""
    least, most = _range(replicas)
    check_choice("--dtype", dtype, DTYPES)
    if address is None:  # folders and files of another machine cannot be checked here
        check_model(model)
        check_quantization(quantization)
    from torchax_serve.distributed.ray.options import DeployOptions

    options = DeployOptions(
        model=model,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel=tensor_parallel,
        min_replicas=least,
        max_replicas=most,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        accelerator=accelerator,
    )
    require_package("ray", "deploy", extra="ray")
    import ray
    from ray import serve as ray_serve

    from torchax_serve.distributed.ray.application import application_of

    ray.init(address=address, include_dashboard=False if address is None else None)
    ray_serve.start(http_options={"host": host, "port": port})
    ray_serve.run(application_of(options), name=name, route_prefix=f"/{name}", blocking=True)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdigit() or (most and not most.isdigit()):
        raise InvalidArgumentError(f"--replicas: expected a number or LEAST:MOST, got {text!r}")
    return int(least), int(most or least)


COMMAND = Command("deploy", deploy, position=60)
