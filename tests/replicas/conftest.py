"""Replicas on a Ray cluster of this machine; collected only where the folder is named, since Ray is an extra."""

import os
import warnings

import pytest


@pytest.fixture(scope="module")
def cluster(request):
    """Ray Serve on a cluster for the tests of one file, which says its ``PORT``."""
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # the proxy of a busy machine starts slowly
    with warnings.catch_warnings():  # of Ray, about its own dependencies
        warnings.simplefilter("ignore")
        import ray
        from ray import serve
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": request.module.PORT})
    yield serve
    serve.shutdown()
    ray.shutdown()
