"""Puts a bundle (deploy/bundle.sh) into the wheel: deploy/wheel.sh names it in the environment.

Without one the wheel is pure Python, for machines that have our libraries already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundleHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if "BELLWETHER_BUNDLE" not in os.environ:
            return
        bundle = Path(os.environ["BELLWETHER_BUNDLE"])
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ['BELLWETHER_PLATFORM']}"
        # A wheel has no links: a library goes in once, under the name that the package opens.
        links = {file: file.resolve() for file in (bundle / "bin").iterdir() if file.is_symlink()}
        for folder in ("bin", "lib", "licenses"):
            for file in (bundle / folder).iterdir():
                if file not in links.values():
                    build_data["force_include"][str(file)] = f"bellwether/{folder}/{file.name}"
        # On the user's path, where they become the programs in bin/; the sender is nobody's to start.
        for script in (Path(self.root) / "packaging" / "scripts").iterdir():
            build_data["shared_scripts"][str(script)] = script.name
