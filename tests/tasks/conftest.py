"""What tests of models with heads share."""

import pytest
import task_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Returns the folder of a model of `task_models`, and the model in PyTorch, made once."""
    made = {}

    def folder(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = path, getattr(task_models, name)(path)
        return made[name]

    return folder
