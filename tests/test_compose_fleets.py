"""Elastic fleets in a whole gateway: a file that names engines, and operators at the admin port."""

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from fairshare.config import Settings, parse
from gateway.discovery.api_server import TOKEN, ApiServer, endpoint_slice
from gateway.hostile_engine import HostileEngine
from gateway.rig import run
from test_compose import engines, running, settings, until


def elastic(path: Path) -> str:
    shares = "shares: {red: 1/2, blue: 1/2}"
    return f"name: chat, capacity_per_instance: 4, models: {{tiny: tiny}}, instances: [{{file: '{path}'}}], {shares}"


def with_store(pool: str, folder: Path) -> Settings:
    text = f"""
listen: 127.0.0.1:0
store: "sqlite:{folder}/store.sqlite3"
admin: {{listen: "127.0.0.1:0", key: "${{KEY}}"}}
pools: [{{{pool}}}]
"""
    return parse(text, path=folder / "fairshare.yaml", environ={"KEY": "admin-secret"})


def list_engines(path: Path, *engines: HostileEngine) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps([engine.url for engine in engines]))
    beside.rename(path)


def test_a_pool_follows_a_file_and_what_runs_at_an_engine_that_leaves_finishes(tmp_path: Path) -> None:
    async def scenario() -> None:
        listed = tmp_path / "engines.json"
        async with engines(2) as (one, two):
            list_engines(listed, one)
            async with running(settings(elastic(listed))) as gateway:
                assert gateway.pool().capacity == gateway.pool().configured_capacity == 4
                one.gate.clear()
                client = await gateway.send()
                await one.asked_for_completions(1)
                list_engines(listed, one, two)
                await until(lambda: gateway.pool().capacity == 8)
                list_engines(listed, two)
                await until(lambda: gateway.pool().capacity == 4)
                assert {each.id: each.leaving for each in gateway.pool().instances} == {two.url: False, one.url: True}
                assert (await gateway.ask()).status == 200
                assert len(two.completions) == 1
                one.gate.set()
                assert (await client.read()).status == 200
                await until(lambda: [each.id for each in gateway.pool().instances] == [two.url])
                listed.write_text("[http://broken")
                await until(lambda: any("cannot follow the file" in said for said in gateway.pool().findings))
                assert (await gateway.ask()).status == 200

    run(scenario)


def test_operators_drain_and_add_instances_by_the_admin_port() -> None:
    async def scenario() -> None:
        async with engines(2) as (one, two):
            both = f"name: chat, capacity: 8, models: [tiny], instances: ['{one.url}', '{two.url}']"
            text = settings(both + ", shares: {red: 1}", rest="admin: {listen: '127.0.0.1:0', key: '${KEY}'}")
            key = {"Authorization": "Bearer admin-secret"}
            async with running(text) as gateway, httpx.AsyncClient(headers=key) as http:
                path = f"http://{gateway.gateway.admin_at}/api/v1/pools/chat/instances"
                assert (await http.post(f"{path}/drain", json={"url": one.url})).status_code == 204
                assert gateway.pool().capacity == 4
                refused = await http.post(f"{path}/drain", json={"url": two.url})
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
                named = (await http.get(path)).json()["data"]
                assert [(each["url"], each["state"]) for each in named] == [(one.url, "drained"), (two.url, "member")]
                assert (await http.post(path, json={"url": one.url})).status_code == 204
                assert gateway.pool().capacity == 8
                for wrong, status in (
                    ({"url": "ftp://x"}, 400),
                    ({"url": one.url, "seats": 3}, 400),
                    ({"url": one.url, "max_num_seqs": 0}, 400),
                ):
                    assert (await http.post(path, json=wrong)).status_code == status
                assert (await http.post(path, content=b"url=x")).status_code == 415
                assert (await http.post(path.replace("chat", "nowhere"), json={"url": one.url})).status_code == 404

    run(scenario)


def test_being_on_the_machine_is_not_enough_to_change_where_prompts_go() -> None:
    async def scenario() -> None:
        async with engines(1) as (one,):
            single = f"name: chat, capacity: 8, models: [tiny], instances: ['{one.url}'], shares: {{red: 1}}"
            async with running(settings(single)) as gateway, httpx.AsyncClient() as http:
                path = f"http://{gateway.gateway.admin_at}/api/v1/pools/chat/instances"
                assert (await http.get(path)).status_code == 200
                for more in ("", "/drain", "/remove"):
                    refused = await http.post(path + more, json={"url": "http://127.0.0.1:1"})
                    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
                    assert "needs a key" in refused.json()["error"]["message"]
                assert [each.id for each in gateway.pool().instances] == [one.url]

    run(scenario)


def test_only_operators_of_the_whole_site_may_change_instances_and_the_audit_has_who_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engines(2) as (one, two):
            both = f"name: chat, capacity: 8, models: [tiny], instances: ['{one.url}', '{two.url}'], shares: {{red: 1}}"
            async with running(with_store(both, tmp_path)) as gateway, httpx.AsyncClient() as http:
                root = f"http://{gateway.gateway.admin_at}/api/v1"
                admin = {"Authorization": "Bearer admin-secret"}
                await http.post(f"{root}/organisations", json={"name": "org"}, headers=admin)
                keys: dict[tuple[str, str], dict[str, str]] = {}
                for role, reach in (("admin", "site"), ("viewer", "site"), ("admin", "organisation:org")):
                    made = await http.post(f"{root}/operators", json={"role": role, "reach": reach}, headers=admin)
                    assert made.status_code == 201, made.text
                    keys[role, reach] = {"Authorization": f"Bearer {made.json()['key']}"}
                path = f"{root}/pools/chat/instances"

                async def status(way: str, who: tuple[str, str]) -> int:
                    if way == "look":
                        return (await http.get(path, headers=keys[who])).status_code
                    return (await http.post(f"{path}/drain", json={"url": one.url}, headers=keys[who])).status_code

                accounts = vars(gateway.gateway)["_accounts"]
                secrets = [each["Authorization"].removeprefix("Bearer ").encode() for each in keys.values()]
                # The gateway follows its store.
                await until(lambda: all(accounts.operator(hashlib.sha256(secret).digest()) for secret in secrets))
                assert await status("look", ("admin", "organisation:org")) == 403
                assert await status("drain", ("admin", "organisation:org")) == 403
                assert await status("drain", ("viewer", "site")) == 403
                assert (await http.post(f"{path}/drain", json={"url": one.url})).status_code == 401
                assert await status("drain", ("admin", "site")) == 204
                audit = (await http.get(f"{root}/audit?limit=1", headers=admin)).json()["data"][0]
                assert (audit["action"], audit["target"]) == ("drain instance", f"chat {one.url}")

    run(scenario)


def test_a_pool_follows_a_kubernetes_service_found_by_its_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slice_of(name: str, engine: HostileEngine) -> dict[str, Any]:
        port = urlsplit(engine.url).port
        return endpoint_slice(name, "127.0.0.1", ports=[{"name": "http", "port": port}])

    async def scenario() -> None:
        async with engines(2) as (one, two), ApiServer() as server:
            kubeconfig = {
                "clusters": [{"name": "c", "cluster": {"server": server.config().cluster.server}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
                "current-context": "x",
            }
            (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
            await server.put(slice_of("one", one))
            followed = "name: chat, capacity_per_instance: 4, models: {tiny: tiny}, shares: {red: 1/2, blue: 1/2}"
            followed += ", instances: [{kubernetes: {service: vllm, port: http}}]"
            async with running(settings(followed)) as gateway:
                assert [each.id for each in gateway.pool().instances] == [one.url]
                assert (await gateway.ask()).status == 200
                await server.put(slice_of("two", two))
                await until(lambda: gateway.pool().capacity == 8)
                await server.delete("one")
                await until(lambda: [each.id for each in gateway.pool().instances] == [two.url])
                assert gateway.pool().capacity == 4
                assert (await gateway.ask()).status == 200
                assert len(two.completions) == 1

    run(scenario)
