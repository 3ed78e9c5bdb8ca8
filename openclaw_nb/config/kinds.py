"""What a configuration key may hold: each kind says what is allowed and turns what was written into a value.

Knows values as YAML gives them; does not know files, keys or what a value is for.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.text import parse_size

_MOST_SHOWN = 60
_TIB = 1024**4


class WrongValueError(ValueError):
    """A value that its key cannot hold; the message says what is allowed, beginning with the value."""


class Kind(Protocol):
    """What a key may hold."""

    @property
    def allowed(self) -> str:
        """Say it in a few words."""

    def read(self, value: Any) -> Any:
        """Return the value, in one form.

        Raises
        ------
        WrongValueError
            When it cannot be held.
        """


def did_you_mean(given: object, allowed: Iterable[str]) -> str:
    """Return a hint at the nearest allowed name, with a space before it, or ""."""
    near = difflib.get_close_matches(str(given)[:_MOST_SHOWN], list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    """Return a value as an error shows it: short, with the type where YAML may have read another one than was meant.

    Examples
    --------
    >>> shown(True), shown("two")
    ('true (a boolean)', "'two'")
    """
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, dict):
        return "a block of keys"
    text = "a list" if isinstance(value, list) else _short(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _short(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # a whole number of more digits than Python writes out
        return "a very large number"


@dataclass(frozen=True)
class Word:
    """One of some words, in any case of letters.

    Attributes
    ----------
    words : tuple of str
        Those that are allowed, as they are kept.
    aliases : mapping of str to str
        Other words for them.
    """

    words: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        """All words."""
        return ", ".join((*self.words, *self.aliases))

    def read(self, value: Any) -> str:
        """Return the word as it is kept."""
        known = {word.lower(): word for word in self.words} | {
            alias.lower(): word for alias, word in self.aliases.items()
        }
        if not isinstance(value, str) or value.strip().lower() not in known:
            names = (*self.words, *self.aliases)
            hint = did_you_mean(value, names) if isinstance(value, str) else ""
            raise WrongValueError(
                f"{shown(value)} is none of the allowed words.{hint} Allowed: {self.allowed}."
            )
        return known[value.strip().lower()]


@dataclass(frozen=True)
class Flag:
    """Yes or no."""

    @property
    def allowed(self) -> str:
        """Both."""
        return "true, false"

    def read(self, value: Any) -> bool:
        """Return it."""
        if not isinstance(value, bool):
            raise WrongValueError(f"{shown(value)} is neither true nor false.")
        return value


@dataclass(frozen=True)
class Count:
    """A whole number within bounds."""

    low: int = 1
    high: int = 1_000_000

    @property
    def allowed(self) -> str:
        """The bounds."""
        return f"a whole number from {self.low} to {self.high}"

    def read(self, value: Any) -> int:
        """Return it."""
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not self.low <= value <= self.high:
            raise WrongValueError(f"{shown(value)} is not {self.allowed}.")
        return int(value)


@dataclass(frozen=True)
class Number:
    """A number above 0 and up to a bound."""

    high: float
    unit: str = ""

    @property
    def allowed(self) -> str:
        """The bounds."""
        return f"a number{self.unit} above 0 and up to {self.high:.10g}"

    def read(self, value: Any) -> float:
        """Return it."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= self.high or not math.isfinite(value):
            raise WrongValueError(f"{shown(value)} is not {self.allowed}.")
        return float(value)


@dataclass(frozen=True)
class Size:
    """A number of bytes, also with a unit."""

    low: int = 1

    @property
    def allowed(self) -> str:
        """The bounds."""
        return f"a size from {self.low} bytes to 1 TiB, such as 25MB"

    def read(self, value: Any) -> int:
        """Return the bytes."""
        try:
            size = parse_size(value, "it") if not isinstance(value, bool) else -1
        except (UsageError, OverflowError):
            size = -1
        if not self.low <= size <= _TIB:
            raise WrongValueError(f"{shown(value)} is not {self.allowed}.")
        return size


@dataclass(frozen=True)
class Text:
    """Some text on one line."""

    what: str = "text"

    @property
    def allowed(self) -> str:
        """What it is."""
        return self.what

    def read(self, value: Any) -> str:
        """Return it without spaces around."""
        is_line = isinstance(value, str) and value.strip() and "\n" not in value and "\0" not in value
        if not is_line:
            raise WrongValueError(f"{shown(value)} is not {self.what}.")
        return str(value).strip()


@dataclass(frozen=True)
class Words:
    """A list of words; on one line they may also be separated by commas.

    Attributes
    ----------
    what : str
        What they are, with an example.
    check : callable, optional
        Given a word, return it in one form or raise `WrongValueError`.
    """

    what: str
    check: Callable[[str], str] | None = None

    @property
    def allowed(self) -> str:
        """What they are."""
        return f"a list of {self.what}"

    def read(self, value: Any) -> tuple[str, ...]:
        """Return them."""
        words = value.split(",") if isinstance(value, str) else value
        if (
            not isinstance(words, list)
            or not words
            or not all(isinstance(w, str) and w.strip() for w in words)
        ):
            raise WrongValueError(f"{shown(value)} is not {self.allowed}.")
        return tuple(self.check(w.strip()) if self.check else w.strip() for w in words)


@dataclass(frozen=True)
class Table:
    """Words to words."""

    what: str

    @property
    def allowed(self) -> str:
        """What they are."""
        return self.what

    def read(self, value: Any) -> dict[str, str]:
        """Return it."""
        is_table = (
            isinstance(value, dict)
            and value
            and all(isinstance(v, str) and v.strip() for v in value.values())
        )
        if not is_table:
            raise WrongValueError(f"{shown(value)} is not {self.what}.")
        return {str(name): word.strip() for name, word in value.items()}


@dataclass(frozen=True)
class Groups:
    """A list of lists of words."""

    what: str

    @property
    def allowed(self) -> str:
        """What they are."""
        return self.what

    def read(self, value: Any) -> tuple[tuple[str, ...], ...]:
        """Return them."""
        inner = Words(self.what)
        if not isinstance(value, list) or not value or not all(isinstance(group, list) for group in value):
            raise WrongValueError(f"{shown(value)} is not {self.what}.")
        return tuple(inner.read(group) for group in value)


@dataclass(frozen=True)
class Either:
    """The first of some kinds that holds the value."""

    kinds: tuple[Kind, ...]

    @property
    def allowed(self) -> str:
        """All of them."""
        return ", or ".join(kind.allowed for kind in self.kinds)

    def read(self, value: Any) -> Any:
        """Return the value as the first of them does."""
        for kind in self.kinds:
            try:
                return kind.read(value)
            except WrongValueError:
                continue
        raise WrongValueError(f"{shown(value)} is not {self.allowed}.")


_DEVICE = re.compile(r"(GPU|CPU)-\d{1,6}")


def device_id(word: str) -> str:
    """Return a device's id in capitals; refuse what cannot be one."""
    if not _DEVICE.fullmatch(word.upper()):
        raise WrongValueError(f"{shown(word)} is not a device such as GPU-0 or CPU-1.")
    return word.upper()


@dataclass(frozen=True)
class DeviceId:
    """One device."""

    @property
    def allowed(self) -> str:
        """What it is."""
        return "a device such as GPU-0 or CPU-1"

    def read(self, value: Any) -> str:
        """Return its id in capitals."""
        if not isinstance(value, str):
            raise WrongValueError(f"{shown(value)} is not {self.allowed}.")
        return device_id(value.strip())


_CAPABILITIES = ("fp32", "fp16", "bf16", "nccl", "gloo", "mpi", "cuda")
_CUDA = re.compile(r"cuda-?\d{1,3}(\.\d{1,3})?")
_MEMORY = re.compile(r"\d{1,6}(\.\d{1,3})?\s*[kmgt]i?b", re.IGNORECASE)


def capability(word: str) -> str:
    """Return a capability in small letters, a size as it is; refuse what is none."""
    if _MEMORY.fullmatch(word):
        return word
    if word.lower() not in _CAPABILITIES and not _CUDA.fullmatch(word.lower()):
        raise WrongValueError(f"{shown(word)} is no capability.{did_you_mean(word.lower(), _CAPABILITIES)}")
    return word.lower()
