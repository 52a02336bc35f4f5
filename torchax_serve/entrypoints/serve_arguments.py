"""`ServeArguments`: the arguments of `serve`, each of which says where it goes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from torchax_serve.engine.options import EngineOptions

if TYPE_CHECKING:
    import torch

    from model_adapters.loading import Progress
    from model_adapters.loading.hub_request import HubRequest
    from torchax_serve.distributed.hosts.options import Hosts

LOAD, ADAPTERS = "load_model", "AdapterOptions"
"""Where an option goes as an argument of the same name."""
RECORD, BUNDLE, PIPELINE, MODULE = "a start record", "a bundle", "a pipeline", "a module"
"""What can follow an option."""
DECIDES = "decides the weights"
"""Of an option by which start records are told apart."""


def at(*places: str) -> Mapping[str, Any]:
    """Returns metadata that say where an option goes."""
    return {"places": places}


@dataclasses.dataclass(frozen=True)
class ServeArguments:
    """The arguments of `serve`, where they are described."""

    model: Any = field(default=None, metadata=at(RECORD, BUNDLE, PIPELINE, MODULE))
    revision: str | None = field(default=None, metadata=at(LOAD, RECORD, PIPELINE))
    token: str | None = field(default=None, metadata=at(LOAD, RECORD, BUNDLE, PIPELINE))
    local_files_only: bool | None = field(default=None, metadata=at(LOAD, RECORD, BUNDLE, PIPELINE))
    dtype: str | torch.dtype = field(default="auto", metadata=at(LOAD, RECORD, DECIDES, PIPELINE))
    trust_remote_code: bool = field(default=False, metadata=at(LOAD))
    allow_pickle: bool = field(default=False, metadata=at(LOAD, PIPELINE))
    strict: bool = field(default=False, metadata=at(LOAD, RECORD, DECIDES))
    cache_dir: str | os.PathLike[str] | None = field(default=None, metadata=at(LOAD, RECORD, BUNDLE, PIPELINE))
    progress: Progress | None = field(default=None, metadata=at(LOAD, RECORD, BUNDLE, PIPELINE))
    random_weights: bool = field(default=False, metadata=at(LOAD))
    engine: EngineOptions | None = field(default=None, metadata=at(RECORD, BUNDLE))
    mesh: Mesh | Mapping[str, int] | None = field(default=None, metadata=at(BUNDLE, PIPELINE, MODULE))
    tensor_parallel: int | None = field(default=None, metadata=at(PIPELINE, MODULE))
    refuse_uneven: bool = field(default=False, metadata=at(LOAD))
    hosts: Hosts | None = field(default=None, metadata=at(RECORD, BUNDLE, PIPELINE))
    pack_weights: bool = field(default=True, metadata=at(RECORD, DECIDES, BUNDLE, PIPELINE))
    quantization: Any = field(default=None, metadata=at(LOAD, RECORD, DECIDES, MODULE))
    requantize: bool = field(default=False, metadata=at(LOAD, RECORD, DECIDES))
    adapter: str | os.PathLike[str] | None = None
    adapters: Mapping[str, str | os.PathLike[str]] | None = field(default=None, metadata=at(ADAPTERS))
    max_loras: int | None = field(default=None, metadata=at(ADAPTERS))
    max_lora_rank: int | None = field(default=None, metadata=at(ADAPTERS))
    lora_target_modules: Sequence[str] | None = field(default=None, metadata=at(ADAPTERS))
    speculative_config: Mapping[str, Any] | None = field(default=None, metadata=at(RECORD, BUNDLE, PIPELINE))

    def to(self, place: str) -> dict[str, Any]:
        """Returns the options that go to a place, by name."""
        fields = dataclasses.fields(self)
        return {each.name: getattr(self, each.name) for each in fields if place in each.metadata.get("places", ())}

    def refused_by(self, place: str) -> dict[str, Any]:
        """Returns the options that were given and cannot be followed at a place, by name."""
        found, followed = {}, self.to(place)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name not in followed and value is not each.default and value != each.default:
                found[each.name] = value
        return found

    def hub_request(self, hub_id: str, **others: Any) -> HubRequest:
        """Returns what to fetch of a repository on the hub."""
        from model_adapters.loading.hub_request import HubRequest

        return HubRequest(hub_id, self.revision, self.token, self.local_files_only, self.cache_dir, **others)

    def with_engine(self) -> ServeArguments:
        """Returns the same with all options of the engine in `engine`."""
        if self.speculative_config is None:
            return self
        engine = (self.engine or EngineOptions()).with_speculative(self.speculative_config)
        return dataclasses.replace(self, engine=engine)
