#!/usr/bin/env python3
"""Writes a software bill of materials (CycloneDX 1.5, JSON) of what was built.

    python3 deploy/sbom.py build/cpu/bin > bellwether.cdx.json

It holds the shared libraries that our programs load, as the Debian packages that own them; the
packages whose headers and archives are compiled in; and what the Python and npm lock files pin.
Needs Debian's dpkg-query, readelf and ldd, and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("bellwetherd", "bellwether", "bellwether-lab", "bellwether-sender", "libbellwether_client.so",
            "libbellwether_kernels.so")  # fmt: skip
# Packages of packages-build.txt of which code ends up inside our programs without being loaded.
COMPILED_IN = ("libcli11-dev", "nlohmann-json3-dev", "librocksdb-dev", "libspdlog-dev", "libabsl-dev", "prometheus-cpp-dev")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loaded(program: Path) -> set[Path]:
    """The libraries that the program loads, ours aside."""
    paths = {Path(match[1]) for match in re.finditer(r"=> (/\S+)", output("ldd", str(program)))}
    return {path.resolve() for path in paths if "bellwether" not in path.name}


@cache
def owner(path: Path) -> str:
    """The Debian package of a file; "" if there is none."""
    for name in (path, Path("/usr") / path.relative_to("/"), Path(str(path).removeprefix("/usr"))):
        done = subprocess.run(["dpkg-query", "-S", str(name)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.split(": ")[0].split(",")[0]
    return ""


def debian(package: str) -> dict[str, Any]:
    fields = "${Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}"
    name, version, arch, source, source_version = output("dpkg-query", "-W", "-f", fields, package).split("\t")
    purl = f"pkg:deb/debian/{name}@{version}?arch={arch}&distro=debian-12"
    return {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
        "properties": [{"name": "debian:source", "value": f"{source} {source_version}"}],
    }  # fmt: skip


def python_packages() -> Iterator[dict[str, Any]]:
    for line in (ROOT / "deploy/requirements-run.txt").read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)", line):
            purl = f"pkg:pypi/{match[1].lower()}@{match[2]}"
            yield {"type": "library", "bom-ref": purl, "name": match[1], "version": match[2], "purl": purl, "scope": "optional"}


def npm_packages() -> Iterator[dict[str, Any]]:
    """What the page is made of and made with."""
    lock = json.loads((ROOT / "dashboards/console/package-lock.json").read_text())
    for path, entry in lock["packages"].items():
        if not path:
            continue
        name, version = path.rpartition("node_modules/")[2], entry["version"]
        purl = f"pkg:npm/{name.replace('@', '%40')}@{version}"
        component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        if entry.get("dev") or entry.get("optional"):
            component["scope"] = "excluded"  # Builds the page, and is not in it.
        yield component


def bill(folder: Path) -> dict[str, Any]:
    programs = [folder / name for name in PROGRAMS if (folder / name).exists()]
    if not programs:
        raise SystemExit(f"{folder}: holds none of {', '.join(PROGRAMS)}")
    packages = {owner(path) for program in programs for path in loaded(program)} - {""}
    components = [debian(package) for package in sorted(packages)]
    for component in [debian(package) for package in COMPILED_IN]:
        component["properties"].append({"name": "bellwether:linkage", "value": "compiled in"})
        components.append(component)
    components += [*python_packages(), *npm_packages()]
    version = re.search(r"VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text().split("project(")[1])
    product: dict[str, Any] = {"type": "application", "name": "bellwether", "version": version[1] if version else ""}
    product["bom-ref"] = f"bellwether@{product['version']}"
    product["components"] = [
        {
            "type": "file", "name": program.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(program.read_bytes()).hexdigest()}],
        }
        for program in programs
    ]  # fmt: skip
    unique = {component["bom-ref"]: component for component in components}
    body = {"metadata": {"component": product}, "components": [unique[ref] for ref in sorted(unique)]}
    # The same build gives the same bill.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{serial}", "version": 1, **body}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of the built programs")
    json.dump(bill(parser.parse_args().folder), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
