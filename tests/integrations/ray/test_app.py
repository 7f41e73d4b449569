"""What ``build_app`` asks Serve for. Starts nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.integrations.ray import RayConfig
from kvboost.serve import Limits, ServerConfig

pytestmark = pytest.mark.usefixtures("installed")


def _deployments(**settings: Any) -> tuple[Any, Any]:
    """The front and the replicas, as Serve keeps them."""
    from kvboost.integrations.ray import build_app

    front = build_app("a/model", **settings)._bound_deployment
    return front, front.init_args[0]._bound_deployment


def test_the_bounds_of_scaling_reach_serve() -> None:
    fixed = _deployments(ray_config=RayConfig(replicas=3))[1]
    assert fixed.num_replicas == 3
    scaled = _deployments(ray_config=RayConfig(replicas=2, max_replicas=5, target_requests=3.0))[1]
    scaling = scaled._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 3.0)


def test_a_replica_has_time_to_finish_and_to_write() -> None:
    front, replicas = _deployments(server=ServerConfig(drain_seconds=50), limits=Limits(max_streams=77))
    assert replicas._deployment_config.graceful_shutdown_timeout_s >= 50 + 30
    assert front._deployment_config.graceful_shutdown_timeout_s >= 50
    assert replicas.max_ongoing_requests == 77


def test_a_front_takes_no_place_of_a_replica() -> None:
    front, replicas = _deployments(ray_config=RayConfig(replica_cpus=4, replica_gpus=1, fronts=2))
    assert front.ray_actor_options["num_cpus"] == 0
    assert front.num_replicas == 2
    assert (replicas.ray_actor_options["num_cpus"], replicas.ray_actor_options["num_gpus"]) == (4, 1)


def test_the_router_is_ours() -> None:
    from kvboost.integrations.ray.router import ContentRouter

    config = _deployments()[1]._deployment_config.request_router_config
    assert config.get_request_router_class() is ContentRouter
    assert config.request_router_kwargs["model_name"] == "model"


def test_another_router_takes_the_place_of_ours() -> None:
    from ray.serve.config import RequestRouterConfig

    from kvboost.integrations.ray.router import ContentRouter

    config = _deployments(router=RequestRouterConfig())[1]._deployment_config.request_router_config
    assert config.get_request_router_class() is not ContentRouter
