"""Forms with an uploaded file (`multipart/form-data`), read while they pass through.

An audio upload is not kept whole: only the fields that decide about the request are read. A form that two servers could
read in two ways (a field twice, a field that comes after the request was sent on, an unusual part head) is refused,
because what the gateway admits and what the engine runs must be the same.
"""

import re

import msgspec

from fairshare.wire.body import MAX_SLOTS, BodyFacts, flag, whole
from fairshare.wire.problems import INVALID_REQUEST, UNSUPPORTED_MEDIA_TYPE, RequestProblem

MAX_PART_HEAD_BYTES = 8_192
MAX_FIELD_BYTES = 1_024
"""Of a field that is read; other fields may be longer."""

_READ = frozenset({"model", "stream", "stream_include_usage", "n", "priority"})

_BOUNDARY = re.compile(
    rb"multipart/form-data\s*;\s*boundary=(?:\"([0-9A-Za-z'()+_,./:=? -]{1,70})\"|([0-9A-Za-z'+_./-]{1,70}))\s*",
    re.IGNORECASE,
)

_DISPOSITION = re.compile(
    rb'form-data; *name="([^"\\\r\n]*)"(; *filename="(?:[^"\\\r\n]|\\[^\r\n])*")?(; *filename\*=[^;\s]*)?',
    re.IGNORECASE,
)


class _Span(msgspec.Struct, gc=False):
    """Where a field's value is in the form, in bytes from its beginning."""

    start: int
    end: int


class FormReader:
    """Reads one form while it passes: `feed` every piece; `ready` says when `facts` can be taken.

    It is ready when the model is known and the file begins, or at the form's end. From then on a further field that
    would change the facts is refused. Every method may raise `RequestProblem`.
    """

    def __init__(self, content_type: bytes) -> None:
        boundary = _BOUNDARY.fullmatch(content_type.strip())
        if boundary is None:
            raise RequestProblem(
                UNSUPPORTED_MEDIA_TYPE,
                "The body must be multipart/form-data with a boundary, got content-type"
                f" {content_type.decode('latin-1')[:100]!r}.",
            )
        self._delimiter = b"\r\n--" + (boundary[1] or boundary[2])
        # The first delimiter needs no line end before it.
        self._buffer = bytearray(b"\r\n")
        self._offset = -2
        """Where the buffer begins in the form."""
        self._in_head = False
        self._name: str | None = None
        """The field whose value is being read; None: a part that is not read."""
        self._begun = False
        self._file_begun = False
        self._fields: dict[str, str] = {}
        self._spans: dict[str, _Span] = {}
        self.finished = False
        """The closing delimiter was seen."""

    @property
    def ready(self) -> bool:
        """Whether the facts are known, so that the request can be admitted and what is kept sent on."""
        return self.finished or (self._file_begun and "model" in self._fields)

    def facts(self) -> BodyFacts:
        """What the form says of the request, as for a JSON body. A slot for each beam of a beam search."""
        fields = self._fields
        beams = whole(fields["n"]) if "n" in fields else 1
        if beams is None or beams > MAX_SLOTS:
            raise RequestProblem(
                INVALID_REQUEST,
                f"`n` must be a whole number up to {MAX_SLOTS}, got {fields['n'][:60]!r}.",
                param="n",
            )
        return BodyFacts(
            model=fields.get("model"),
            stream=flag(fields.get("stream"), "stream"),
            wants_usage=flag(fields.get("stream_include_usage"), "stream_include_usage"),
            slots=max(1, beams),
        )

    def feed(self, chunk: bytes) -> None:
        """The next piece of the form."""
        self._buffer += chunk
        while not self.finished and (self._read_head() if self._in_head else self._read_value()):
            pass

    def end(self) -> None:
        """The body has ended; it must have ended with the closing delimiter."""
        if not self.finished:
            raise _malformed("it ends before its closing boundary")

    def rewrite(self, held: bytes, *, served_name: str | None, ask_usage: bool) -> bytes:
        """What to send instead of the bytes so far: the served model name, and usage asked for in the stream.

        `held` is all that was fed. Its length may change; what follows stays as it is.
        """
        changes: list[tuple[_Span, bytes]] = []
        if served_name is not None and "model" in self._spans:
            changes.append((self._spans["model"], served_name.encode()))
        if ask_usage and "stream_include_usage" in self._spans:
            changes.append((self._spans["stream_include_usage"], b"true"))
        elif ask_usage:
            field = (
                self._delimiter[2:] + b'\r\nContent-Disposition: form-data; name="stream_include_usage"\r\n\r\ntrue\r\n'
            )
            changes.append((_Span(0, 0), field))
        for span, value in sorted(changes, key=lambda change: change[0].start, reverse=True):
            held = held[: span.start] + value + held[span.end :]
        return held

    def _read_value(self) -> bool:
        """Goes on to the next delimiter; whether it is there."""
        at = self._buffer.find(self._delimiter)
        if at < 0:
            if not self._begun and len(self._buffer) >= len(self._delimiter):
                raise _malformed("it does not begin with its boundary")
            if self._name is None:
                self._skip(len(self._buffer) - len(self._delimiter) + 1)
            elif len(self._buffer) > MAX_FIELD_BYTES + len(self._delimiter):
                raise _malformed(f"field {self._name!r} is longer than {MAX_FIELD_BYTES} bytes")
            return False
        after = at + len(self._delimiter)
        if len(self._buffer) < after + 2:
            return False
        if not self._begun and at > 0:
            raise _malformed("it does not begin with its boundary")
        if self._name is not None:
            self._take(self._name, bytes(self._buffer[:at]), _Span(self._offset, self._offset + at))
            self._name = None
        follows = bytes(self._buffer[after : after + 2])
        if follows == b"--":
            self.finished = True
            self._buffer.clear()
            return False
        if follows != b"\r\n":
            raise _malformed("a boundary is not followed by a line end")
        self._skip(after + 2)
        self._begun = True
        self._in_head = True
        return True

    def _read_head(self) -> bool:
        """Reads a part's head; whether it is complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_PART_HEAD_BYTES:
                raise _malformed(f"the head of a part is longer than {MAX_PART_HEAD_BYTES} bytes")
            return False
        name, is_file = _part_name(bytes(self._buffer[:end]))
        self._skip(end + 4)
        self._in_head = False
        if is_file:
            self._file_begun = True
            if name in _READ:
                raise _malformed(f"field {name!r} is a file")
        elif name in _READ:
            if self.ready:
                raise _malformed(f"field {name!r} comes after the file; send it before")
            if name in self._fields:
                raise _malformed(f"field {name!r} comes twice")
            if name == "priority":
                raise RequestProblem(
                    INVALID_REQUEST, "Uploads take no `priority`; it follows from your team's share. Leave it out."
                )
            self._name = name
        return True

    def _take(self, name: str, value: bytes, span: _Span) -> None:
        if len(value) > MAX_FIELD_BYTES:
            raise _malformed(f"field {name!r} is longer than {MAX_FIELD_BYTES} bytes")
        try:
            self._fields[name] = value.decode()
        except UnicodeDecodeError:
            raise _malformed(f"field {name!r} is not UTF-8") from None
        self._spans[name] = span

    def _skip(self, count: int) -> None:
        if count > 0:
            del self._buffer[:count]
            self._offset += count


def _part_name(head: bytes) -> tuple[str, bool]:
    """The name of a part, and whether it is a file."""
    name: str | None = None
    is_file = False
    for line in head.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if not colon or b"\n" in line or b"\r" in line or not key or key != key.strip():
            raise _malformed(f"the line {line[:60]!r} in the head of a part is no header")
        match key.lower():
            case b"content-disposition":
                disposition = _DISPOSITION.fullmatch(value.strip())
                if disposition is None or name is not None:
                    raise _malformed(f"the Content-Disposition {value[:60]!r} is not understood")
                try:
                    name = disposition[1].decode()
                except UnicodeDecodeError:
                    raise _malformed("the name of a part is not UTF-8") from None
                is_file = disposition[2] is not None or disposition[3] is not None
            case b"content-transfer-encoding":
                if value.strip().lower() not in (b"binary", b"8bit", b"7bit"):
                    raise _malformed(f"Content-Transfer-Encoding {value[:60]!r} is not understood")
            case _:
                pass
    if name is None:
        raise _malformed("a part has no Content-Disposition")
    return name, is_file


def _malformed(what: str) -> RequestProblem:
    return RequestProblem(INVALID_REQUEST, f"The form cannot be read: {what}.")
