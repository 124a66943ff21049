# SPDX-License-Identifier: Apache-2.0
"""Legal widths as people ask for them: a range with a step, powers of two, or a list."""

from dataclasses import dataclass
from typing import NoReturn, TypeVar

from horowatt.errors import InvalidInput

T = TypeVar("T")

MAX_WIDTH = 65_536
_MAX_LEGAL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthWish:
    """What one source (the flags, or a job file) says about widths; None is not said."""

    minimum: int | None = None
    maximum: int | None = None
    step: int | None = None
    powers_of_two: bool | None = None
    listed: tuple[int, ...] | None = None

    def over(self, base: "WidthWish") -> "WidthWish":
        """Return this wish completed by ``base``; a list replaces a range and the other way round."""
        if self.listed is not None:
            return self
        ranged = (self.minimum, self.maximum, self.step, self.powers_of_two)
        if all(value is None for value in ranged):
            return base
        return WidthWish(
            minimum=_first(self.minimum, base.minimum),
            maximum=_first(self.maximum, base.maximum),
            step=None if self.powers_of_two else _first(self.step, base.step),
            powers_of_two=False if self.step is not None else _first(self.powers_of_two, base.powers_of_two),
        )

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was said."""
        return self == WidthWish()


def _first(first: T | None, second: T | None) -> T | None:
    return second if first is None else first


def legal_widths(wish: WidthWish) -> tuple[int, ...]:
    """Return the legal widths, ascending; width 1 when nothing was said.

    Raises:
        InvalidInput: ``HW-CLI-007`` when the wish contradicts itself or allows no width.
    """
    if wish.listed is not None:
        return _from_list(wish)
    low = 1 if wish.minimum is None else wish.minimum
    high = max(low, 1) if wish.maximum is None else wish.maximum
    if low < 1:
        _refuse("the minimum must be 1 or more", "a job that should wait needs no width 0")
    if low > high:
        _refuse(f"the minimum {low} is above the maximum {high}", "swap --min and --max")
    if high > MAX_WIDTH:
        _refuse(f"the maximum {high} is above {MAX_WIDTH}")
    if wish.powers_of_two:
        if wish.step is not None:
            _refuse("a step and powers of two exclude each other")
        widths = tuple(1 << n for n in range(high.bit_length()) if low <= 1 << n <= high)
        if not widths:
            _refuse(f"there is no power of two from {low} to {high}")
        return widths
    step = 1 if wish.step is None else wish.step
    if step < 1:
        _refuse("the step must be 1 or more")
    widths = tuple(range(low, high + 1, step))
    if len(widths) > _MAX_LEGAL:
        _refuse(f"that would be {len(widths)} widths, at most {_MAX_LEGAL} are possible", "use a larger step")
    return widths


def parse_list(text: str) -> tuple[int, ...]:
    """Return the widths of a list such as ``1,2,4``.

    Raises:
        InvalidInput: ``HW-CLI-007`` when an entry is not a whole number.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(
        entry.isascii() and entry.isdigit() and len(entry) <= len(str(MAX_WIDTH)) for entry in entries
    ):
        _refuse(f"{text!r} is not a list of widths", "write for example --widths 1,2,4")
    return tuple(int(entry) for entry in entries)


def _from_list(wish: WidthWish) -> tuple[int, ...]:
    others = (wish.minimum, wish.maximum, wish.step, wish.powers_of_two)
    if any(value not in {None, False} for value in others):
        _refuse("a list of widths excludes minimum, maximum, step and powers of two")
    listed = wish.listed or ()
    if not listed or min(listed) < 1 or max(listed) > MAX_WIDTH:
        _refuse(f"each width must be from 1 to {MAX_WIDTH}, and there must be one")
    if len(set(listed)) != len(listed):
        _refuse("a width stands there twice")
    return tuple(sorted(listed))


def _refuse(because: str, hint: str = "see 'horowatt submit --help'") -> NoReturn:
    raise InvalidInput("HW-CLI-007", "these widths cannot be used", because=because, hint=hint)
