"""Many images on one page: a grid with captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..errors import ParameterError

#: Longer side of an image on the page, in pixels, at least and at most.
SIDE_LEAST, SIDE_MOST = 176, 256

_MARGIN, _GAP = 32, 20
_CAPTION_LINES, _COLUMNS_MOST = 3, 8
_TITLE_SIZE, _SUBTITLE_SIZE, _CAPTION_SIZE, _NOTE_SIZE = 26, 15, 15, 13
_PAPER, _INK, _FAINT, _FRAME = (252, 252, 250), (28, 28, 30), (110, 110, 115), (205, 205, 205)
#: One colour per group, readable on the paper; the first for the first group that appears.
_GROUP_COLOURS = ((0, 102, 180), (190, 80, 0), (0, 125, 80), (140, 60, 150), (90, 90, 90))


@dataclass(frozen=True)
class Tile:
    """One image with the text below it. Tiles of one group have a mark of the same colour."""

    image: Image.Image
    caption: str
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class Layout:
    """Where everything is, in pixels. Cells are equal; the last row may be short."""

    columns: int
    rows: int
    side: int  # of the square that an image is centred in
    header: int  # height of the title block
    cell_height: int

    @property
    def size(self) -> tuple[int, int]:
        width = 2 * _MARGIN + self.columns * self.side + (self.columns - 1) * _GAP
        height = self.header + self.rows * self.cell_height + (self.rows - 1) * _GAP + _MARGIN
        return width, height

    def corner(self, index: int) -> tuple[int, int]:
        """Upper left corner of a cell; they fill row by row."""
        row, column = divmod(index, self.columns)
        return (
            _MARGIN + column * (self.side + _GAP),
            self.header + row * (self.cell_height + _GAP),
        )


def layout(count: int, longest: int, lines: int = _CAPTION_LINES) -> Layout:
    """A page for `count` images whose longest side is `longest` pixels.

    lines: of the longest caption. The page is about 1.4 times as wide as high, with few empty cells.

    >>> layout(18, 64).columns, layout(18, 64).rows, layout(18, 64).side
    (6, 3, 192)
    """
    factor = max(1, math.ceil(SIDE_LEAST / longest))
    if factor > 1 and factor * longest > SIDE_MOST:
        factor -= 1
    side = min(max(factor * longest, SIDE_LEAST), SIDE_MOST)
    cell_height = side + 8 + lines * _line_height(_CAPTION_SIZE) + _line_height(_NOTE_SIZE)

    def cost(columns: int) -> float:
        rows = math.ceil(count / columns)
        aspect = columns * (side + _GAP) / (rows * (cell_height + _GAP))
        return abs(math.log(aspect / 1.4)) + (rows * columns - count) / count

    columns = min(range(1, min(count, _COLUMNS_MOST) + 1), key=cost)
    header = _MARGIN + _line_height(_TITLE_SIZE) + _line_height(_SUBTITLE_SIZE) + _GAP
    return Layout(columns, math.ceil(count / columns), side, header, cell_height)


def contact_sheet(tiles: Sequence[Tile], title: str, subtitle: str = "") -> Image.Image:
    """The page as an RGB image. Small images are enlarged by whole factors, without blurring.

    ParameterError for no tiles.
    """
    if not tiles:
        raise ParameterError("a contact sheet of 0 images would be empty; give at least 1")
    longest = max(max(tile.image.size) for tile in tiles)
    side = layout(len(tiles), longest).side
    lines = max(len(_caption(tile, side)) for tile in tiles)
    page = layout(len(tiles), longest, lines)
    sheet = Image.new("RGB", page.size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    room = page.size[0] - 2 * _MARGIN
    draw.text((_MARGIN, _MARGIN - 6), _fit(title, _TITLE_SIZE, room), _INK, _font(_TITLE_SIZE))
    draw.text(
        (_MARGIN, _MARGIN + _line_height(_TITLE_SIZE)),
        _fit(subtitle, _SUBTITLE_SIZE, room),
        _FAINT,
        _font(_SUBTITLE_SIZE),
    )
    groups = list(dict.fromkeys(tile.group for tile in tiles))
    for index, tile in enumerate(tiles):
        _draw_tile(sheet, draw, page, index, tile, _GROUP_COLOURS[groups.index(tile.group) % 5])
    return sheet


def _draw_tile(
    sheet: Image.Image, draw: Any, page: Layout, index: int, tile: Tile, colour: tuple[int, ...]
) -> None:
    x, y = page.corner(index)
    image = scaled(tile.image.convert("RGB"), page.side)
    left, top = x + (page.side - image.width) // 2, y + (page.side - image.height) // 2
    sheet.paste(image, (left, top))
    frame = (left - 1, top - 1, left + image.width, top + image.height)
    draw.rectangle(frame, outline=_FRAME)
    y += page.side + 8
    for line in _caption(tile, page.side):
        draw.text((x, y), line, _INK, _font(_CAPTION_SIZE))
        y += _line_height(_CAPTION_SIZE)
    note = ", ".join(part for part in (tile.group, tile.note) if part)
    if note:
        middle = y + _line_height(_NOTE_SIZE) // 2
        draw.ellipse((x, middle - 4, x + 8, middle + 4), fill=colour)
        note = _fit(note, _NOTE_SIZE, page.side - 14)
        draw.text((x + 14, y), note, _FAINT, _font(_NOTE_SIZE))


def _caption(tile: Tile, width: int) -> list[str]:
    return wrap(tile.caption, width, _measure(_CAPTION_SIZE), _CAPTION_LINES)


def scaled(image: Image.Image, side: int) -> Image.Image:
    """The image with its longer side at most `side`: by a whole factor up, or smoothly down."""
    longest = max(image.size)
    if longest > side:
        size = tuple(max(1, round(length * side / longest)) for length in image.size)
        return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    factor = side // longest
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def wrap(text: str, width: int, measure: Callable[[str], float], most: int) -> list[str]:
    """The text in at most `most` lines, each `measure`d no wider than `width`.

    Breaks between words, and inside a word that is wider than a line; '...' where text is left out.

    >>> wrap("a small red ring", 8, len, 2), wrap("a small red ring", 8, len, 1)
    (['a small', 'red ring'], ['a sma...'])
    """
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < most:
        fitting = len(rest)
        while fitting > 1 and measure(rest[:fitting]) > width:
            fitting -= 1
        if fitting == len(rest):
            return [*lines, rest]
        space = rest.rfind(" ", 0, fitting + 1)
        cut = space if space > 0 else fitting
        if len(lines) == most - 1:
            while fitting > 1 and measure(rest[:fitting].rstrip() + "...") > width:
                fitting -= 1
            return [*lines, rest[:fitting].rstrip() + "..."]
        lines.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return lines


def _fit(text: str, size: int, width: int) -> str:
    return next(iter(wrap(text, width, _measure(size), 1)), "")


def _measure(size: int) -> Callable[[str], float]:
    return lambda text: float(_font(size).getlength(text))


def _line_height(size: int) -> int:
    return round(size * 1.35)


@cache
def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except (ImportError, OSError, TypeError):  # Pillow without FreeType has one small font
        return ImageFont.load_default()
