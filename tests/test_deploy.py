"""The files in examples/deploy: well-formed, consistent with each other and with the server's flags
and routes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).resolve().parents[1] / "examples" / "deploy"


def check_server(arguments: list[str]) -> None:
    """The server takes these arguments."""
    from mlx_llama.server.command import parser

    args = parser().parse_args([str(argument) for argument in arguments])
    assert args.host == "0.0.0.0" and args.port == 8080


def routes() -> set[str]:
    from mlx_llama.server.operations import router

    return {route.path for route in router.routes}


def test_compose():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    services, configs = compose["services"], compose["configs"]
    server = services["server"]
    check_server(server["command"])
    assert 'python", "-m", "mlx_llama.server' in server["build"]["dockerfile_inline"]
    assert (FOLDER / server["build"]["context"] / "pyproject.toml").exists()
    assert "/ready" in " ".join(server["healthcheck"]["test"]) and "/ready" in routes()
    for service in services.values():
        assert {config["source"] for config in service.get("configs", [])} <= set(configs)
        assert set(service.get("depends_on", [])) <= set(services)
    haproxy = configs["haproxy"]["content"]
    assert "uri /ready" in haproxy and "server:8080" in haproxy
    assert "hash-type consistent" in haproxy
    assert "$" not in haproxy.replace("${", "")  # compose would replace variables
    host = re.search(r"set-header Host (\S+)", haproxy).group(1)
    assert host in server["command"]  # --allowed-host
    scrape = yaml.safe_load(configs["prometheus"]["content"])
    assert scrape["scrape_configs"][0]["dns_sd_configs"][0]["names"] == ["server"]
    assert "/metrics" in routes()


def test_kubernetes():
    documents = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    objects = {document["kind"]: document for document in documents}
    assert set(objects) == {"PersistentVolumeClaim", "Deployment", "Service"}
    for document in objects.values():
        assert document["apiVersion"] and document["metadata"]["name"].startswith("mlx-llama")
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    template = deployment["template"]
    labels = template["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == service["selector"]
    (container,) = template["spec"]["containers"]
    check_server(container["args"])
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["path"] in routes() and get["port"] in ports
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert template["metadata"]["annotations"]["prometheus.io/path"] in routes()
    assert service["ports"][0]["targetPort"] in ports and service["sessionAffinity"] == "ClientIP"
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert objects["Service"]["metadata"]["name"] in container["args"]  # --allowed-host
