"""``torchax-serve deploy``: replicas of a model on a Ray cluster, behind one address."""

from __future__ import annotations

from typing import Annotated

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.serve import (
    MAX_NUM_WAITING,
    AccessOptions,
    AddressOptions,
    FileStorageOptions,
    LifeOptions,
    LimitOptions,
    SeveralOptions,
    server_options,
)
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.engine_options import EngineFlags
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import MeshOptions, check_quantization, option_groups
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
Accelerator = Annotated[
    str | None, typer.Option("--accelerator", help="GPU or TPU: what replicas take; processor cores by default.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Of the Ray cluster, such as auto; a cluster of this machine by default."),
]
RoutePrefix = Annotated[str, typer.Option("--route-prefix", help="Where the server's paths begin.")]
ServedNames = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="Name of the model in requests; may be given several times."),
]
AllowedHosts = Annotated[
    list[str] | None, typer.Option("--allowed-host", help="Further header Host that is taken on a loopback address.")
]


@option_groups
def deploy(
    model: Model = None,
    name: Name = "model",
    replicas: Replicas = "1",
    accelerator: Accelerator = None,
    address: Address = None,
    host: Annotated[str, typer.Option("--host", help="Where HTTP listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Where HTTP listens.")] = 8000,
    route_prefix: RoutePrefix = "/",
    served_model_name: ServedNames = None,
    allowed_host: AllowedHosts = None,
    *,
    access: AccessOptions,
    limits: LimitOptions,
    engine: EngineFlags,
    load: MeshOptions,
) -> None:
    """Serve a model by replicas on Ray: autoscaling, health checks, updates without a gap."""
    least, most = _range(replicas)
    if address is None:  # folders and files of another machine cannot be checked here
        end_if_explained(model, load)
        check_model(model, load.revision)
        check_quantization(load.quantization)
    from torchax_serve.distributed.ray.options import DeployOptions

    listens = AddressOptions(host=host, port=port, served_model_name=served_model_name, allowed_host=allowed_host)
    given, kwargs = engine.given, load.serve_kwargs()
    options = DeployOptions(
        model=model,
        min_replicas=least,
        max_replicas=most,
        max_num_seqs=given.pop("max_num_seqs", 32),
        max_num_waiting=given.pop("max_num_waiting", MAX_NUM_WAITING),
        max_model_len=given.pop("max_model_len", None),
        kv_cache_dtype=given.pop("kv_cache_dtype", None),
        dtype=kwargs.pop("dtype"),
        quantization=kwargs.pop("quantization"),
        tensor_parallel=kwargs.pop("tensor_parallel"),
        accelerator=accelerator,
        engine=given,
        load=kwargs,
        server=server_options(listens, access, limits, FileStorageOptions(), SeveralOptions(), LifeOptions()),
    )
    require_package("ray", "deploy", extra="ray")
    from torchax_serve.server import require_packages

    require_packages()
    import ray
    from ray import serve as ray_serve

    from torchax_serve.distributed.ray.application import application_of

    ray.init(address=address, include_dashboard=False if address is None else None)
    ray_serve.start(http_options={"host": host, "port": port})
    ray_serve.run(application_of(options), name=name, route_prefix=route_prefix, blocking=True)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdigit() or (most and not most.isdigit()):
        raise InvalidArgumentError(f"--replicas: expected a number or LEAST:MOST, got {text!r}")
    return int(least), int(most or least)


COMMAND = Command("deploy", deploy, position=60)
