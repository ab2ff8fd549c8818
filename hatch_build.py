"""Compiles the modules that pyproject.toml names when a wheel is built with HATCH_BUILD_HOOKS_ENABLE=1."""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface):
    """Puts the compiled modules into the wheel, beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # it serves the sources as they are
        from mypyc.build import mypycify
        from setuptools import Distribution

        source = Path(self.root, "src")
        paths = [str(path) for pattern in self.config["modules"] for path in sorted(source.glob(pattern))]
        self.folder = tempfile.TemporaryDirectory(prefix="fairshare-compiled-")
        compiled = Path(self.folder.name, "modules")
        extensions = mypycify(
            ["--ignore-missing-imports", *paths], target_dir=self.folder.name, group_name="fairshare", debug_level="0"
        )
        command = Distribution({"name": "fairshare", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(compiled), str(Path(self.folder.name, "objects"))
        command.ensure_finalized()
        command.run()
        for path in compiled.rglob("*.so"):
            build_data["force_include"][str(path)] = str(path.relative_to(compiled))
        build_data["infer_tag"], build_data["pure_python"] = True, False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()
