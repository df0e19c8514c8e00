"""Goal: what deploys a cluster makes one: the scripts set up a PostgreSQL whose commits wait for
its standby, servers start with the settings as they stand, passwords are their owners' alone.
Method: the compose file's scripts run as the image's entrypoint would, on real PostgreSQL here;
real servers run the command lines of compose file and StatefulSet, the images' folders replaced.
No container engine and no Kubernetes has run them; manifests are held against the schemas.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, await_silence, wait_for
from cluster_fleet import Cluster
from postgres_processes import Postgres, bin_folder
from test_containers import PINNED, unknown_flags
from test_kubernetes import findings

DOCKER, KUBERNETES = ROOT / "deploy/docker/cluster", ROOT / "deploy/kubernetes/cluster"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = [name for name in SERVICES if name.startswith("bellwether-")]
OBJECTS: dict[str, dict[str, Any]] = {
    f"{read['kind']} {read['metadata']['name']}": read
    for path in sorted(KUBERNETES.glob("*.yml"))
    if path.name != "kustomization.yml"
    for read in [yaml.safe_load(path.read_text())]
}
POD: dict[str, Any] = OBJECTS["StatefulSet bellwether"]["spec"]["template"]
CONTAINER: dict[str, Any] = POD["spec"]["containers"][0]
ALONE = yaml.safe_load((ROOT / "deploy/kubernetes/statefulset.yml").read_text())["spec"]["template"]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    shutil.copy(DOCKER / "make_secrets.sh", folder)
    made = subprocess.run(["sh", folder / "make_secrets.sh"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder / "secrets"


def test_secrets_are_for_their_owners_alone(secrets: Path) -> None:
    files = sorted(secrets.iterdir())
    declared = {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert {path.name for path in files} == declared == set(COMPOSE["secrets"])
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    if os.geteuid() == 0:
        owners = {path.name: path.stat().st_uid for path in files}
        assert owners.pop("cluster-dsn") == 971 and set(owners.values()) == {999}
    passwords = {path.read_text() for path in files if path.name != "cluster-dsn"}
    assert len(passwords) == 3 and all(len(password) == 48 for password in passwords)
    again = subprocess.run(["sh", secrets.parent / "make_secrets.sh"], capture_output=True)
    assert again.returncode == 1 and passwords == {
        path.read_text() for path in files if path.name != "cluster-dsn"
    }
    for name, service in SERVICES.items():
        for word in map(str, service.get("environment", {}).values()):
            assert not any(password in word for password in passwords), name
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys()
    assert "secrets" in (DOCKER / ".gitignore").read_text().split()


@pytest.fixture
def pair(secrets: Path, tmp_path: Path) -> Iterator[tuple[Postgres, Postgres]]:
    """Primary and standby, each started as its image would."""
    primary, standby = Postgres("compose-primary"), Postgres("compose-standby")
    try:
        for server in (primary, standby):
            for path in secrets.iterdir():
                copy = server.folder / path.name
                shutil.copy(path, copy)
                shutil.chown(copy, server.folder.stat().st_uid)
        start_as_the_image_does(primary, SERVICES["primary"])
        start_copy(standby, SERVICES["standby"], primary)
        yield primary, standby
    finally:
        standby.remove()
        primary.remove()


def environment(server: Postgres, service: dict[str, Any], **more: str) -> dict[str, str]:
    given = {
        name: word.replace("/run/secrets", str(server.folder))
        for name, word in service["environment"].items()
    }
    path = f"{bin_folder()}:{os.environ['PATH']}"
    return {"PATH": path, **given, "PGDATA": str(server.data), **more}


def run_as(server: Postgres, words: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(
        [*server._become, *words], env=env, cwd=server.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


def start_as_the_image_does(server: Postgres, service: dict[str, Any]) -> None:
    """initdb, a server, the script of docker-entrypoint-initdb.d, a restart."""
    mounts = dict(m.split(":")[1::-1] for m in service["volumes"])
    (script,) = [source for target, source in mounts.items() if "initdb.d" in target]
    user = service["environment"]["POSTGRES_USER"]
    server.tool(
        "initdb", "-D", str(server.data), "-U", user, "-A", "trust", "-E", "UTF8", "--no-sync"
    )
    with open(server.data / "pg_hba.conf", "a") as hba:
        hba.write("host all all all scram-sha-256\n")  # As the image's.
    server.configure(
        port=str(server.port),
        unix_socket_directories=str(server.folder),
        shared_buffers="32MB",
        listen_addresses="127.0.0.1",
    )
    server.start()
    database = service["environment"]["POSTGRES_DB"]
    server.sql(f"CREATE DATABASE {database};", "postgres")
    schema = server.folder / "postgres"
    shutil.copytree(DOCKER / mounts[service["environment"]["SCHEMA"]], schema)
    shutil.copy(DOCKER / script, server.folder)
    connection = {"PGHOST": str(server.folder), "PGPORT": str(server.port), "SCHEMA": str(schema)}
    run_as(
        server,
        ["bash", str(server.folder / Path(script).name)],
        environment(server, service, **connection),
    )
    server.stop(signal.SIGINT)
    server.start()


def start_copy(server: Postgres, service: dict[str, Any], primary: Postgres) -> None:
    script = server.folder / "standby.sh"
    script.write_text((DOCKER / "standby.sh").read_text())
    env = environment(server, service, PGHOST="127.0.0.1", PGPORT=str(primary.port))
    flags = [
        "-c", f"port={server.port}", "-c", f"unix_socket_directories={server.folder}",
    ]  # fmt: skip
    with open(server.folder / "log", "ab") as log:
        server.process = subprocess.Popen(
            [*server._become, "bash", str(script), *flags],
            env=env, cwd=server.folder, stdout=log, stderr=log,
        )  # fmt: skip
    wait_for(
        "the standby answers",
        lambda: server.answers() or server.process is None or server.process.poll() is not None,
        60,
    )
    assert server.process.poll() is None, (server.folder / "log").read_text()


def test_commits_wait_for_the_standby(
    pair: tuple[Postgres, Postgres], secrets: Path, tmp_path: Path
) -> None:
    primary, standby = pair
    wait_for(
        "the standby is synchronous",
        lambda: primary.sql("SELECT sync_state FROM pg_stat_replication;") == [["sync"]],
    )
    dsn = (secrets / "cluster-dsn").read_text()
    assert "host=primary,standby port=5432 " in dsn
    dsn = dsn.replace(
        "host=primary,standby port=5432",
        f"host=127.0.0.1,127.0.0.1 port={primary.port},{standby.port}",
    )
    with Cluster(tmp_path, primary, 2, standby, dsn=dsn) as cluster:
        cluster.add_trainers(6, 0.05)
        cluster.await_acks(5)
        assert "no synchronous standby" not in cluster.servers[0].log()
        standby.stop()
        before = await_silence(lambda: cluster.ledger.total)
        time.sleep(1)
        assert cluster.ledger.total == before, "acknowledged without the standby"
        # Again: a copy that is there is not made anew.
        start_copy(standby, SERVICES["standby"], primary)
        cluster.await_acks(5, 40)
        # The primary is gone for good: what was acknowledged is in the other.
        primary.stop()
        assert standby.sql("SELECT pg_promote();") == [["t"]]
        cluster.database = standby
        cluster.await_acks(5, 60)
        cluster.await_balance()
        result = cluster.check()
        assert result["acked"] > 60


def test_the_services_are_whole() -> None:
    assert len(SERVERS) == 3
    for name in SERVERS:
        service = SERVICES[name]
        assert service["hostname"] == name and service["secrets"] == ["cluster-dsn"]
        assert service["networks"]["default"]["aliases"] == ["bellwether"]
        assert unknown_flags(service["command"]) == set()
        assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
        assert "no-new-privileges:true" in service["security_opt"]
    assert {name for name, s in SERVICES.items() if "privileged" in s} == set()
    for service in SERVICES.values():
        assert PINNED.fullmatch(service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert set(service.get("depends_on", {})) <= SERVICES.keys()
        for mount in service.get("volumes", []):
            source, target, *mode = mount.split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (DOCKER / source).exists() and mode == ["ro"], mount
            else:
                assert source in COMPOSE["volumes"], mount
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    # The data of the copy is in its volume.
    data = SERVICES["standby"]["environment"]["PGDATA"]
    assert data.startswith(SERVICES["standby"]["volumes"][0].split(":")[1] + "/")


def rewritten(text: str, node: str, dsn: Path, address: str) -> str:
    """What the entrypoints' sed makes of a configuration, and the dsn of the test."""
    named = subprocess.run(
        ["sed", f"s/NODE/{node}/g"], input=text, capture_output=True, text=True, check=True
    ).stdout
    settings = yaml.safe_load(named)
    assert settings["cluster"]["node"] == node
    assert settings["cluster"]["address"].startswith(f"{node}")
    assert settings["cluster"]["address"].endswith(":7070")
    settings["cluster"] |= {"dsn_file": str(dsn), "address": address}
    return str(yaml.safe_dump(settings))


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_a_server_takes_the_settings(
    where: str, pair: tuple[Postgres, Postgres], secrets: Path, tmp_path: Path
) -> None:
    primary, _ = pair
    dsn = tmp_path / "dsn"
    dsn.touch(mode=0o640)
    dsn.write_text(
        (secrets / "cluster-dsn").read_text()
        .replace("host=primary,standby port=5432", f"host=127.0.0.1 port={primary.port}")
    )  # fmt: skip
    os.chmod(dsn, 0o440)  # As a Kubernetes secret with an fsGroup is.
    if where == "compose":
        script = SERVICES[SERVERS[0]]["entrypoint"][2]
        text, flags = (DOCKER / "bellwetherd.yml").read_text(), SERVICES[SERVERS[0]]["command"]
    else:
        (script,) = [c["command"][2] for c in POD["spec"]["initContainers"]]
        files = OBJECTS["ConfigMap bellwether"]["data"]
        text, flags = files["bellwetherd.yml"], CONTAINER["args"]
        for name in ("rules.yml", "policy.yml"):
            (tmp_path / name).write_text(files[name])
        text = text.replace("/etc/bellwether/", f"{tmp_path}/")
    assert 'sed "s/NODE/$' in script and "HOSTNAME/g" in script
    assert unknown_flags(flags) == set()
    ours = ("--config.file", "--storage.path", "--grpc.listen-address", "--web.listen-address")
    left = [word for word in flags if word.partition("=")[0] not in ours]
    server = Server(tmp_path, "", *left)
    config = tmp_path / "named.yml"
    config.write_text(rewritten(text, "pod-0", dsn, server.grpc))
    server.flags.append(f"--config.file={config}")
    with server:
        wait_for("it owns all", lambda: server.metric("bellwether_cluster_partitions") == 64)
        owner = primary.sql(
            "SELECT DISTINCT split_part(owner, '/', 1), address FROM bellwether.lease;"
        )
        assert owner == [["pod-0", server.grpc]]
        assert server.stop() == 0
    assert (secrets / "server-password").read_text() not in server.log()


@pytest.mark.skipif(
    shutil.which("node") is None or not (Path(__file__).parent / "node_modules").is_dir(),
    reason="npm ci in tests/deploy",
)
def test_the_schemas_allow_the_manifests() -> None:
    named = yaml.safe_load((KUBERNETES / "kustomization.yml").read_text())["resources"]
    assert sorted(named) == sorted(
        p.name for p in KUBERNETES.glob("*.yml") if p.name != "kustomization.yml"
    )
    assert len(OBJECTS) == 7
    assert dict(zip(OBJECTS, findings(*OBJECTS.values()))) == {name: [] for name in OBJECTS}


def test_the_manifests_fit_each_other() -> None:
    labels = POD["metadata"]["labels"]
    whole = OBJECTS["StatefulSet bellwether"]["spec"]
    nodes = OBJECTS["Service bellwether-nodes"]
    budget = OBJECTS["PodDisruptionBudget bellwether"]["spec"]
    policy = OBJECTS["NetworkPolicy bellwether"]["spec"]
    for selector in (
        whole["selector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        policy["podSelector"]["matchLabels"],
        nodes["spec"]["selector"],
        OBJECTS["Service bellwether"]["spec"]["selector"],
    ):
        assert selector == labels
    assert 2 <= whole["replicas"] <= 64 and budget["maxUnavailable"] == 1
    # Where trainers are sent: the pod's own name in the headless service.
    assert whole["serviceName"] == nodes["metadata"]["name"]
    assert nodes["spec"]["clusterIP"] == "None" and nodes["spec"]["publishNotReadyAddresses"]
    settings = yaml.safe_load(OBJECTS["ConfigMap bellwether"]["data"]["bellwetherd.yml"])
    namespace = OBJECTS["Namespace bellwether"]["metadata"]["name"]
    assert settings["cluster"]["address"] == f"NODE.{whole['serviceName']}.{namespace}.svc:7070"
    assert [{"port": 5432}] in [rule["ports"] for rule in policy["egress"]]
    # Servers ask each other.
    servers = [{"podSelector": {"matchLabels": labels}}]
    assert {"from": servers, "ports": [{"port": "grpc"}]} in policy["ingress"]
    assert {"to": servers, "ports": [{"port": 7070}]} in policy["egress"]
    # The connection string comes as a secret's file, and nowhere else.
    (secret,) = [v["secret"] for v in POD["spec"]["volumes"] if "secret" in v]
    (mount,) = [m for m in CONTAINER["volumeMounts"] if m["name"] == "secret"]
    path = f"{mount['mountPath']}/{secret['items'][0]['path']}"
    assert settings["cluster"]["dsn_file"] == path and secret["defaultMode"] == 0o440
    assert "env" not in CONTAINER and "stringData" not in str(OBJECTS)
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == volumes
    # As confined as the server alone.
    alone = ALONE["spec"]
    for part in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert POD["spec"][part] == alone[part], part
    for container in [CONTAINER, *POD["spec"]["initContainers"]]:
        assert container["securityContext"] == alone["containers"][0]["securityContext"]
        assert container["image"] == alone["containers"][0]["image"]
    for part in ("ports", "startupProbe", "livenessProbe", "readinessProbe"):
        assert CONTAINER[part] == alone["containers"][0][part], part
