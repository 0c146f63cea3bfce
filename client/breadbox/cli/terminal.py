"""What others chose, such as names and errors, as text that does nothing to a terminal."""

from typing import Final

REPLACEMENT: Final = "\ufffd"


def printable(text: str) -> str:
    """The text with a sign for each character that is not printable, ends of lines among them.

    Escape sequences move the cursor, retitle the window, make links, and in some terminals type;
    and what begins a line of its own reads as if it were ours.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else REPLACEMENT for sign in text)
