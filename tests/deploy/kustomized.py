"""Builds a kustomization as kustomize does, as far as ours go: no package index has the real one.

Whatever it does not know is an error, so nothing in the manifests is passed over in silence.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "namespace", "resources", "labels", "configMapGenerator", "patches"}
_CLUSTER_WIDE = {"Namespace"}


def build(folder: Path) -> list[Resource]:
    """Every resource of a kustomization, patched, with its labels and namespace."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(spec) - _KNOWN
    assert not unknown, f"{folder}: this builder does not know {unknown}"
    resources: list[Resource] = []
    for name in spec.get("resources", ()):
        path = folder / name
        resources += build(path.resolve()) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for generator in spec.get("configMapGenerator", ()):
        assert set(generator) <= {"name", "behavior", "files"}
        made = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": generator["name"]},
            "data": {name: (folder / name).read_text() for name in generator["files"]},
        }
        known = [each for each in resources if _key(each) == _key(made)]
        assert bool(known) == (generator.get("behavior") == "replace"), f"{folder}: ConfigMap {generator['name']}"
        for each in known:
            made["metadata"] = each["metadata"]
            resources.remove(each)
        resources.append(made)
    for patch in spec.get("patches", ()):
        assert set(patch) == {"path"}
        patched = yaml.safe_load((folder / patch["path"]).read_text())
        (target,) = [each for each in resources if _key(each) == _key(patched)]
        _merge(target, patched)
    for labels in spec.get("labels", ()):
        assert set(labels) == {"pairs", "includeSelectors"}
        for each in resources:
            _label(each, labels["pairs"])
    for each in resources:
        if "namespace" in spec and each["kind"] not in _CLUSTER_WIDE:
            each["metadata"]["namespace"] = spec["namespace"]
    return resources


def _key(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


_MERGED_BY = {"containers": "name", "ports": "containerPort", "env": "name"}
"""Lists of a pod whose items a patch is merged into by this key, as Kubernetes' schemas say."""


def _merge(target: Resource, patch: Resource) -> None:
    """A strategic merge of mappings, and of the lists above. Other lists a patch may only add."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        elif isinstance(target.get(key), list):
            assert key in _MERGED_BY, f"{key}: this builder does not merge such lists"
            by = _MERGED_BY[key]
            for item in value:
                same = [each for each in target[key] if each[by] == item[by]]
                if same:
                    _merge(same[0], item)
                else:
                    target[key].append(item)
        else:
            target[key] = copy.deepcopy(value)


def _label(resource: Resource, labels: dict[str, str]) -> None:
    resource["metadata"].setdefault("labels", {}).update(labels)
    match resource["kind"]:
        case "Deployment":
            spec = resource["spec"]
            spec.setdefault("selector", {}).setdefault("matchLabels", {}).update(labels)
            spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        case "Service":
            resource["spec"].setdefault("selector", {}).update(labels)
        case _:
            pass
