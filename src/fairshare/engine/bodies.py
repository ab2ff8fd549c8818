"""Request bodies as vLLM 0.32 reads them: what is accepted, what is refused, and with which words.

vLLM validates with pydantic in its lax mode and shows pydantic's errors as they are. The fields that a gateway or
its clients depend on are checked here by hand, with the same result; unknown fields are ignored, as there.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

_INT64 = (-(2**63), 2**63 - 1)
_REPORTED_ERRORS = 10
_SHOWN_CHARACTERS = 200
_LONGEST_SALT = 128

T = TypeVar("T")


class Refusal(Exception):
    """A request the engine answers with an error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class Unparsable(Exception):
    """A body that is not even text; the framework answers it."""


def bad_request(message: str, param: str | None = None, value: Any = None) -> Refusal:
    """What vLLM raises after the body as such was found valid."""
    if param is not None:
        shown = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
        message = f"{message} ({shown})"
    return Refusal(400, "BadRequestError", message, param)


def invalid(*errors: dict[str, Any] | str) -> Refusal:
    """pydantic's errors, in vLLM's form."""
    noun = "error" if len(errors) == 1 else "errors"
    message = f"{len(errors)} validation {noun}:\n" + "\n".join(f"  {error}" for error in errors[:_REPORTED_ERRORS])
    if len(errors) > _REPORTED_ERRORS:
        message += f"\n  ...and {len(errors) - _REPORTED_ERRORS} more {noun}"
    first = errors[0]
    return Refusal(400, "Bad Request", message, None if isinstance(first, str) else first["loc"])


def error(kind: str, loc: str, msg: str, found: Any, **context: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"type": kind, "loc": loc, "msg": msg, "input": _shown(found)}
    if context:
        described["ctx"] = context
    return described


def _shown(found: Any) -> str:
    if isinstance(found, list | dict):
        kind = "list" if isinstance(found, list) else "dict"
        return f"<{kind} of {len(cast('list[Any]', found))} items>"
    text = str(found)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...[truncated]"


def read_json(content_type: str, data: bytes) -> "Body":
    """The body of a JSON endpoint. Raises Refusal or Unparsable."""
    if content_type.lower().split(";", maxsplit=1)[0] != "application/json":
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    if not data:
        raise invalid(error("missing", "body", "Field required", None))
    try:
        found = json.loads(data)
    except json.JSONDecodeError as problem:
        raise invalid(
            error("json_invalid", f"body.{problem.pos}", "JSON decode error", {}, error=problem.msg)
        ) from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise Unparsable from None
    if not isinstance(found, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid(error("model_attributes_type", "body", message, found))
    return Body(cast("dict[str, Any]", found))


class Body:
    """A JSON object whose fields are read with pydantic's rules; `check` raises what was wrong with all of them."""

    def __init__(self, fields: Mapping[str, Any], loc: str = "body") -> None:
        self.fields = fields
        self.errors: list[dict[str, Any]] = []
        self._loc = loc

    def check(self) -> None:
        if self.errors:
            raise invalid(*self.errors)

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def missing(self, name: str) -> None:
        self.errors.append(error("missing", f"{self._loc}.{name}", "Field required", dict(self.fields)))

    def _read(self, name: str, default: T, nullable: bool, read: Callable[[Any, str], T | dict[str, Any]]) -> T:
        if name not in self.fields:
            return default
        found = self.fields[name]
        if found is None and nullable:
            return default
        result = read(found, f"{self._loc}.{name}")
        if isinstance(result, dict):
            self.errors.append(cast("dict[str, Any]", result))
            return default
        return result

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        nullable: bool = True,
        bounds: tuple[int, int] | None = None,
    ) -> int | None:
        return self._read(name, default, nullable, lambda found, loc: read_integer(found, loc, bounds))

    def number(self, name: str) -> float | None:
        return self._read(name, cast("float | None", None), True, _read_number)

    def flag(self, name: str, default: bool = False, *, nullable: bool = True) -> bool:
        return self._read(name, default, nullable, _read_flag)

    def string(self, name: str) -> str | None:
        return self._read(name, cast("str | None", None), True, _read_string)

    def priority(self) -> int:
        """An integer of 64 bits; null is an error."""
        return self.integer("priority", 0, nullable=False, bounds=_INT64) or 0

    def items(self, name: str) -> list[Any] | None:
        """A list; None if it is not there."""
        if name not in self.fields:
            return None
        found = self.fields[name]
        if not isinstance(found, list):
            self.errors.append(error("list_type", f"{self._loc}.{name}", "Input should be a valid list", found))
            return None
        return cast("list[Any]", found)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        found = self.fields.get(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            self.errors.append(error("model_attributes_type", f"{self._loc}.{name}", message, found))
            return None
        return cast("dict[str, Any]", found)

    def strings(self, name: str) -> list[str]:
        """A string or a list of strings (`stop`)."""
        found = self.fields.get(name)
        if found is None:
            return []
        if isinstance(found, str):
            return [found] if found else []
        if isinstance(found, list) and all(isinstance(item, str) for item in cast("list[Any]", found)):
            return [item for item in cast("list[str]", found) if item]
        loc = f"{self._loc}.{name}"
        self.errors.append(error("string_type", loc, "Input should be a valid string", found))
        self.errors.append(error("list_type", loc, "Input should be a valid list", found))
        return []


def read_salt(fields: Mapping[str, Any]) -> str | None:
    """`cache_salt`: text that vLLM's cache backends can carry."""
    salt = fields.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > _LONGEST_SALT or any(character in "@/\\\0" for character in salt):
        raise bad_request(
            f"Parameter 'cache_salt' must be at most {_LONGEST_SALT} characters and must not contain '@', '/', "
            "'\\', or NUL.",
            "cache_salt",
        )
    return salt


def read_integer(found: Any, loc: str, bounds: tuple[int, int] | None = None) -> int | dict[str, Any]:
    """pydantic's lax int: true is 1, "3" and 3.0 are 3; null, 1.5 and lists are refused."""
    if isinstance(found, float):
        if not math.isfinite(found):
            return error("finite_number", loc, "Input should be a finite number", found)
        if not found.is_integer():
            message = "Input should be a valid integer, got a number with a fractional part"
            return error("int_from_float", loc, message, found)
        value = int(found)
    elif isinstance(found, int):
        value = int(found)
    elif isinstance(found, str):
        if not re.fullmatch(r"\s*[+-]?\d+(_\d+)*(\.0*)?\s*", found, re.ASCII):
            message = "Input should be a valid integer, unable to parse string as an integer"
            return error("int_parsing", loc, message, found)
        value = int(found.strip().split(".")[0])
    else:
        return error("int_type", loc, "Input should be a valid integer", found)
    if bounds is not None and value < bounds[0]:
        message = f"Input should be greater than or equal to {bounds[0]}"
        return error("greater_than_equal", loc, message, found, ge=bounds[0])
    if bounds is not None and value > bounds[1]:
        return error("less_than_equal", loc, f"Input should be less than or equal to {bounds[1]}", found, le=bounds[1])
    return value


def _read_number(found: Any, loc: str) -> float | dict[str, Any]:
    if isinstance(found, int | float):
        return float(found)
    if isinstance(found, str):
        try:
            return float(found)
        except ValueError:
            message = "Input should be a valid number, unable to parse string as a number"
            return error("float_parsing", loc, message, found)
    return error("float_type", loc, "Input should be a valid number", found)


_FLAGS = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True} | dict.fromkeys(
    ("false", "f", "no", "n", "off", "0"), False
)


def _read_flag(found: Any, loc: str) -> bool | dict[str, Any]:
    if isinstance(found, bool):
        return found
    if isinstance(found, int | float) and found in (0, 1):
        return bool(found)
    if isinstance(found, str) and found.lower() in _FLAGS:
        return _FLAGS[found.lower()]
    if isinstance(found, str | int | float):
        return error("bool_parsing", loc, "Input should be a valid boolean, unable to interpret input", found)
    return error("bool_type", loc, "Input should be a valid boolean", found)


def _read_string(found: Any, loc: str) -> str | dict[str, Any]:
    return found if isinstance(found, str) else error("string_type", loc, "Input should be a valid string", found)
