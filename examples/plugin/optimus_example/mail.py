"""A reader of mailboxes. A message is a document: its subject, an empty line, and its plain text."""

import email
import email.policy
from collections.abc import Iterator
from typing import BinaryIO

from optimus.extend import record_reader


def messages(file: BinaryIO) -> Iterator[str]:
    """Yields the messages of a mailbox in the format mbox, in which each begins with a line "From "."""
    lines: list[bytes] = []
    for line in file:
        if line.startswith(b"From ") and lines:
            yield _text(b"".join(lines))
            lines = []
        if not line.startswith(b"From "):
            lines.append(line)
    if lines:
        yield _text(b"".join(lines))


def _text(message: bytes) -> str:
    parsed = email.message_from_bytes(message, policy=email.policy.default)
    body = parsed.get_body(("plain",))
    return f"{parsed['subject'] or ''}\n\n{body.get_content() if body else ''}"


MAIL = record_reader("mail", (".mbox",), messages, binary=True)
