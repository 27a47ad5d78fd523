"""The contact sheet: where things are, how images are scaled, how captions are cut."""

from __future__ import annotations

from itertools import combinations

import pytest
from PIL import Image

from st2i_dask.cli.contact_sheet import (
    SIDE_LEAST,
    SIDE_MOST,
    Tile,
    contact_sheet,
    layout,
    scaled,
    wrap,
)
from st2i_dask.errors import ParameterError

COLOURS = ["#dc1e23", "#1ea041", "#284bdc", "#f5dc2d", "#9132b9"]


def tiles(count, size=(64, 64)):
    return [
        Tile(Image.new("RGB", size, COLOURS[i % 5]), f"picture {i}", "ab"[i % 2], f"seed {i}")
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12, 18, 24, 50, 200])
def test_every_cell_is_on_the_page_and_none_overlap(count):
    page = layout(count, 64)
    assert (page.rows - 1) * page.columns < count <= page.rows * page.columns
    corners = [page.corner(i) for i in range(count)]
    for x, y in corners:
        assert 0 <= x <= page.size[0] - page.side
        assert page.header <= y <= page.size[1] - page.cell_height
    for (x1, y1), (x2, y2) in combinations(corners, 2):
        assert abs(x1 - x2) >= page.side or abs(y1 - y2) >= page.cell_height


@pytest.mark.parametrize("count", range(1, 49))
def test_the_page_has_the_shape_of_a_screen_and_few_empty_cells(count):
    page = layout(count, 64)
    assert page.columns * page.rows - count <= count / 3
    if count > 4:
        assert 0.8 < page.size[0] / page.size[1] < 2.2


@pytest.mark.parametrize(
    ("longest", "side"), [(16, 176), (64, 192), (100, 200), (150, 176), (999, 256)]
)
def test_cells_are_whole_multiples_of_small_images(longest, side):
    assert layout(4, longest).side == side


@pytest.mark.parametrize("longest", [8, 32, 64, 100, 255, 512, 4096])
def test_images_are_neither_tiny_nor_huge(longest):
    page = layout(4, longest)
    assert SIDE_LEAST <= page.side <= SIDE_MOST
    image = scaled(Image.new("RGB", (longest, longest)), page.side)
    assert SIDE_LEAST // 2 < image.width <= page.side


def test_images_are_where_the_layout_says():
    made = tiles(7)
    sheet = contact_sheet(made, "title")
    page = layout(7, 64, lines=1)
    assert sheet.size == page.size
    for index, tile in enumerate(made):
        x, y = page.corner(index)
        middle = (x + page.side // 2, y + page.side // 2)
        assert sheet.getpixel(middle) == tile.image.getpixel((0, 0))


def test_captions_and_the_title_are_drawn():
    blank = contact_sheet([Tile(Image.new("RGB", (64, 64)), "")], "")
    page = layout(1, 64, lines=1)
    x, y = page.corner(0)
    caption = (x, y + page.side + 2, x + page.side, y + page.cell_height)
    header = (0, 0, page.size[0], page.header - 2)
    full = contact_sheet([Tile(Image.new("RGB", (64, 64)), "a cat", "bob", "seed 1")], "title", "x")
    for box in (caption, header):
        assert len(blank.crop(box).getcolors()) == 1
        assert len(full.crop(box).getcolors(10_000)) > 5


def test_groups_have_marks_of_their_own():
    sheet = contact_sheet(tiles(2), "title")
    page = layout(2, 64, lines=1)
    marks = []
    for index in range(2):
        x, y = page.corner(index)
        column = [sheet.getpixel((x + 4, y + dy)) for dy in range(page.side + 4, page.cell_height)]
        marks.append({pixel for pixel in column if max(pixel) - min(pixel) > 60})
    assert marks[0]
    assert marks[1]
    assert not marks[0] & marks[1]


def test_small_images_stay_sharp():
    image = Image.new("RGB", (2, 2), "white")
    image.putpixel((0, 0), (0, 0, 0))
    large = scaled(image, 7)
    assert large.size == (6, 6)
    assert {colour for _, colour in large.getcolors()} == {(0, 0, 0), (255, 255, 255)}


def test_shapes_of_images_are_kept():
    assert scaled(Image.new("RGB", (1000, 500)), 250).size == (250, 125)
    assert scaled(Image.new("RGB", (3000, 1)), 250).size == (250, 1)


def test_mixed_sizes_fit():
    sheet = contact_sheet([*tiles(2, (512, 128)), *tiles(2, (16, 16))], "title")
    assert sheet.size == layout(4, 512, lines=1).size


@pytest.mark.parametrize(
    ("text", "width", "lines", "expected"),
    [
        ("", 9, 3, []),
        ("one two", 9, 3, ["one two"]),
        ("one  two\nthree", 9, 3, ["one two", "three"]),
        ("unbreakable", 4, 3, ["unbr", "eaka", "ble"]),
        ("one two three four five", 9, 2, ["one two", "three..."]),
    ],
)
def test_wrapping(text, width, lines, expected):
    assert wrap(text, width, len, lines) == expected


def test_wrapped_lines_always_fit():
    text = "a large yellow square on a purple background, seen from above in the morning"
    for width in range(4, 40):
        for lines in (1, 2, 3):
            made = wrap(text, width, len, lines)
            assert len(made) <= lines
            assert max(map(len, made)) <= width


def test_a_sheet_of_nothing_is_refused():
    with pytest.raises(ParameterError, match="contact sheet of 0 images"):
        contact_sheet([], "title")
