"""The manifests are valid, hang together, and start a gateway whose configuration can be used."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.kustomized import Resource, build
from fairshare.config import parse

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATIONS = ["base", "overlays/replicas", "engines"]
VERSIONS = ["1.30", "1.37"]
"""An old release and a new one."""


def built(name: str) -> dict[tuple[str, str], Resource]:
    return {(each["kind"], each["metadata"]["name"]): each for each in build(KUBERNETES / name)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_every_resource_follows_its_schema(name: str, version: str) -> None:
    for each in build(KUBERNETES / name):
        if each["kind"] != "ServiceMonitor":  # not Kubernetes' own
            kubernetes_validate.validate(each, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    wrong = built("base")["Deployment", "fairshare"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRoot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_every_file_belongs_to_a_kustomization() -> None:
    for path in KUBERNETES.rglob("*.yaml"):
        if path.name == "kustomization.yaml":
            continue
        spec = yaml.safe_load((path.parent / "kustomization.yaml").read_text())
        named = {
            *spec.get("resources", ()),
            *(patch["path"] for patch in spec.get("patches", ())),
            *(name for generator in spec.get("configMapGenerator", ()) for name in generator["files"]),
        }
        assert path.name in named, f"{path} is in no kustomization"


@pytest.mark.parametrize("name", ["base", "overlays/replicas"])
def test_what_names_something_else_names_what_is_there(name: str) -> None:
    resources = built(name)
    deployment = resources["Deployment", "fairshare"]["spec"]
    pod: dict[str, Any] = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container["ports"]}
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert ("ServiceAccount", pod["serviceAccountName"]) in resources
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert ("ConfigMap", volumes["configuration"]["configMap"]["name"]) in resources
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    for (kind, _), each in resources.items():
        if kind == "Service":
            assert each["spec"]["selector"].items() <= labels.items()
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
        if kind in {"PodDisruptionBudget", "NetworkPolicy"}:
            selector = each["spec"].get("selector") or each["spec"]["podSelector"]
            assert selector["matchLabels"].items() <= labels.items()


def test_prometheus_finds_the_admin_port_and_nothing_else() -> None:
    resources = built("overlays/replicas")
    monitor = resources["ServiceMonitor", "fairshare"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    found = [
        each
        for (kind, _), each in resources.items()
        if kind == "Service" and wanted <= each["metadata"]["labels"].items()
    ]
    assert [each["metadata"]["name"] for each in found] == ["fairshare-admin"]
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} == {
        port["name"] for port in found[0]["spec"]["ports"]
    }


def test_the_rights_are_those_that_following_endpoints_needs_and_are_given_to_the_gateway() -> None:
    rights = built("engines")
    (rule,) = rights["Role", "fairshare-endpoints"]["rules"]
    assert rule == {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    (subject,) = rights["RoleBinding", "fairshare-endpoints"]["subjects"]
    account = built("overlays/replicas")["ServiceAccount", subject["name"]]
    assert (account["metadata"]["namespace"], account["automountServiceAccountToken"]) == (subject["namespace"], True)
    assert built("base")["ServiceAccount", "fairshare"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["base", "overlays/replicas"])
def test_the_configuration_can_be_used_and_fits_the_pod(name: str, tmp_path: Path) -> None:
    resources = built(name)
    (text,) = resources["ConfigMap", "fairshare"]["data"].values()
    pod = resources["Deployment", "fairshare"]["spec"]["template"]["spec"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    for secret in ("admin.key", "postgres.password", "peers.secret"):
        (tmp_path / secret).write_text("0123456789abcdef" * 2)
        (tmp_path / secret).chmod(0o600)
    assert "/etc/fairshare-secrets" in mounts
    environ = {variable["name"]: "10.0.0.7" for variable in pod["containers"][0].get("env", ())}
    text = text.replace("/etc/fairshare-secrets", str(tmp_path))
    settings = parse(text, path=tmp_path / "f.yaml", environ=environ)
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert (settings.gateway.listen.port, settings.gateway.admin.address.port) == (ports["http"], ports["admin"])
    if (replicas := settings.gateway.replicas) is not None:
        assert replicas.advertise == f"10.0.0.7:{ports['peers']}"
        assert replicas.listen.port == ports["peers"]
    assert settings.gateway.limits.drain_seconds < pod["terminationGracePeriodSeconds"]
