"""Keys and who they belong to."""

import base64
import hashlib

from fairshare.core.priority import ServiceClass
from fairshare.gateway.identity import StaticDirectory, hash_key, identities_of, new_key
from fairshare.gateway.options import KeySpec, TeamSpec

KEY = "fs-example"
DIGEST = hashlib.sha256(b"fs-example").digest()


def test_a_key_is_fs_and_256_random_bits() -> None:
    asked: list[int] = []

    def random_bytes(count: int) -> bytes:
        asked.append(count)
        return bytes(range(count))

    key = new_key(random_bytes)
    assert asked == [32]
    assert key.startswith("fs-")
    assert base64.urlsafe_b64decode(key[3:] + "=") == bytes(range(32))


def test_a_key_is_found_by_its_sha256_and_by_nothing_else() -> None:
    team = TeamSpec(name="search", keys=(KeySpec(sha256=DIGEST, service_class=ServiceClass.BATCH),))
    directory = StaticDirectory.of([team])
    found = directory.find(hash_key(KEY))
    assert found is not None
    assert (found.team, found.service_class, found.key_id) == ("search", ServiceClass.BATCH, DIGEST.hex()[:12])
    assert directory.find(hash_key(KEY + "x")) is None
    assert directory.find(KEY.encode()) is None


def test_replacing_the_keys_ends_the_old_ones_and_starts_the_new_ones_at_once() -> None:
    directory = StaticDirectory.of([TeamSpec(name="search", keys=(KeySpec(sha256=DIGEST),))])
    directory.replace(identities_of([TeamSpec(name="ads", keys=(KeySpec(sha256=hash_key("fs-other")),))]))
    assert directory.find(DIGEST) is None
    found = directory.find(hash_key("fs-other"))
    assert found is not None
    assert found.team == "ads"


def test_a_key_with_bytes_that_are_no_text_is_hashed_and_not_found() -> None:
    assert StaticDirectory().find(hash_key("fs-\udcff")) is None
