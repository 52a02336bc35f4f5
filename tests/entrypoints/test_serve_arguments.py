"""Where the arguments of `serve` go."""

import dataclasses
import inspect

import pytest

from torchax_serve import EngineOptions, serve
from torchax_serve.entrypoints.serve_arguments import ADAPTERS, BUNDLE, LOAD, MODULE, RECORD, ServeArguments

pytestmark = pytest.mark.fast


def test_the_record_has_the_arguments_of_serve_with_their_defaults():
    own = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    assert own == {field.name: field.default for field in dataclasses.fields(ServeArguments)}
    assert list(own) == [field.name for field in dataclasses.fields(ServeArguments)]


def test_a_place_refuses_what_was_given_and_does_not_go_there():
    given = ServeArguments("a", dtype="float32", adapters={"b": "c"}, max_loras=2, pack_weights=False)
    assert given.to(ADAPTERS) == {"adapters": {"b": "c"}, "max_loras": 2} | dict.fromkeys(
        ("max_lora_rank", "lora_target_modules")
    )
    assert given.to(LOAD)["dtype"] == "float32" and "pack_weights" not in given.to(LOAD)
    assert list(given.refused_by(RECORD)) == ["adapters", "max_loras"]
    assert list(given.refused_by(BUNDLE)) == ["dtype", "adapters", "max_loras"]
    assert list(given.refused_by(MODULE)) == ["dtype", "pack_weights", "adapters", "max_loras"]
    assert ServeArguments("a").refused_by(MODULE) == {}


def test_a_speculative_config_is_an_option_of_the_engine():
    config = {"method": "ngram", "num_speculative_tokens": 2}
    found = ServeArguments(speculative_config=config).with_engine()
    assert found.engine == EngineOptions().with_speculative(config)
