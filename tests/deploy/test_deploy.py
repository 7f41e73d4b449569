"""The files in deploy/: they parse, and what they name exists. They are not built or started here."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvboost import KVBoost
from kvboost.cli.flags import read_settings
from kvboost.cli.settings import SETTINGS
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import ServerConfig
from kvboost.serve.app import make_app
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.asgi import ask

_DEPLOY = Path(__file__).parents[2] / "deploy"
_MANIFESTS = list(yaml.safe_load_all((_DEPLOY / "kubernetes" / "kvboost.yaml").read_text()))
_COMPOSE = yaml.safe_load((_DEPLOY / "compose.yaml").read_text())


def _alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((_DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def _dashboard() -> list[dict[str, Any]]:
    return list(json.loads((_DEPLOY / "grafana" / "dashboards" / "kvboost.json").read_text())["panels"])


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names in a scrape of a server with a tier that has answered, and the labels of each."""
    model = tiny_model("llama", vocab_size=260, max_position_embeddings=2048)
    folder = tmp_path_factory.mktemp("kv")
    with KVBoost(model, byte_tokenizer(), disk_cache_dir=folder) as engine, BatchRunner(engine) as runner:
        app = make_app(engine, runner, model_name="tiny")
        asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
        assert ask(app, "POST", "/v1/completions", json=asked).status_code == 200
        text = ask(app, "GET", "/metrics").text
        app.state.service.close()
    names: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def _check(expression: str, scraped: dict[str, set[str]]) -> None:
    used = re.findall(r"\b(?:kvboost_\w+|up)\b(?:\{([^}]*)\})?", expression)
    names = re.findall(r"\b(kvboost_\w+|up)\b", expression)
    assert names, expression
    for name, matchers in zip(names, used, strict=True):
        assert name in scraped, f"{name} is in no scrape"
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in scraped[name], f"{name} has no label {label}"
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        for label in labels.split(", "):
            assert any(label in scraped[name] for name in names), f"nothing in {expression} has the label {label}"


def test_every_alert_asks_for_what_is_scraped(scraped: dict[str, set[str]]) -> None:
    alerts = _alerts()
    assert len(alerts) >= 8
    for alert in alerts:
        _check(alert["expr"], scraped)
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"]["summary"]
        for label in re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]):
            assert any(label in scraped[name] for name in re.findall(r"kvboost_\w+|up", alert["expr"]))


def test_every_panel_asks_for_what_is_scraped(scraped: dict[str, set[str]]) -> None:
    panels = _dashboard()
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    for panel in panels:
        for target in panel["targets"]:
            _check(target["expr"].replace("$__rate_interval", "5m"), scraped)
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label}" in target["expr"] or f", {label}" in target["expr"]


def test_a_name_that_is_not_scraped_is_found(scraped: dict[str, set[str]]) -> None:
    for wrong in ("kvboost_nonsense_total", 'kvboost_store_bytes{teir="disk"}', "sum by (teir) (kvboost_store_bytes)"):
        with pytest.raises(AssertionError):
            _check(wrong, scraped)


def test_every_variable_and_flag_is_a_setting() -> None:
    variables = {setting.variable for setting in SETTINGS} | {"KVBOOST_CONFIG"}
    flags = {setting.flag for setting in SETTINGS}
    for file in _DEPLOY.rglob("*"):
        if file.is_file() and file.suffix not in (".json", ".md"):
            text = file.read_text()
            assert set(re.findall(r"\bKVBOOST_[A-Z_]+\b", text)) <= variables, file
    started = [
        (_DEPLOY / "Dockerfile").read_text().partition('CMD ["serve"')[2],
        (_DEPLOY / "systemd" / "kvboost.service").read_text().partition("kvboost serve")[2].partition("\n")[0],
        " ".join(_container()["args"]),
    ]
    for command in started:
        used = set(re.findall(r"(?<![\w-])--[a-z-]+", command))
        assert {"--api-key-file", "--admin-key-file"} <= used <= flags


def _manifest(kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in _MANIFESTS if manifest["kind"] == kind]
    return dict(found)


def _container() -> dict[str, Any]:
    (container,) = _manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_settings_of_the_manifests_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "kvboost.toml"
    file.write_text(_manifest("ConfigMap")["data"]["kvboost.toml"])
    settings = read_settings({}, file=file)
    assert settings.of(ServerConfig).host == "0.0.0.0"
    grace = _manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.of(ServerConfig).drain_seconds + 5, "it may finish what it answers"


def test_the_pods_have_no_rights_and_are_probed() -> None:
    pod, container = _manifest("Deployment")["spec"]["template"]["spec"], _container()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "startup")} == {"/health"}
    budget = _manifest("PodDisruptionBudget")["spec"]
    assert budget["selector"] == _manifest("Deployment")["spec"]["selector"]
    assert budget["minAvailable"] < _manifest("Deployment")["spec"]["replicas"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_manifests_follow_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in _MANIFESTS:
        validator.validate(manifest, "1.31", strict=True)


def test_the_composed_services_fit_together() -> None:
    services, secrets = _COMPOSE["services"], _COMPOSE["secrets"]
    assert set(services) == {"kvboost", "redis", "prometheus", "grafana"}
    assert services["kvboost"]["read_only"] is True
    for name, service in services.items():
        assert set(service.get("secrets", [])) <= set(secrets), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), f"{name} is open to others"
        assert service["cap_drop"] == ["ALL"]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in _COMPOSE["volumes"] or source.startswith("${") or (_DEPLOY / source).exists(), volume
    scrape = yaml.safe_load((_DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["kvboost:8000"]}]
    assert Path(scrape["authorization"]["credentials_file"]).name in services["prometheus"]["secrets"]


def test_the_image_runs_as_nobody_in_particular() -> None:
    lines = (_DEPLOY / "Dockerfile").read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    assert next(line for line in reversed(lines) if line.startswith("USER ")) == "USER 10001:10001"
    copied = [line.split()[1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert all((_DEPLOY.parent / source).exists() for source in copied)
    extras = re.search(r"\.\[([a-z0-9,]+)\]", "\n".join(lines))
    assert extras is not None
    declared = (_DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras[1].split(","))


def test_the_unit_ends_it_gently_and_can_reload_keys() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(_DEPLOY / "systemd" / "kvboost.service")
    service = unit["Service"]
    assert service["ExecReload"].endswith("-HUP $MAINPID")
    assert int(service["TimeoutStopSec"]) > ServerConfig().drain_seconds
    assert service["NoNewPrivileges"] == "yes"
