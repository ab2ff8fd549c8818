"""fairshare.yaml → typed settings. Only the command line and the composition root import this.

The file is read as the text that was written, not as what YAML makes of it: `0.1` stays one tenth, and a team
called `no` stays an error with a line number instead of becoming `False`. Everything that is wrong is reported
at once, each thing as one sentence: where, what was found, what to do.
"""

import contextlib
import difflib
import ipaddress
import re
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from fairshare import clock
from fairshare.core.decisions import BorrowOrder, HoldOptions, Mode
from fairshare.core.priority import ServiceClass
from fairshare.errors import OperatorError
from fairshare.gateway.engine_url import WHAT as engine_url_form
from fairshare.gateway.engine_url import engine_url
from fairshare.gateway.kinds import DEFAULT_THRESHOLD, SglangFlags
from fairshare.gateway.options import (
    AccessLogSpec,
    Address,
    AdminSpec,
    Balance,
    DnsSource,
    EmbeddedPool,
    EmbeddedSpec,
    EngineKind,
    FileSource,
    GatewaySpec,
    InstanceSource,
    InstanceSpec,
    Isolation,
    KeySpec,
    KubernetesSource,
    Level,
    Limits,
    PeerTlsSpec,
    PoolSpec,
    ReplicasSpec,
    SrvSource,
    StoreSpec,
    TeamFrom,
    TeamSpec,
    Timeouts,
    TlsSpec,
    TokenEstimates,
    TracingSpec,
    WebhookSpec,
)
from fairshare.gateway.tls import expires_at
from fairshare.storage.address import PostgresServer, SqliteFile, StoreAddress
from fairshare.wire.usage import CostWeights

SHORTEST_PEER_SECRET = 32
"""Characters of what replicas prove themselves with: whoever sees a greeting may guess in peace."""

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "": ("listen", "tls", "admin", "pools", "teams", "limits", "store", "notify", "replicas", "access_log", "tracing"),
    "admin": ("listen", "key", "key_file"),
    "pools[]": (
        "name",
        "capacity",
        "capacity_per_instance",
        "half_life",
        "dispatch",
        "level",
        "shares",
        "models",
        "instances",
        "balance",
        "token_estimates",
        "isolate_prefixes",
        "prefix_secret",
        "prefix_secret_file",
        "fallback",
        "hold",
        "trim",
        "timeouts",
        "cost",
    ),
    "tls": ("certificate", "key"),
    "pools[].instances[]": (
        "url",
        "dns",
        "srv",
        "file",
        "kubernetes",
        "scheme",
        "max_num_seqs",
        "api_key",
        "api_key_file",
        "ca_file",
        "kind",
        "low_values_first",
        "preemption_threshold",
    ),
    "pools[].instances[].kubernetes": ("service", "namespace", "port"),
    "instances_file[]": ("url", "max_num_seqs"),
    "pools[].hold": (
        "borrow_order",
        "batch_every",
        "recall",
        "recall_waste",
        "max_held",
        "max_held_per_team",
        "max_held_bytes",
        "longest_wait",
    ),
    "pools[].timeouts": ("connect", "first_byte", "idle", "longest_request"),
    "pools[].cost": ("prompt", "cached", "completion", "unit"),
    "fairshare_settings": ("team_from", "pools"),
    "fairshare_settings.pools[]": (
        "name",
        "capacity",
        "half_life",
        "dispatch",
        "shares",
        "models",
        "hold",
        "cost",
        "longest_request",
    ),
    "fairshare_settings.pools[].hold": (
        "borrow_order",
        "batch_every",
        "max_held",
        "max_held_per_team",
        "longest_wait",
    ),
    "teams[]": ("name", "keys", "models"),
    "teams[].keys[]": ("sha256", "class"),
    "limits": ("max_body", "max_header", "header_timeout", "max_connections", "drain"),
    "store": ("url", "password", "password_file", "keep"),
    "notify": ("url", "secret", "secret_file", "allow_internal"),
    "replicas": ("listen", "advertise", "secret", "secret_file", "machines", "tls"),
    "replicas.tls": ("certificate", "key", "ca"),
    "tracing": ("endpoint", "sample"),
}
"""Every key of the file, by section. `shares` and `models` map names of the operator's choice.

`instances_file` is a file of its own, which `file` under `instances` names.
"""

DEFAULT_LISTEN = Address("127.0.0.1", 8080)
DEFAULT_ADMIN = Address("127.0.0.1", 8081)
LARGEST_NEIGHBOUR_BYTES = 1 << 20
"""A larger file beside a configuration is not looked into."""

SHORTEST_KEEP_SECONDS = 32 * 86400.0
"""No budget that starts again counts further back than a month."""

DEFAULT_STORE = "fairshare.sqlite3"
"""Beside the configuration file."""

DEFAULT_HALF_LIFE_SECONDS = 7 * 86400.0

WARN_OF_EXPIRY_DAYS = 30.0

SHORTEST_PREFIX_SECRET = 32

_SHARE_SUM_TOLERANCE = Fraction(1, 10**9)
"""A sum of shares this close above 1 counts as 1, as in `fairshare.core.apportion`."""


class ConfigError(OperatorError):
    """The configuration cannot be used; `problems` says everything that is wrong with it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration that can be used."""

    path: Path
    gateway: GatewaySpec
    warnings: tuple[str, ...]
    """What works but is likely not meant, one sentence each."""


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """Read and check a configuration file and the secrets that it names. Raises `ConfigError`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({_reason(error)}); check the path given with -c"]) from None
    settings = parse(text, path=path, environ=environ)
    return replace(settings, warnings=(*settings.warnings, *_sharing_a_store(settings)))


def _sharing_a_store(settings: Settings) -> list[str]:
    """Another configuration in the same folder that does not say where its store is keeps to the same file."""
    path, store = settings.path, settings.gateway.store
    if store is None or store.address != SqliteFile(path.parent / DEFAULT_STORE):
        return []
    return [
        f"{path}: {other} beside it keeps to the same store, {DEFAULT_STORE}; a SQLite file is for one gateway: write "
        f"store: sqlite:NAME.sqlite3 in one of them"
        for other in sorted({*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")})
        if not (other.exists() and path.exists() and other.samefile(path)) and _keeps_to_the_default_store(other)
    ]


def _keeps_to_the_default_store(path: Path) -> bool:
    """Whether a file looks like a configuration of a gateway that says nothing of its store."""
    try:
        if path.stat().st_size > LARGEST_NEIGHBOUR_BYTES:
            return False
        root = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    keys = {str(key.value) for key, _ in root.value} if isinstance(root, yaml.MappingNode) else set[str]()
    return {"pools", "listen"} <= keys and "store" not in keys


def parse(text: bytes | str, *, path: Path, environ: Mapping[str, str]) -> Settings:
    """As `load`, from text. `path` names the file in messages; relative secret files are looked up beside it."""
    report = _Report(path=path, environ=environ)
    root = _compose(text, path)
    spec = _gateway(_Place(root, "", report))
    if not report.problems:
        _cross_check(spec, report)
    if report.problems:
        raise ConfigError(report.problems)
    return Settings(path=path, gateway=spec, warnings=tuple(report.warnings))


def load_embedded(path: Path, environ: Mapping[str, str]) -> EmbeddedSpec:
    """The section `fairshare_settings` of another program's configuration file. Raises `ConfigError`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({_reason(error)})"]) from None
    report = _Report(path=path, environ=environ)
    root = _compose(text, path)
    sections = {str(key.value): value for key, value in root.value} if isinstance(root, yaml.MappingNode) else {}
    if "fairshare_settings" not in sections:
        raise ConfigError([f"{path}: has no section fairshare_settings; docs/howto/litellm.md shows one"])
    spec = EmbeddedSpec(pools=())
    with contextlib.suppress(_Invalid):
        spec = _embedded(_Place(sections["fairshare_settings"], "fairshare_settings", report))
    served: dict[str, str] = {}
    for pool in spec.pools:
        for model in pool.models:
            if served.setdefault(model, pool.name) != pool.name:
                report.problem("fairshare_settings.pools", f'model "{model}" is in two pools; remove it from one')
    if report.problems:
        raise ConfigError(report.problems)
    return spec


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a port that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- Places in the file -------------------------------------------------------------------------------------------


class _Invalid(Exception):
    """One value is wrong; caught where the value's key is read, so that the other values are checked too."""


class _Report:
    """Collects what is wrong."""

    def __init__(self, *, path: Path, environ: Mapping[str, str]) -> None:
        self.path = path
        self.environ = environ
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.lines: dict[str, int] = {}
        """Where each path of the file stands, for the checks that look at several places."""

    def problem(self, where: str, message: str) -> None:
        self.problems.append(self._sentence(where, message))

    def warning(self, where: str, message: str) -> None:
        self.warnings.append(self._sentence(where, message))

    def _sentence(self, where: str, message: str) -> str:
        line = self.lines.get(where)
        place = f"{self.path}:{line}" if line is not None else str(self.path)
        return f"{place}: {where}: {message}" if where else f"{place}: {message}"


class _Place:
    """A value in the file: its node, and the path that messages call it by."""

    def __init__(self, node: yaml.Node, where: str, report: _Report) -> None:
        self.node = node
        self.where = where
        self.report = report
        report.lines[where] = node.start_mark.line + 1

    def invalid(self, message: str) -> _Invalid:
        self.report.problem(self.where, message)
        return _Invalid()

    def found(self) -> str:
        """What stands here, for a message. Never called where a secret may stand."""
        match self.node:
            case yaml.MappingNode():
                return "a mapping"
            case yaml.SequenceNode():
                return "a list"
            case _:
                text = str(self.node.value)
                if not text and _is_plain(self.node):
                    return "nothing"
                return f'"{text if len(text) <= 80 else text[:77] + "..."}"'

    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    def is_sequence(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def text(self, what: str) -> str:
        """The text as written, quoted or not. `what` says what belongs here, with an example."""
        if isinstance(self.node, yaml.ScalarNode):
            text = str(self.node.value)
            if text or not _is_plain(self.node):
                return text
        raise self.invalid(f"must be {what}, found {self.found()}")

    def items(self, what: str) -> list["_Place"]:
        """The entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.invalid(f"must be a list of {what}, found {self.found()}")
        return [_Place(node, f"{self.where}[{index}]", self.report) for index, node in enumerate(self.node.value)]

    def entries(self, what: str) -> list[tuple["_Place", "_Place"]]:
        """The keys and values of a mapping, in order; a key that stands twice is reported and its first value kept."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.invalid(f"must be {what}, found {self.found()}")
        entries: dict[str, tuple[_Place, _Place]] = {}
        for key_node, value_node in self.node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.report.problem(self.where, f"line {key_node.start_mark.line + 1}: a key must be a plain word")
                continue
            name = str(key_node.value)
            where = f"{self.where}.{name}" if self.where else name
            line = key_node.start_mark.line + 1
            if name in entries:
                self.report.problem(
                    self.where,
                    f'"{name}" stands twice, the second time in line {line} '
                    f"(first in line {entries[name][0].node.start_mark.line + 1}); remove one",
                )
                continue
            entries[name] = (_Place(key_node, where, self.report), _Place(value_node, where, self.report))
        return list(entries.values())

    def fields(self, section: str) -> "_Fields":
        """The values of a section whose keys are known."""
        known = SECTIONS[section]
        fields: dict[str, _Place] = {}
        for key, value in self.entries(f"a mapping with {known[0]}, {known[1]} ..."):
            name = str(key.node.value)
            if name in known:
                fields[name] = value
            else:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                self.report.problem(key.where, f'unknown key "{name}"; the nearest known one is "{nearest}"')
        return _Fields(self, fields)


class _Fields:
    """The values of one section, read one by one. A wrong one is reported and stands in as its default."""

    def __init__(self, place: _Place, fields: Mapping[str, _Place]) -> None:
        self.place = place
        self._fields = fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def where(self, key: str) -> str:
        return f"{self.place.where}.{key}" if self.place.where else key

    def read(self, key: str, parse: Callable[[_Place], T], default: T) -> T:
        place = self._fields.get(key)
        if place is None:
            return default
        try:
            return parse(place)
        except _Invalid:
            return default

    def need(self, key: str, parse: Callable[[_Place], T], stand_in: T, example: str) -> T:
        """As `read`, and a missing key is reported. `stand_in` is never used: a report stops the start."""
        if key not in self._fields:
            self.place.report.problem(self.place.where, f'"{key}" is missing; write for example {example}')
        return self.read(key, parse, stand_in)


# Eight times as fast where PyYAML was built with libyaml; a site's file may hold thousands of keys.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def _compose(text: bytes | str, path: Path) -> yaml.Node:
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}: column {mark.column + 1}" if mark is not None else str(path)
        raise ConfigError([f"{place}: not valid YAML: {error.problem or error.context}"]) from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"{path}: not valid YAML: {reason}; save the file as UTF-8 text"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply to be a configuration"]) from None
    if root is None:
        raise ConfigError([f"{path}: is empty; docs/reference/configuration.md shows the smallest useful file"])
    return root


def _is_plain(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and not node.style


# --- Single values ------------------------------------------------------------------------------------------------

_YAML_OTHERS = re.compile(
    # What YAML 1.1 or 1.2 readers take for something else than text, although PyYAML takes it for text.
    r"[yYnN]|[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+|0o[0-7]+"
)
_TEXT_TAG = "tag:yaml.org,2002:str"
# Digits are bounded: Python refuses to read thousands of them, and no float holds hundreds.
_DURATION = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(ms|s|m|h|d|w)")
_DURATION_SECONDS = {"ms": Fraction(1, 1000), "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(B|KiB|MiB|GiB)?")
_SIZE_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DECIMAL = re.compile(r"\d{1,15}(\.\d{1,100})?")
_SHARE = re.compile(r"\d{1,15}(\.\d{1,100})?|\d{1,100}\s*/\s*\d{1,100}")
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENVIRONMENT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _name(place: _Place, what: str, longest: int = 128) -> str:
    """A name that people choose: what they wrote must be what every YAML reader reads."""
    text = place.text(f"the name of {what}")
    if _is_plain(place.node) and (place.node.tag != _TEXT_TAG or _YAML_OTHERS.fullmatch(text)):
        raise place.invalid(f'{text} is not text to every YAML reader; write "{text}" with the quotes')
    if not text or not text.isprintable() or text != text.strip() or len(text) > longest:
        raise place.invalid(
            f"the name of {what} must be 1 to {longest} printable characters without spaces around them, "
            f"found {text[:80]!r}"
        )
    return text


def _team_name(place: _Place) -> str:
    return _name(place, "a team")


def _model_name(place: _Place) -> str:
    return _name(place, "a model", 256)


def _pool_name(place: _Place) -> str:
    text = _name(place, "a pool")
    if not _POOL_NAME.fullmatch(text):
        # It is sent in the header x-fairshare-pool.
        raise place.invalid(f'the name of a pool must be at most 64 of A-Z a-z 0-9 . _ -, found "{text[:80]}"')
    return text


def _integer(place: _Place, lowest: int) -> int:
    text = place.text(f"a whole number of at least {lowest}")
    if text.isascii() and text.isdigit() and len(text) > 1 and text[0] == "0":
        raise place.invalid(
            f'must be written without a zero in front, found "{text}", which YAML 1.1 reads as an octal number'
        )
    if text.isascii() and text.isdigit() and len(text) > 15:
        raise place.invalid(f'must be a whole number from {lowest} to {10**15 - 1}, found "{text[:80]}"')
    if not text.isascii() or not text.isdigit() or int(text) < lowest:
        raise place.invalid(f'must be a whole number of at least {lowest}, written with digits only, found "{text}"')
    return int(text)


def _positive(place: _Place) -> int:
    return _integer(place, 1)


def _natural(place: _Place) -> int:
    return _integer(place, 0)


def _decimal(place: _Place) -> float:
    text = place.text("a number, for example 0.1")
    if not text.isascii() or not _DECIMAL.fullmatch(text):
        raise place.invalid(f'must be a number of at least 0, written as 2 or 0.1, found "{text}"')
    return float(text)


def _part(place: _Place) -> float:
    value = _decimal(place)
    if value > 1:
        raise place.invalid(f"must be between 0 and 1 (0.1 is 10 %), found {place.found()}")
    return value


def _share(place: _Place) -> Fraction:
    text = place.text("a share, for example 26/32 or 0.5")
    if text.isascii() and _SHARE.fullmatch(text):
        try:
            share = Fraction(text.replace(" ", ""))
        except ZeroDivisionError:
            share = Fraction(-1)
        if 0 <= share <= 1 + _SHARE_SUM_TOLERANCE:
            return share
    raise place.invalid(f'must be a share between 0 and 1, written as 26/32 or 0.5, found "{text}"')


def _duration(place: _Place) -> float:
    text = place.text("a duration, for example 30s")
    match = _DURATION.fullmatch(text) if text.isascii() else None
    if match is None:
        raise place.invalid(f'must be a duration, written as 250ms, 30s, 5m, 1h or 7d, found "{text}"')
    return float(Fraction(match[1]) * _DURATION_SECONDS[match[2]])


def _positive_duration(place: _Place) -> float:
    seconds = _duration(place)
    if seconds <= 0:
        raise place.invalid(f"must be longer than 0, found {place.found()}")
    return seconds


def _half_life(place: _Place) -> float:
    if place.text("a duration, for example 7d; 0: usage never decays") == "0":
        return 0.0
    return _duration(place)


def _size(place: _Place) -> int:
    text = place.text("a size, for example 64MiB")
    match = _SIZE.fullmatch(text) if text.isascii() else None
    size = int(Fraction(match[1]) * _SIZE_BYTES[match[2]]) if match is not None else 0
    if size < 1:
        raise place.invalid(f'must be a size, written as 65536, 64KiB, 64MiB or 1GiB, found "{text}"')
    return size


def _truth(place: _Place) -> bool:
    text = place.text("true or false")
    if text not in {"true", "false"}:
        raise place.invalid(f'must be true or false, found "{text}"')
    return text == "true"


def _choice(place: _Place, options: type[E]) -> E:
    choices = " or ".join(options)
    text = place.text(choices)
    try:
        return options(text)
    except ValueError:
        raise place.invalid(f'must be {choices}, found "{text}"') from None


def _service_class(place: _Place) -> ServiceClass:
    names = {each.name.lower(): each for each in ServiceClass}
    text = place.text("interactive or batch")
    if text not in names:
        raise place.invalid(f'must be interactive or batch, found "{text}"')
    return names[text]


def _address(place: _Place) -> Address:
    what = "host:port, for example 127.0.0.1:8080 (0.0.0.0:8080: every network of this machine)"
    return _parsed_address(place, place.text(what), what)


def _parsed_address(place: _Place, text: str, what: str) -> Address:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):(\d{1,5})", text)
    if match is None or not match[2].isascii() or int(match[2]) > 65535:
        raise place.invalid(f'must be {what}, found "{text}"')
    return Address(match[1].strip("[]"), int(match[2]))


def _url(place: _Place) -> str:
    text = place.text(engine_url_form)
    try:
        return engine_url(text)
    except ValueError as error:
        raise place.invalid(str(error)) from None


def _sha256(place: _Place) -> bytes:
    text = place.text("64 hex digits, as `fairshare keys new` prints them")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        # Someone may have pasted the key itself: never repeat it.
        raise place.invalid(
            f"must be the key's SHA-256 as 64 hex digits, found {len(text)} characters; "
            "`fairshare keys new` prints what to store"
        )
    return bytes.fromhex(text)


def _text(place: _Place) -> str:
    return _name(place, "a unit", 32)


# --- Secrets ------------------------------------------------------------------------------------------------------


def _secret(fields: _Fields, inline: str, from_file: str) -> str | None:
    """A secret from a file or an environment variable; its value is in no message."""
    if inline in fields and from_file in fields:
        fields.place.report.problem(fields.where(inline), f'give either "{inline}" or "{from_file}", not both')
    return fields.read(inline, _secret_from_environment, None) or fields.read(from_file, _secret_from_file, None)


def _secret_from_environment(place: _Place) -> str | None:
    text = place.text("the name of an environment variable, written as ${NAME}")
    match = _ENVIRONMENT.fullmatch(text)
    if match is None:
        raise place.invalid("must not stand in this file; write ${NAME} and set that variable, or name a file")
    value = place.report.environ.get(match[1], "")
    return _checked_secret(place, value, f"the environment variable {match[1]}")


def _secret_from_file(place: _Place) -> str | None:
    path = place.report.path.parent / place.text("the path of a file")
    try:
        value = path.read_text("utf-8")
        _warn_of_mode(place, path)
    except OSError as error:
        raise place.invalid(f"{path} cannot be read ({_reason(error)})") from None
    except UnicodeDecodeError:
        raise place.invalid(f"{path} is not text; it must hold the secret and nothing else") from None
    except ValueError:  # a zero byte
        raise place.invalid(f"{str(path)!r} is no path of a file") from None
    return _checked_secret(place, value.strip(), str(path))


def _warn_of_mode(place: _Place, path: Path) -> None:
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        place.report.warning(
            place.where, f"{path} can be used by others (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}"
        )


def _checked_secret(place: _Place, value: str, source: str) -> str:
    if not value:
        raise place.invalid(f"{source} is empty or not set; it must hold the secret")
    # It is sent in a header: a line break would start another one.
    if not value.isascii() or not value.isprintable() or " " in value:
        raise place.invalid(f"{source} must hold one word of printable ASCII characters and nothing else")
    return value


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


# --- Sections -----------------------------------------------------------------------------------------------------


def _gateway(place: _Place) -> GatewaySpec:
    try:
        fields = place.fields("")
    except _Invalid:
        raise ConfigError(place.report.problems) from None
    store = fields.read("store", _store, StoreSpec(address=SqliteFile(place.report.path.parent / DEFAULT_STORE)))
    replicas = fields.read("replicas", _replicas, None)
    if replicas is not None and store is None:
        place.report.problem(
            fields.where("replicas"),
            "needs a store, where the replicas agree which of them decides; write store: postgresql://USER@HOST/DATABASE",
        )
    return GatewaySpec(
        listen=fields.read("listen", _address, DEFAULT_LISTEN),
        tls=fields.read("tls", _tls, None),
        admin=fields.read("admin", _admin, AdminSpec(address=DEFAULT_ADMIN)),
        pools=fields.need("pools", _pools, (), "pools: [{name: chat, capacity: 16, ...}]"),
        teams=fields.read("teams", _teams, ()),
        limits=fields.read("limits", _limits, Limits()),
        store=store,
        notify=fields.read("notify", _notify, None),
        replicas=replicas,
        access_log=fields.read("access_log", _access_log, None),
        tracing=fields.read("tracing", _tracing, None),
    )


def _tls(place: _Place) -> TlsSpec:
    return _certificate(place, place.fields("tls"))


def _certificate(place: _Place, fields: _Fields) -> TlsSpec:
    certificate = fields.need("certificate", _file, None, "certificate: tls/cert.pem")
    key = fields.need("key", _file, None, "key: tls/key.pem")
    if certificate is None or key is None:
        raise _Invalid
    _warn_of_mode(place, key)
    spec = TlsSpec(certificate=certificate, key=key)
    try:
        expires = expires_at(spec)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise place.invalid(f"{key} is not the key of {certificate}; name the two that belong together") from None
        raise place.invalid(
            f"{certificate} and {key} are no certificate and key in PEM, or the key needs a password ({error.reason})"
        ) from None
    except OSError as error:
        raise place.invalid(f"{error.filename or certificate} cannot be read ({_reason(error)})") from None
    if expires is None:
        place.report.warning(place.where, f"{certificate} has expired, or is not valid yet; renew it and send SIGHUP")
        return spec
    days = (expires - clock.wall()) / 86400.0
    if days < WARN_OF_EXPIRY_DAYS:
        place.report.warning(place.where, f"{certificate} expires in {days:.0f} days; renew it and send SIGHUP")
    return spec


def _file(place: _Place) -> Path:
    path = place.report.path.parent / place.text("the path of a file")
    if not path.is_file():
        raise place.invalid(f"{path} is not there, or is no file")
    return path


def _ca_file(place: _Place) -> Path:
    path = _file(place)
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise place.invalid(f"{path} holds no certificate in PEM ({error.reason})") from None
    except OSError as error:
        raise place.invalid(f"{path} cannot be read ({_reason(error)})") from None
    return path


def _admin(place: _Place) -> AdminSpec:
    if not place.is_mapping():
        return AdminSpec(address=_address(place))
    fields = place.fields("admin")
    return AdminSpec(address=fields.read("listen", _address, DEFAULT_ADMIN), key=_secret(fields, "key", "key_file"))


def _limits(place: _Place) -> Limits:
    fields = place.fields("limits")
    default = Limits()
    return Limits(
        max_body_bytes=fields.read("max_body", _size, default.max_body_bytes),
        max_header_bytes=fields.read("max_header", _size, default.max_header_bytes),
        header_timeout_seconds=fields.read("header_timeout", _positive_duration, default.header_timeout_seconds),
        max_connections=fields.read("max_connections", _positive, default.max_connections),
        drain_seconds=fields.read("drain", _duration, default.drain_seconds),
    )


def _store(place: _Place) -> StoreSpec | None:
    if not place.is_mapping():
        address = _store_address(place)
        return None if address is None else StoreSpec(address=address)
    fields = place.fields("store")
    default = SqliteFile(place.report.path.parent / DEFAULT_STORE)
    address = fields.read("url", _store_address, default)
    password = _secret(fields, "password", "password_file")
    if address is None:
        raise place.invalid('the url "none" keeps nothing, so nothing else belongs here; write store: none')
    if password is not None:
        if isinstance(address, SqliteFile):
            raise place.invalid("a SQLite file has no password; remove it, or give the url of a PostgreSQL server")
        address = replace(address, password=password)
    return StoreSpec(address=address, keep_seconds=fields.read("keep", _kept, StoreSpec(address=default).keep_seconds))


def _kept(place: _Place) -> float:
    seconds = _duration(place)
    if seconds < SHORTEST_KEEP_SECONDS:
        raise place.invalid(
            f"must be at least 32d, because budgets of a month are counted from its records, found {place.found()}"
        )
    return seconds


def _notify(place: _Place) -> WebhookSpec | None:
    fields = place.fields("notify")
    secret = _secret(fields, "secret", "secret_file")
    if secret is None and "secret" not in fields and "secret_file" not in fields:
        place.report.problem(place.where, 'needs a secret to sign with; write for example "secret_file: notify.key"')
    return WebhookSpec(
        url=fields.need(
            "url",
            partial(_http_url, example="https://alerts.example.org/fairshare"),
            "",
            "url: https://alerts.example.org/fairshare",
        ),
        secret=secret or "",
        allow_internal=fields.read("allow_internal", _truth, False),
    )


def _access_log(place: _Place) -> AccessLogSpec | None:
    match place.text('the path of a file, "stderr" or "none"'):
        case "none":
            return None
        case "stderr":
            return AccessLogSpec(path=None)
        case text:
            path = place.report.path.parent / text
            if path.is_dir() or not path.parent.is_dir():
                raise place.invalid(f"{path} is no file in a folder that is there; make the folder, or name another")
            return AccessLogSpec(path=path)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it is in is not there either
        return False


def _tracing(place: _Place) -> TracingSpec:
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        place.report.problem(place.where, "needs OpenTelemetry, which is not installed; pip install 'fairshare[otel]'")
    fields = place.fields("tracing")
    example = "http://127.0.0.1:4318/v1/traces"
    return TracingSpec(
        endpoint=fields.need("endpoint", partial(_http_url, example=example), "", f"endpoint: {example}"),
        sample=fields.read("sample", _part, 1.0),
    )


def _replicas(place: _Place) -> ReplicasSpec:
    fields = place.fields("replicas")
    secret = _secret(fields, "secret", "secret_file")
    given = [key for key in ("secret", "secret_file") if key in fields]
    if not given:
        place.report.problem(
            place.where,
            "needs a secret by which the replicas know each other; write secret_file: FILE, and make the file with: "
            "openssl rand -hex 32",
        )
    elif secret is not None and len(secret) < SHORTEST_PEER_SECRET:
        place.report.problem(
            fields.where(given[0]),
            f"must have at least {SHORTEST_PEER_SECRET} characters, or it can be guessed; make one with: "
            "openssl rand -hex 32",
        )
    return ReplicasSpec(
        listen=fields.need("listen", _address, DEFAULT_LISTEN, "listen: 10.0.0.1:7000"),
        advertise=fields.read("advertise", _advertised, None),
        secret=(secret or "").encode(),
        machines=fields.read("machines", _positive, 2),
        tls=fields.read("tls", _peer_tls, None),
    )


def _peer_tls(place: _Place) -> PeerTlsSpec:
    fields = place.fields("replicas.tls")
    ca = fields.need("ca", _ca_file, None, "ca: tls/ca.pem")
    shown = _certificate(place, fields)
    if ca is None:
        raise _Invalid
    return PeerTlsSpec(certificate=shown.certificate, key=shown.key, ca=ca)


def _advertised(place: _Place) -> str:
    """Where peers find this replica. The host may be an environment variable: pods know their address only there."""
    what = "host:port or ${NAME}:port, for example gateway-1.internal:7000"
    text = place.text(what)
    host, _, port = text.rpartition(":")
    if (variable := _ENVIRONMENT.fullmatch(host)) is not None:
        value = place.report.environ.get(variable[1], "")
        if not value:
            raise place.invalid(f"needs the environment variable {variable[1]}, which is not set")
        text = f"[{value}]:{port}" if ":" in value else f"{value}:{port}"
    address = _parsed_address(place, text, what)
    if address.port == 0 or address.host in ("0.0.0.0", "::"):
        raise place.invalid(f"must be an address that peers can reach, as host:port; found {address}")
    return str(address)


def _http_url(place: _Place, *, example: str) -> str:
    what = f"an address such as {example}"
    text = place.text(what)
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    else:
        valid = valid and text.isascii() and text.isprintable() and " " not in text and "@" not in parts.netloc
    if not valid:
        raise place.invalid(f"must be {what}, without a user and password")  # it may hold one, so it is not repeated
    return text


def _store_address(place: _Place) -> StoreAddress | None:
    what = "sqlite:PATH, postgresql://USER@HOST:PORT/DATABASE or none"
    text = place.text(what)
    if text == "none":
        return None
    scheme, _, rest = text.partition(":")
    if scheme == "sqlite" and rest and text.isprintable():
        return SqliteFile(place.report.path.parent / rest)
    if scheme not in {"postgresql", "postgres"}:
        raise place.invalid(f"must be {what}, found {place.found()}" if "@" not in text else f"must be {what}")
    try:
        parts = urlsplit(text)
        port = parts.port
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise place.invalid(f"must be {what}") from None  # it may hold a password, so it is not repeated
    if parts.password is not None:
        raise place.invalid(
            "must not hold a password; write store: {url: postgresql://..., password_file: FILE}, or password: ${NAME}"
        )
    host = query.pop("host", [parts.hostname or ""])[0]
    database = unquote(parts.path.strip("/"))
    if not parts.username or not host or not database or query or parts.fragment:
        raise place.invalid(f"must be {what}; the folder of a Unix socket is written as ?host=/run/postgresql")
    return PostgresServer(host=host, port=port or 5432, database=database, user=unquote(parts.username))


def _pools(place: _Place) -> tuple[PoolSpec, ...]:
    pools = _each(place, _pool, "pools")
    if not place.node.value:
        raise place.invalid("there must be at least one pool, found an empty list")
    return pools


def _pool(place: _Place) -> PoolSpec:
    fields = place.fields("pools[]")
    per_instance = fields.read("capacity_per_instance", _positive, None)
    instances, sources = fields.need("instances", _instances, ((), ()), "instances: [http://127.0.0.1:8000]")
    return PoolSpec(
        name=fields.need("name", _pool_name, "", "name: chat"),
        capacity=_capacity(fields, per_instance, len(instances), bool(sources)),
        capacity_per_instance=per_instance,
        sources=sources,
        half_life_seconds=fields.read("half_life", _half_life, DEFAULT_HALF_LIFE_SECONDS),
        shares=fields.need("shares", _shares, {}, "shares: {search: 26/32, ads: 6/32}"),
        models=fields.need("models", _models, {}, "models: [the-model]"),
        instances=instances,
        mode=fields.read("dispatch", lambda at: _choice(at, Mode), Mode.HOLD),
        level=fields.read("level", lambda at: _choice(at, Level), Level.TEAM),
        balance=fields.read("balance", lambda at: _choice(at, Balance), Balance.PREFIX),
        token_estimates=fields.read("token_estimates", lambda at: _choice(at, TokenEstimates), TokenEstimates.BYTES),
        prefix_secret=_prefix_secret(fields),
        fallback=fields.read("fallback", _pool_name, None),
        hold=fields.read("hold", _hold, HoldOptions()),
        trim=fields.read("trim", _truth, False),
        timeouts=fields.read("timeouts", _timeouts, Timeouts()),
        cost=fields.read("cost", _cost, CostWeights()),
        calibrated="cost" in fields,
    )


def _prefix_secret(fields: _Fields) -> bytes | None:
    isolated = fields.read("isolate_prefixes", lambda at: _choice(at, Isolation), Isolation.NONE) is Isolation.TEAM
    secret = _secret(fields, "prefix_secret", "prefix_secret_file")
    given = [key for key in ("prefix_secret", "prefix_secret_file") if key in fields]
    if isolated and not given:
        fields.place.report.problem(
            fields.where("isolate_prefixes"),
            "needs a secret that the teams do not know, the same on every replica; write prefix_secret_file: FILE, and "
            "make the file with: openssl rand -hex 32",
        )
    elif given and not isolated:
        fields.place.report.problem(fields.where(given[0]), "is of no use without isolate_prefixes: team")
    elif secret is not None and len(secret) < SHORTEST_PREFIX_SECRET:
        fields.place.report.problem(
            fields.where(given[0]),
            f"must have at least {SHORTEST_PREFIX_SECRET} characters, or it can be guessed; make one with: "
            "openssl rand -hex 32",
        )
    return secret.encode() if secret is not None and isolated else None


def _embedded(place: _Place) -> EmbeddedSpec:
    fields = place.fields("fairshare_settings")
    return EmbeddedSpec(
        pools=fields.need(
            "pools", lambda at: _each(at, _embedded_pool, "pools"), (), "pools: [{name: chat, capacity: 16, ...}]"
        ),
        team_from=fields.read("team_from", lambda at: _choice(at, TeamFrom), TeamFrom.TEAM_ALIAS),
    )


def _embedded_pool(place: _Place) -> EmbeddedPool:
    fields = place.fields("fairshare_settings.pools[]")
    return EmbeddedPool(
        name=fields.need("name", _pool_name, "", "name: chat"),
        capacity=fields.need("capacity", _positive, 1, "capacity: 16 (slots that this process may use)"),
        shares=fields.need("shares", _shares, {}, "shares: {search: 26/32, ads: 6/32}"),
        models=fields.need("models", lambda at: _each(at, _model_name, "models"), (), "models: [the-model]"),
        half_life_seconds=fields.read("half_life", _half_life, DEFAULT_HALF_LIFE_SECONDS),
        mode=fields.read("dispatch", lambda at: _choice(at, Mode), Mode.HOLD),
        hold=fields.read("hold", _embedded_hold, HoldOptions()),
        cost=fields.read("cost", _cost, CostWeights()),
        longest_request_seconds=fields.read("longest_request", _positive_duration, Timeouts().longest_request_seconds),
    )


def _embedded_hold(place: _Place) -> HoldOptions:
    fields = place.fields("fairshare_settings.pools[].hold")
    default = HoldOptions()
    return replace(
        default,
        borrow_order=fields.read("borrow_order", lambda at: _choice(at, BorrowOrder), default.borrow_order),
        batch_every=fields.read("batch_every", _natural, default.batch_every),
        max_held=fields.read("max_held", _natural, default.max_held),
        max_held_per_team=fields.read("max_held_per_team", _natural, default.max_held_per_team),
        longest_wait_seconds=fields.read("longest_wait", _positive_duration, default.longest_wait_seconds),
    )


def _capacity(fields: _Fields, per_instance: int | None, instances: int, has_sources: bool) -> int:
    if "capacity" in fields and "capacity_per_instance" in fields:
        fields.place.report.problem(
            fields.place.where, 'give either "capacity" or "capacity_per_instance", found both; remove one'
        )
    elif "capacity" in fields and has_sources:
        fields.place.report.problem(
            fields.where("capacity"),
            "the instances of this pool come and go, so what it sustains follows from their number; write "
            "capacity_per_instance instead, the slots that one of them sustains",
        )
    if "capacity_per_instance" in fields:
        return (per_instance or 1) * instances
    if has_sources and "capacity" not in fields:
        return fields.need("capacity_per_instance", _positive, 1, "capacity_per_instance: 16 (slots that one sustains)")
    return fields.need("capacity", _positive, 1, "capacity: 16 (slots the pool sustains)")


def _shares(place: _Place) -> dict[str, Fraction]:
    shares: dict[str, Fraction] = {}
    for key, value in place.entries("a mapping of teams to shares, for example {search: 26/32, ads: 6/32}"):
        try:
            shares[_team_name(key)] = _share(value)
        except _Invalid:
            continue
    total = sum(shares.values())
    if total > 1 + _SHARE_SUM_TOLERANCE:
        raise place.invalid(
            f"the shares add up to {_fraction(Fraction(total))}, more than the whole pool; lower one of them "
            f"({', '.join(f'{team} {_fraction(share)}' for team, share in shares.items())})"
        )
    if shares and total < 1 - _SHARE_SUM_TOLERANCE:
        place.report.warning(
            place.where,
            f"the shares add up to {_fraction(Fraction(total))}; nobody owns the rest, it can only be borrowed",
        )
    return shares


def _fraction(share: Fraction) -> str:
    return str(share) if share.denominator == 1 else f"{share} ({float(share):.6g})"


def _models(place: _Place) -> dict[str, str]:
    if place.is_mapping():
        pairs = [(key, value) for key, value in place.entries("a list or mapping of models")]
    else:
        pairs = [(item, item) for item in place.items("models, or a mapping {name for clients: name at the engine}")]
    models: dict[str, str] = {}
    for key, value in pairs:
        try:
            name, served = _model_name(key), _model_name(value)
        except _Invalid:
            continue
        if name in models:
            place.report.problem(key.where, f'model "{name}" stands twice; remove one')
        models[name] = served
    if not pairs:
        raise place.invalid("there must be at least one model")
    return models


def _instances(place: _Place) -> tuple[tuple[InstanceSpec, ...], tuple[InstanceSource, ...]]:
    """Those that are named one by one, and where others come from."""
    entries = _each(place, _instance_or_source, "engines, for example [http://127.0.0.1:8000]")
    if not place.node.value:
        raise place.invalid("there must be at least one engine, found an empty list")
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries):
        name = entry.url if isinstance(entry, InstanceSpec) else str(entry)
        if name and name in seen:
            place.report.problem(
                f"{place.where}[{index}]",
                f"{name} is also {place.where}[{seen[name]}]; remove one, or its slots count twice",
            )
        seen.setdefault(name, index)
    return (
        tuple(entry for entry in entries if isinstance(entry, InstanceSpec)),
        tuple(entry for entry in entries if not isinstance(entry, InstanceSpec)),
    )


_WAYS = ("url", "dns", "srv", "file", "kubernetes")
"""How an entry of `instances` says where its engines are."""


def _instance_or_source(place: _Place) -> InstanceSpec | InstanceSource:
    if not place.is_mapping():
        return InstanceSpec(url=_url(place))
    fields = place.fields("pools[].instances[]")
    ways = [way for way in _WAYS if way in fields]
    if len(ways) > 1:
        raise place.invalid(f"give one of {', '.join(_WAYS)}, found {' and '.join(ways)}; write two entries")
    if "scheme" in fields and ways != ["srv"]:
        place.report.problem(fields.where("scheme"), "belongs to srv only; everywhere else the address says it")
    url = "" if ways and ways != ["url"] else fields.need("url", _url, "", "url: http://127.0.0.1:8000")
    scheme = fields.read("scheme", _scheme, "http")
    if "ca_file" in fields and (url.startswith("http:") or (ways == ["srv"] and scheme == "http")):
        found = url or "scheme: http"
        place.report.problem(fields.where("ca_file"), f"{found} is not encrypted; write https or leave ca_file out")
    kind = fields.read("kind", lambda at: _choice(at, EngineKind), EngineKind.VLLM)
    for key in ("low_values_first", "preemption_threshold"):
        if key in fields and kind is not EngineKind.SGLANG:
            place.report.problem(fields.where(key), "belongs to SGLang; write kind: sglang or leave it out")
    engine = InstanceSpec(
        url=url,
        max_num_seqs=fields.read("max_num_seqs", _positive, None),
        api_key=_secret(fields, "api_key", "api_key_file"),
        ca_file=fields.read("ca_file", _ca_file, None),
        kind=kind,
        sglang=SglangFlags(
            low_values_first=fields.read("low_values_first", _truth, False),
            preemption_threshold=fields.read("preemption_threshold", _natural, DEFAULT_THRESHOLD),
        ),
    )
    match ways:
        case ["dns"]:
            return DnsSource(url=fields.read("dns", _dns_url, ""), template=engine)
        case ["srv"]:
            return SrvSource(name=fields.read("srv", _srv_name, ""), scheme=scheme, template=engine)
        case ["file"]:
            source = FileSource(path=fields.read("file", _beside, Path()), template=engine)
            _try_instances_file(fields.where("file"), source, place.report)
            return source
        case ["kubernetes"]:
            return fields.read("kubernetes", lambda at: _kubernetes(at, engine), _NO_SERVICE)
        case _:
            return engine


def _scheme(place: _Place) -> str:
    text = place.text("http or https")
    if text not in {"http", "https"}:
        raise place.invalid(f'must be http or https, found "{text}"')
    return text


def _dns_url(place: _Place) -> str:
    url = _url(place)
    host = urlsplit(url).hostname or ""
    if url.startswith("https:"):
        # What DNS names are addresses, and a certificate is for a name.
        raise place.invalid("must be http: the addresses of a name have no certificates; write srv or file for https")
    if _is_address(host):
        raise place.invalid(f"must hold a name that is looked up, found the address {host}; write url instead")
    return url


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_SRV_NAME = re.compile(r"_[A-Za-z0-9-]{1,62}\._(tcp|udp)(\.[A-Za-z0-9_-]{1,63})+\.?")
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NO_SERVICE = KubernetesSource(service="", namespace=None, port=None, template=InstanceSpec(url=""))
"""Stands in where the service is wrong, which was reported."""


def _srv_name(place: _Place) -> str:
    text = place.text("an SRV name, for example _vllm._tcp.engines.example.com")
    if len(text) > 253 or not _SRV_NAME.fullmatch(text):
        raise place.invalid(f'must be an SRV name as _vllm._tcp.engines.example.com, found "{text}"')
    return text


def _beside(place: _Place) -> Path:
    text = place.text("the path of a file")
    if "\0" in text:
        raise place.invalid(f"{text!r} is no path of a file")
    return place.report.path.parent / text


def _kubernetes(place: _Place, engine: InstanceSpec) -> KubernetesSource:
    if find_spec("lightkube") is None:
        place.report.problem(place.where, "needs a client that is not installed; pip install 'fairshare[kubernetes]'")
    fields = place.fields("pools[].instances[].kubernetes")
    return KubernetesSource(
        service=fields.need("service", _kubernetes_name, "", "service: vllm"),
        namespace=fields.read("namespace", _kubernetes_name, None),
        port=fields.read("port", _service_port, None),
        template=engine,
    )


def _kubernetes_name(place: _Place) -> str:
    text = place.text("a name in Kubernetes, for example vllm")
    if not _KUBERNETES_NAME.fullmatch(text):
        raise place.invalid(f'must be a name in Kubernetes (a-z 0-9 -, at most 63 of them), found "{text}"')
    return text


def _service_port(place: _Place) -> str:
    text = place.text("a port's name or number, for example http or 8000")
    if not _KUBERNETES_NAME.fullmatch(text) or (text.isdigit() and not 1 <= int(text) <= 65535):
        raise place.invalid(f'must be the name or the number of a port, found "{text}"')
    return text


def instances_in(text: bytes, source: FileSource) -> tuple[InstanceSpec, ...]:
    """The instances that a file lists, which a pool follows. Raises `ConfigError`."""
    report = _Report(path=source.path, environ={})
    place = _Place(_compose(text, source.path), "", report)
    instances: tuple[InstanceSpec, ...] = ()
    with contextlib.suppress(_Invalid):
        instances = _each(place, lambda at: _listed(at, source.template), "engines")
    urls = [instance.url for instance in instances]
    for twice in sorted(url for url, times in Counter(urls).items() if url and times > 1):
        report.problem("", f"{twice} stands twice; remove one, or its slots count twice")
    if report.problems:
        raise ConfigError(report.problems)
    return instances


def _listed(place: _Place, template: InstanceSpec) -> InstanceSpec:
    if not place.is_mapping():
        return replace(template, url=_url(place))
    fields = place.fields("instances_file[]")
    return replace(
        template,
        url=fields.need("url", _url, "", "url: http://127.0.0.1:8000"),
        max_num_seqs=fields.read("max_num_seqs", _positive, template.max_num_seqs),
    )


def _try_instances_file(where: str, source: FileSource, report: _Report) -> None:
    """A file that may change at any time must not keep a gateway from starting, so this only warns."""
    try:
        instances_in(source.path.read_bytes(), source)
    except OSError as error:
        report.warning(where, f"{source.path} cannot be read now ({_reason(error)}), so no instance comes from it yet")
    except ConfigError as error:
        for problem in error.problems:
            report.warning(where, f"no instance comes from it yet: {problem}")


def _hold(place: _Place) -> HoldOptions:
    fields = place.fields("pools[].hold")
    default = HoldOptions()
    return replace(
        default,
        borrow_order=fields.read("borrow_order", lambda at: _choice(at, BorrowOrder), default.borrow_order),
        batch_every=fields.read("batch_every", _natural, default.batch_every),
        recall=fields.read("recall", _truth, default.recall),
        recall_waste=fields.read("recall_waste", _part, default.recall_waste),
        max_held=fields.read("max_held", _natural, default.max_held),
        max_held_per_team=fields.read("max_held_per_team", _natural, default.max_held_per_team),
        max_held_bytes=fields.read("max_held_bytes", _size, default.max_held_bytes),
        longest_wait_seconds=fields.read("longest_wait", _positive_duration, default.longest_wait_seconds),
    )


def _timeouts(place: _Place) -> Timeouts:
    fields = place.fields("pools[].timeouts")
    default = Timeouts()
    return Timeouts(
        connect_seconds=fields.read("connect", _positive_duration, default.connect_seconds),
        first_byte_seconds=fields.read("first_byte", _positive_duration, default.first_byte_seconds),
        idle_seconds=fields.read("idle", _positive_duration, default.idle_seconds),
        longest_request_seconds=fields.read("longest_request", _positive_duration, default.longest_request_seconds),
    )


def _cost(place: _Place) -> CostWeights:
    fields = place.fields("pools[].cost")
    default = CostWeights()
    return CostWeights(
        prompt=fields.read("prompt", _decimal, default.prompt),
        cached=fields.read("cached", _decimal, default.cached),
        completion=fields.read("completion", _decimal, default.completion),
        unit=fields.read("unit", _text, default.unit),
    )


def _teams(place: _Place) -> tuple[TeamSpec, ...]:
    return _each(place, _team, "teams")


def _team(place: _Place) -> TeamSpec:
    fields = place.fields("teams[]")
    return TeamSpec(
        name=fields.need("name", _team_name, "", "name: search"),
        keys=fields.read("keys", lambda at: _each(at, _key, "keys"), ()),
        models=fields.read("models", _allowed_models, None),
    )


def _allowed_models(place: _Place) -> frozenset[str]:
    return frozenset(_each(place, _model_name, "models"))


def _key(place: _Place) -> KeySpec:
    fields = place.fields("teams[].keys[]")
    return KeySpec(
        sha256=fields.need("sha256", _sha256, b"", "sha256: what `fairshare keys new` prints"),
        service_class=fields.read("class", _service_class, ServiceClass.INTERACTIVE),
    )


def _each(place: _Place, parse: Callable[[_Place], T], what: str) -> tuple[T, ...]:
    """Every entry of a list; wrong ones are reported and left out."""
    entries: list[T] = []
    for item in place.items(what):
        try:
            entries.append(parse(item))
        except _Invalid:
            continue
    return tuple(entries)


# --- What must hold between the sections --------------------------------------------------------------------------


def _cross_check(spec: GatewaySpec, report: _Report) -> None:
    """Runs only on a file without other problems, so that positions in the file and in the records agree."""
    _check_admin(spec, report)
    _check_pool_names_and_models(spec, report)
    _check_fallbacks(spec, report)
    _check_engines(spec, report)
    _check_teams(spec, report)


def _check_admin(spec: GatewaySpec, report: _Report) -> None:
    admin = spec.admin
    if not is_loopback(admin.address.host) and admin.key is None:
        report.problem(
            "admin",
            f"{admin.address} can be reached from other machines, so it needs a key; write "
            f"admin: {{listen: {admin.address}, key_file: admin.key}}, or listen on 127.0.0.1",
        )
    if admin.address == spec.listen and admin.address.port != 0:
        report.problem("admin", f"{admin.address} is also the data port (listen); give it another port")


def _check_pool_names_and_models(spec: GatewaySpec, report: _Report) -> None:
    pool_at: dict[str, int] = {}
    model_at: dict[str, int] = {}
    for index, pool in enumerate(spec.pools):
        if pool.name in pool_at:
            report.problem(
                f"pools[{index}].name", f'"{pool.name}" is also the name of pools[{pool_at[pool.name]}]; rename one'
            )
        pool_at.setdefault(pool.name, index)
        for model in pool.models:
            if model in model_at:
                report.problem(
                    f"pools[{index}].models",
                    f'model "{model}" is also served by pools[{model_at[model]}], so where its requests belong is '
                    "unclear; give it another name here, as {other-name: " + pool.models[model] + "}",
                )
            model_at.setdefault(model, index)
    for index, team in enumerate(spec.teams):
        for model in sorted(team.models or ()):
            if model not in model_at:
                report.problem(
                    f"teams[{index}].models", f'no pool serves the model "{model}"{_nearest(model, model_at)}'
                )


def _check_fallbacks(spec: GatewaySpec, report: _Report) -> None:
    pools = {pool.name: pool for pool in spec.pools}
    for index, pool in enumerate(spec.pools):
        if pool.fallback is None:
            continue
        where = f"pools[{index}].fallback"
        if pool.fallback not in pools:
            report.problem(where, f'there is no pool "{pool.fallback}"{_nearest(pool.fallback, pools)}')
            continue
        path = [pool.name, pool.fallback]
        while path[-1] not in path[:-1] and (follow := pools[path[-1]].fallback) in pools:
            path.append(follow)
        if path[-1] == pool.name:
            report.problem(where, f"the fallbacks go round in a circle ({' → '.join(path)}); remove one of them")
            continue
        if pools[pool.fallback].mode is Mode.OBSERVE:
            report.problem(
                where, f'"{pool.fallback}" dispatches as observe, so it cannot keep guests in their place; use hold'
            )
        if pool.mode is Mode.OBSERVE:
            report.warning(where, "a pool that dispatches as observe does not use its fallback")
        missing = set(pool.models.values()) - set(pools[pool.fallback].models.values())
        if missing:
            report.problem(
                where,
                f'the engines of "{pool.fallback}" do not serve {", ".join(sorted(missing))}; a fallback must serve '
                "the same models as its pool, under whatever names for clients",
            )


def _check_engines(spec: GatewaySpec, report: _Report) -> None:
    engine_at: dict[str, int] = {}
    for index, pool in enumerate(spec.pools):
        for position, instance in enumerate(pool.instances):
            other = engine_at.setdefault(instance.url, index)
            if other != index:
                # Beside sources the positions in the file are others.
                report.warning(
                    f"pools[{index}].instances" + ("" if pool.sources else f"[{position}]"),
                    f'{instance.url} is also in pool "{spec.pools[other].name}"; neither knows what the other runs '
                    "there, so lower the capacity of both",
                )
        if pool.trim and pool.mode is not Mode.HOLD:
            report.problem(
                f"pools[{index}].trim",
                f"needs dispatch: hold, found {pool.mode}, in which the engines' own queues are where requests wait",
            )
        seats = [instance.max_num_seqs for instance in pool.instances]
        known = [each for each in seats if each is not None]
        if len(known) == len(seats) and sum(known) < pool.capacity:
            report.warning(
                f"pools[{index}].capacity",
                f"the engines run at most {sum(known)} sequences (max_num_seqs), but the capacity is {pool.capacity}; "
                "lower it, or raise --max-num-seqs of the engines (2 x their part of the capacity is best)",
            )


def _check_teams(spec: GatewaySpec, report: _Report) -> None:
    team_at: dict[str, int] = {}
    key_at: dict[bytes, str] = {}
    for index, team in enumerate(spec.teams):
        if team.name in team_at:
            report.problem(
                f"teams[{index}].name", f'"{team.name}" is also the name of teams[{team_at[team.name]}]; merge them'
            )
        team_at.setdefault(team.name, index)
        for position, key in enumerate(team.keys):
            where = f"teams[{index}].keys[{position}]"
            other = key_at.setdefault(key.sha256, where)
            if other != where:
                report.problem(where, f"this key is also {other}; a key speaks for one team, remove one")
    owners = {team for pool in spec.pools for team, share in pool.shares.items() if share > 0}
    # With a store, teams and keys may be there; whether they are, the configuration does not know.
    alone = spec.store is None
    for index, team in enumerate(spec.teams):
        if alone and not team.keys:
            report.warning(f"teams[{index}]", f'team "{team.name}" has no key, so nobody can use it')
        if team.name not in owners:
            near = _nearest(team.name, owners - set(team_at))
            report.warning(
                f"teams[{index}].name", f'team "{team.name}" owns no share of any pool; it only borrows{near}'
            )
    for index, pool in enumerate(spec.pools):
        for team in pool.shares:
            if alone and team not in team_at:
                report.warning(
                    f"pools[{index}].shares.{team}",
                    f'no key belongs to team "{team}": it is not under teams{_nearest(team, team_at)}',
                )
    if alone and not key_at:
        report.warning("teams", "there is no key, so every request will be refused; see `fairshare keys new --help`")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
