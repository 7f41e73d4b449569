"""The files in examples/fleet: they parse, follow the schemas there are, and what can be run here is run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.common.servers import free_port
from kvboost.config import EngineConfig, RunnerConfig
from kvboost.integrations.ray import RayConfig
from kvboost.serve import Limits, ServerConfig
from tests.integrations.ray.conftest import until

_FOLDER = Path(__file__).parents[3] / "examples" / "fleet"
_SERVICE: dict[str, Any] = yaml.safe_load((_FOLDER / "rayservice.yaml").read_text())
_SERVE: dict[str, Any] = yaml.safe_load(_SERVICE["spec"]["serveConfigV2"])


def _pods() -> list[dict[str, Any]]:
    cluster = _SERVICE["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def test_the_service_has_what_kuberay_requires() -> None:
    assert (_SERVICE["apiVersion"], _SERVICE["kind"]) == ("ray.io/v1", "RayService")
    cluster = _SERVICE["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["template"]["spec"]["containers"]
    for group in cluster["workerGroupSpecs"]:
        assert group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_its_pods_follow_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for pod in _pods():
        validator.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **pod}, "1.31", strict=True)


def test_the_whole_of_it_follows_kuberays_definition() -> None:
    """KubeRay's own file, which no Python package carries: ray-operator/config/crd/bases/ray.io_rayservices.yaml."""
    file = os.environ.get("KVBOOST_RAYSERVICE_CRD")
    if not file:
        pytest.skip("needs KubeRay's definition of RayService: KVBOOST_RAYSERVICE_CRD=FILE")
    import jsonschema

    versions = yaml.safe_load(Path(file).read_text())["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    jsonschema.validate(_SERVICE, _closed(schema))


def _closed(schema: Any) -> Any:
    """Kubernetes drops fields that are not defined; here they are mistakes."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "metadata" not in schema["properties"]:
        closed.setdefault("additionalProperties", False)
    return closed


def test_serve_takes_its_config(installed: None) -> None:
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(_SERVE)
    assert [application.name for application in parsed.applications] == ["kvboost"]


def test_its_settings_are_ours() -> None:
    (application,) = _SERVE["applications"]
    args = application["args"]
    EngineConfig(**args["engine"])
    server = ServerConfig(**args["server"])
    for name, config in (("runner", RunnerConfig), ("limits", Limits), ("ray", RayConfig)):
        config(**args.get(name, {}))
    assert args.keys() <= {"model", "engine", "server", "runner", "limits", "ray"}
    for pod in _pods():
        mounted = [mount["mountPath"] for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
        for file in (args["model"], server.api_key_file, server.admin_key_file, server.secret_file):
            assert any(str(file).startswith(path) for path in mounted), file
        assert pod["spec"]["terminationGracePeriodSeconds"] > server.drain_seconds + 30


def test_serve_finds_what_it_imports(installed: None) -> None:
    from kvboost.errors import ConfigError
    from kvboost.integrations.ray.app import from_args

    (application,) = _SERVE["applications"]
    assert application["import_path"] == f"{from_args.__module__}:{from_args.__name__}"
    from_args({**application["args"], "server": {}})
    with pytest.raises(ConfigError, match="modle"):
        from_args({"modle": "x"})


def test_the_scripts_are_shell() -> None:
    for script in _FOLDER.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_router_of_vllm_knows_the_flags() -> None:
    program = shutil.which("vllm-router")
    if program is None:
        pytest.skip("needs vllm-router")
    text = (_FOLDER / "vllm_router.sh").read_text().partition("\nvllm-router")[2]
    used = set(re.findall(r"(?<![\w-])--[a-z-]+", text))
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert used <= set(re.findall(r"--[a-z-]+", said))


def test_one_command_starts_three_replicas(installed: None, model: Path, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    port, log = free_port(), tmp_path / "log"
    program = Path(tmp_path / "bin" / "kvboost")
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvboost "$@"\n')
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PATH": f"{program.parent}:{os.environ['PATH']}", "REDIS_PORT": str(free_port())}
    command = ["bash", str(_FOLDER / "local.sh"), str(model), "--port", str(port), "--served-model-name", "model"]
    with open(log, "wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            until(lambda: b"serving on" in log.read_bytes() or running.poll() is not None, seconds=300)
            assert running.poll() is None, log.read_text()
            asked = {"model": "model", "prompt": "hello", "max_tokens": 3}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60)
            assert answer.status_code == 200
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
            assert len(set(re.findall(r'replica="(\w+)"', metrics))) == 3
            os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C does
            assert running.wait(timeout=120) == 0, log.read_text()
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
