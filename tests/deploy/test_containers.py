"""Goal: image and quickstart fit the programs of this build.  Every flag exists, every file that is
copied or mounted is in the repository, ports and names match.  Nothing runs as root or from a
floating tag.
Method: no container engine: Dockerfile and compose file are parsed, and their commands, settings
and health check are run by the real server and command on this machine; promtool judges Prometheus'
part.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

DOCKER = ROOT / "deploy/docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PINNED = re.compile(r"[a-z][a-z0-9/]*:v?\d+\.\d+(\.\d+)?(-[a-z0-9.-]+)?")


def steps() -> list[dict[str, str]]:
    parser = DockerfileParser(path=str(DOCKER / "Dockerfile"))
    return [dict(step) for step in parser.structure if step["instruction"] != "COMMENT"]


def stages() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for step in steps():
        if step["instruction"] == "FROM":
            name = re.fullmatch(r"(\S+) AS (\S+)", step["value"])
            assert name, step["value"]
            found[name[2]] = []
        found[next(reversed(found))].append(step)
    return found


def value(stage: str, instruction: str) -> str:
    """The last one of a stage."""
    return [step["value"] for step in stages()[stage] if step["instruction"] == instruction][-1]


def known_flags() -> set[str]:
    return set(re.findall(r"--[a-z.-]+", subprocess.check_output([BIN / "bellwetherd", "--help"], text=True)))


def unknown_flags(command: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in command if word.startswith("--")} - known_flags()


def test_images_are_pinned() -> None:
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    images = {step["value"].split()[0] for step in steps() if step["instruction"] == "FROM"}
    images |= {service["image"] for service in SERVICES.values()}
    assert [image for image in images if not PINNED.fullmatch(image)] == []
    assert not PINNED.fullmatch("debian:latest") and not PINNED.fullmatch("grafana/grafana")
    version = subprocess.check_output([BIN / "bellwetherd", "--version"], text=True).split()[1]
    assert {image.partition(":")[2] for image in built} == {version}


def test_images_are_made_of_what_is_here() -> None:
    for name, stage in stages().items():
        for step in stage:
            if step["instruction"] != "COPY":
                continue
            *sources, _ = step["value"].split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages(), step
                continue
            for source in sources:
                assert (ROOT / source).exists(), f"{name}: {source}"
    targets = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert targets <= stages().keys()
    for service in SERVICES.values():
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_no_container_runs_as_root() -> None:
    for stage in ("server", "trainer"):
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", value(stage, "USER")), stage
    for name, service in SERVICES.items():
        assert "privileged" not in service, name
        if "build" in service:
            assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"], name


def test_flags_exist() -> None:
    image = json.loads(value("server", "CMD"))
    assert len(image) > 3
    assert unknown_flags(image) == set()
    assert unknown_flags(SERVICES["bellwetherd"]["command"]) == set()
    assert unknown_flags(["--storage.paht=/x"]) == {"--storage.paht"}
    demo = SERVICES["demo"]["command"]
    told = subprocess.check_output([sys.executable, ROOT / "examples/tiny_transformer.py", "--help"], text=True)
    assert {word for word in demo if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", told))


def test_mounts_are_in_the_repository() -> None:
    named = COMPOSE["volumes"].keys()
    for name, service in SERVICES.items():
        for mount in service.get("volumes", []):
            source, target, *mode = mount.split(":")
            assert target.startswith("/"), mount
            if source.startswith("."):
                assert (DOCKER / source).exists() and mode == ["ro"], f"{name}: {mount}"
            else:
                assert source in named, f"{name}: {mount}"


def test_ports_and_names_match() -> None:
    published = SERVICES["bellwetherd"]["ports"]
    listening = set(re.findall(r"address=0\.0\.0\.0:(\d+)", " ".join(SERVICES["bellwetherd"]["command"])))
    assert listening == set(value("server", "EXPOSE").split()) == {port.split(":")[2] for port in published}
    for service in SERVICES.values():
        # On loopback only: nobody here asks who is there.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    settings = [path for path in DOCKER.rglob("*.yml") if path.name != "compose.yml"]
    settings += (ROOT / "dashboards/grafana/provisioning").glob("*.yml")
    addresses = re.findall(r"\b([a-z]+):(\d{4})\b", "".join(path.read_text() for path in settings))
    assert len(addresses) >= 3
    for name, port in addresses:
        assert any(mapped.endswith(f":{port}") for mapped in SERVICES[name]["ports"]), f"{name}:{port}"
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= SERVICES.keys()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_its_settings(tmp_path: Path) -> None:
    # Where its files are mounted, the test's folder stands.
    for mount in SERVICES["prometheus"]["volumes"]:
        source, target, *_ = mount.split(":")
        if source.startswith("."):
            text = (DOCKER / source).read_text().replace("/etc/prometheus/", f"{tmp_path}/")
            (tmp_path / Path(target).name).write_text(text)
    checked = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout


def status(server: Server, path: str, host: str) -> int:
    request = urllib.request.Request(f"http://{server.http}{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_the_service_answers_as_the_quickstart_asks(tmp_path: Path) -> None:
    """The command of the compose file with its settings, on ports and data of the test."""
    ours = ("--config.file", "--storage.path", "--grpc.listen-address", "--web.listen-address")
    flags = [word for word in SERVICES["bellwetherd"]["command"] if word.partition("=")[0] not in ours]
    assert len(flags) == len(SERVICES["bellwetherd"]["command"]) - len(ours)
    check = json.loads(value("server", "HEALTHCHECK").partition(" CMD ")[2])
    with Server(tmp_path, (DOCKER / "bellwetherd.yml").read_text(), *flags) as server:
        assert status(server, "/metrics", "bellwetherd:7071") == 200
        assert status(server, "/metrics", "stranger.example:7071") == 421
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "BELLWETHER_SERVER": server.grpc}
        assert subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0
        assert server.stop() == 0
        assert subprocess.run(check, env=environment, capture_output=True, check=False).returncode != 0


def test_hosts_are_names(tmp_path: Path) -> None:
    config = tmp_path / "server.yml"
    for bad, finding in {
        "web: {hosts: here}": "web.hosts = here: must be a list",
        "web: {hosts: ['here:7071']}": "web.hosts[0] = here:7071: must be a name without port",
        f"web: {{hosts: [{', '.join(['a'] * 65)}]}}": "holds 65 entries: at most 64",
    }.items():
        config.write_text(bad)
        checked = subprocess.run(
            [BIN / "bellwetherd", f"--config.file={config}", "--config.check"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 3 and finding in checked.stderr, checked.stderr
