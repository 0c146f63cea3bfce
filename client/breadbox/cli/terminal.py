"""What others chose, such as names and errors, as text that does nothing to a terminal."""

from typing import Final

REPLACEMENT: Final = "\ufffd"


def printable(text: str) -> str:
    """The text with a sign for each character that is not printable, but for ends of lines.

    Escape sequences move the cursor, retitle the window, make links, and in some terminals type.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign == "\n" or sign.isprintable() else REPLACEMENT for sign in text)
