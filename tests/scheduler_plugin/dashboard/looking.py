"""What a page shows: fetched from its address, or looked at as a tab would have it."""

import urllib.request

from bokeh.document import Document
from bokeh.models import DataTable


def got(address):
    with urllib.request.urlopen(address, timeout=30) as response:
        assert response.status == 200
        return response.read().decode()


def opened(shown, page):
    """A page of its own, as a tab would have it, updated once more."""

    def make():
        made, document = page(shown.board), Document()
        made.show({}, document)
        made.refresh()
        shown.board.left(made)
        return made

    return shown.on_loop(make)


def cells(page):
    return page.root.select_one({"type": DataTable}).source.data


def data(page, plot):
    """What the plot of that name draws, by glyph."""
    return [r.data_source.data for r in page.root.select_one({"name": plot}).renderers]
