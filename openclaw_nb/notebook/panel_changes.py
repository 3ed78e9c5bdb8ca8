"""What differs between two drawings of a part of the panel: the texts and values, where the structure is the same.

    HTML drawn now ──> tokens (tags, and the text between them) ──> a base, and the tokens that have changed since

What is sent twice a second costs the browser memory that it has to collect again, so a part goes whole only when its
structure changes. A base with its changes always is the whole part: whoever comes later, or missed some, needs no
more than the newest of both. Pure; `panel.js` reads the same tokens.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"<[^>]*>|[^<]+")
_VALUE = re.compile(r'"[^"]*"')

Change = tuple[int, str]


class PartChanges:
    """One part, as it is sent.

    Every ``<``, ``>`` and ``"`` within a value must be escaped, and no two texts may follow each other.

    Attributes
    ----------
    base : str
        The HTML from which the changes count.
    """

    def __init__(self) -> None:
        self.base = ""
        self._newest = ""
        self._tokens: list[str] = []
        self._changed: set[int] = set()

    def take(self, html: str) -> None:
        """Note a new drawing; it becomes the base when its structure is another."""
        if html == self._newest:
            return
        tokens = _TOKEN.findall(html)
        changed = _changed(self._tokens, tokens)
        if changed is None:
            self.base, self._changed = html, set()
        else:
            self._changed |= changed
        self._newest, self._tokens = html, tokens

    @property
    def changes(self) -> list[Change]:
        """Each token that has changed since the base, once, by its place: also one that has changed back."""
        return [(place, self._tokens[place]) for place in sorted(self._changed)]


def _changed(before: list[str], after: list[str]) -> set[int] | None:
    """Return the places of the tokens that differ, or None when another structure needs other nodes."""
    if len(before) != len(after):
        return None
    places = {place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
    return places if all(_alike(before[place], after[place]) for place in places) else None


def _alike(token: str, other: str) -> bool:
    if token[0] != "<" or other[0] != "<":
        return token[0] != "<" and other[0] != "<"
    return _VALUE.sub("", token) == _VALUE.sub("", other)
