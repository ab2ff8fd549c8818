"""Sources of instances in the configuration: what is read, and what is said of mistakes."""

from pathlib import Path

import pytest

from fairshare import config
from fairshare.config import ConfigError, Settings, parse
from fairshare.gateway.options import DnsSource, FileSource, InstanceSpec, KubernetesSource, SrvSource


def read(instances: str, capacity: str = "capacity_per_instance: 4") -> Settings:
    text = f"store: none\npools: [{{name: chat, {capacity}, shares: {{a: 1}}, models: [m], instances: [{instances}]}}]"
    return parse(text, path=Path("/etc/f.yaml"), environ={"KEY": "secret"})


def problems(instances: str, capacity: str = "capacity_per_instance: 4") -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(instances, capacity)
    return [problem.removeprefix("/etc/f.yaml:2: pools[0]") for problem in error.value.problems]


def test_every_kind_of_source_is_read_and_stands_beside_instances_that_are_named() -> None:
    entries = [
        "'http://one:8000'",
        "{dns: 'http://engines', api_key: '${KEY}'}",
        "{srv: _vllm._tcp.engines.example.com, scheme: https}",
        "{file: engines.yaml, max_num_seqs: 8}",
        "{kubernetes: {service: vllm, namespace: models, port: http}}",
        "{kubernetes: {service: other}}",
    ]
    (pool,) = read(", ".join(entries)).gateway.pools
    bare = InstanceSpec(url="")
    assert pool.instances == (InstanceSpec(url="http://one:8000"),)
    assert pool.sources == (
        DnsSource(url="http://engines:80", template=InstanceSpec(url="", api_key="secret")),
        SrvSource(name="_vllm._tcp.engines.example.com", scheme="https", template=bare),
        FileSource(path=Path("/etc/engines.yaml"), template=InstanceSpec(url="", max_num_seqs=8)),
        KubernetesSource(service="vllm", namespace="models", port="http", template=bare),
        KubernetesSource(service="other", namespace=None, port=None, template=bare),
    )
    assert (pool.capacity, pool.capacity_per_instance) == (4, 4)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            "{dns: 'http://e', url: 'http://f'}",
            ".instances[0]: give one of url, dns, srv, file, kubernetes, found url and",
        ),
        ("{dns: 'https://e'}", ".instances[0].dns: must be http: the addresses of a name have no certificates"),
        (
            "{dns: 'http://10.0.0.1'}",
            ".instances[0].dns: must hold a name that is looked up, found the address 10.0.0.1",
        ),
        ("{dns: 'http://e', scheme: http}", ".instances[0].scheme: belongs to srv only"),
        ("{srv: engines.example.com}", ".instances[0].srv: must be an SRV name as _vllm._tcp.engines.example.com"),
        ("{srv: _a._tcp.b, scheme: ftp}", ".instances[0].scheme: must be http or https"),
        (
            "{kubernetes: {servce: v}}",
            '.instances[0].kubernetes.servce: unknown key "servce"; the nearest known one is',
        ),
        ("{kubernetes: {namespace: n}}", '.instances[0].kubernetes: "service" is missing'),
        ("{kubernetes: {service: V_1}}", ".instances[0].kubernetes.service: must be a name in Kubernetes"),
        ("{kubernetes: {service: v, port: 99999}}", ".instances[0].kubernetes.port: must be the name or the number"),
        ("{dns: 'http://e'}, {dns: 'http://e:80'}", ".instances[1]: the name of http://e:80 is also"),
        ("{max_num_seqs: 4}", '.instances[0]: "url" is missing'),
    ],
)
def test_a_mistake_in_a_source_is_said_with_what_to_do(entry: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(entry)), problems(entry)


def test_a_pool_with_sources_needs_the_capacity_of_one_instance() -> None:
    (of_all,) = problems("{dns: 'http://e'}", "capacity: 16")
    assert of_all.startswith(".capacity: the instances of this pool come and go")
    (none,) = problems("{dns: 'http://e'}", "half_life: 0")
    assert none.startswith(': "capacity_per_instance" is missing')
    assert len(problems("{dns: 'http://e'}", "capacity_per_instance: none")) == 1


def test_a_file_that_cannot_be_used_now_is_a_warning_because_it_may_change_before_the_start(tmp_path: Path) -> None:
    listed = tmp_path / "engines.yaml"
    (warning,) = [each for each in read(f"{{file: {listed}}}").warnings if "file" in each]
    assert f"{listed} cannot be read now (no such file or directory)" in warning
    listed.write_text("- ftp://one")
    (warning,) = [each for each in read(f"{{file: {listed}}}").warnings if "file" in each]
    assert "no instance comes from it yet" in warning
    assert f"{listed}:1: [0]: must be an engine's address" in warning


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda _: None)
    (problem,) = problems("{kubernetes: {service: v}}")
    assert "pip install 'fairshare[kubernetes]'" in problem
