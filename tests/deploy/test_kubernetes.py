"""Goal: the manifests are what the API server's schemas allow, fit the server of this build and
each other, and run it without privileges; the alert rules in them are those of the dashboards.
Method: the schemas of kubernetes-models, strictly, with planted faults; names, ports, probes and
settings compared with each other and tried on the real server. No cluster has run them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

HERE = Path(__file__).resolve().parent
KUBERNETES = ROOT / "deploy/kubernetes"
Object = dict[str, Any]


def objects() -> dict[str, Object]:
    """Kind -> object, of all that the two kustomizations name."""
    found: dict[str, Object] = {}
    for folder in (KUBERNETES, KUBERNETES / "monitoring"):
        named = yaml.safe_load((folder / "kustomization.yml").read_text())["resources"]
        assert sorted(named) == sorted(p.name for p in folder.glob("*.yml") if p.name != "kustomization.yml")
        for name in named:
            read: Object = yaml.safe_load((folder / name).read_text())
            found[read["kind"]] = read
    return found


OBJECTS = objects()
POD: Object = OBJECTS["StatefulSet"]["spec"]["template"]
CONTAINER: Object = POD["spec"]["containers"][0]


def findings(*given: Object) -> list[list[str]]:
    told = subprocess.run(
        ["node", HERE / "validate_manifests.mjs"], input=json.dumps(given), capture_output=True, text=True, check=True
    ).stdout
    read: list[list[str]] = json.loads(told)
    return read


@pytest.mark.skipif(
    shutil.which("node") is None or not (HERE / "node_modules").is_dir(), reason="npm ci in tests/deploy"
)
def test_schemas_accept_the_kubernetes_manifests() -> None:
    assert len(OBJECTS) == 8
    misspelt, mistyped, mixed = (copy.deepcopy(OBJECTS["StatefulSet"]) for _ in range(3))
    misspelt["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    mistyped["spec"]["replicas"] = "1"
    mixed["spec"]["template"]["spec"]["volumes"][0]["configMap"]["sizeLimit"] = "1Gi"
    *good, first, second, third = findings(*OBJECTS.values(), misspelt, mistyped, mixed)
    assert dict(zip(OBJECTS, good)) == {kind: [] for kind in OBJECTS}
    assert first == ["spec.template.spec.containers.0.livenesProbe is not known"]
    assert second and "replicas" in second[0]
    assert third == ["spec.template.spec.volumes.0.configMap.sizeLimit is not known"]


def test_server_runs_without_privileges() -> None:
    pod, container = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert POD["spec"]["automountServiceAccountToken"] is False
    # The image's own account, whose volume it is.
    (user,) = re.findall(r"(?m)^USER (\d+):\d+\n(?=VOLUME)", (ROOT / "deploy/docker/Dockerfile").read_text())
    assert pod["runAsUser"] == pod["fsGroup"] == int(user)


def test_kubernetes_manifests_fit_each_other() -> None:
    labels = POD["metadata"]["labels"]
    service, monitor = OBJECTS["Service"], OBJECTS["ServiceMonitor"]["spec"]
    selectors = [
        OBJECTS["StatefulSet"]["spec"]["selector"]["matchLabels"],
        OBJECTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
    ]
    assert all(selector == labels for selector in selectors)
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    # The rules ask for job="bellwether".
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "bellwether"
    assert OBJECTS["StatefulSet"]["spec"]["serviceName"] == service["metadata"]["name"]

    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    used = {endpoint["port"] for endpoint in monitor["endpoints"]}
    used |= {port["port"] for rule in OBJECTS["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]}
    used |= {CONTAINER[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert used <= ports.keys()

    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in OBJECTS["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    compose = yaml.safe_load((ROOT / "deploy/docker/compose.yml").read_text())
    assert CONTAINER["image"] == compose["services"]["bellwetherd"]["image"]


def test_the_server_knows_its_arguments_settings_and_probes(tmp_path: Path) -> None:
    told = subprocess.check_output([BIN / "bellwetherd", "--help"], text=True)
    arguments = dict(argument.partition("=")[::2] for argument in CONTAINER["args"])
    assert arguments.keys() <= set(re.findall(r"--[a-z.-]+", told))
    for flag, port in {"--grpc.listen-address": 7070, "--web.listen-address": 7071}.items():
        assert arguments[flag] == f"0.0.0.0:{port}"
        assert port in [declared["containerPort"] for declared in CONTAINER["ports"]]
    mounts = [mount["mountPath"] for mount in CONTAINER["volumeMounts"] if not mount.get("readOnly")]
    assert any(arguments["--storage.path"].startswith(f"{mount}/") for mount in mounts)

    for name, text in OBJECTS["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    config = tmp_path / Path(arguments["--config.file"]).name
    with Server(tmp_path, "", f"--config.file={config}") as server:
        assert CONTAINER["livenessProbe"]["httpGet"]["path"] != CONTAINER["readinessProbe"]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert server.get(CONTAINER[probe]["httpGet"]["path"])
        assert server.stop() == 0


def test_the_rules_are_those_of_the_dashboards(tmp_path: Path) -> None:
    generated = tmp_path / "rule.yml"
    subprocess.run([sys.executable, KUBERNETES / "generate.py", generated], check=True)
    committed = KUBERNETES / "monitoring/prometheus-rule.yml"
    assert generated.read_text() == committed.read_text(), "run deploy/kubernetes/generate.py"
    assert OBJECTS["PrometheusRule"]["spec"] == yaml.safe_load((ROOT / "dashboards/alerts/rules.yml").read_text())
