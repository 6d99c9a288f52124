"""Text of other machines, environments and models, made safe to print and to store. No I/O.

A terminal obeys what it is sent: an escape sequence in a log line, an observation or an error may
clear the screen, set the title, write to the clipboard or hide a command. Bidirectional controls
show a line in another order than it is read. Lone surrogates cannot be encoded at all.
"""

from __future__ import annotations

import re

_LONE = re.compile("[\ud800-\udfff]")
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # order of writing
    "\u2028\u2029\ufeff\ud800-\udfff\U000e0000-\U000e007f]"  # lines, mark, halves, invisible tags
)


def encodable(text: str) -> str:
    """Return the text with every lone surrogate replaced by U+FFFD, so that UTF-8 can hold it."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def printable(text: str) -> str:
    """Return the text with everything that a terminal obeys shown as its escape, such as ``\\x1b``.

    Tabs and line feeds stay; a carriage return before a line feed goes.
    """
    return _OBEYED.sub(_shown, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return the text with nothing that a terminal obeys, and every run of blanks as one space."""
    return printable(" ".join(text.split()))


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
