"""What all pages share: a head with links, a line of status, words instead of empty plots, and an end."""

from __future__ import annotations

import html
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import distributed.http
from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import Div, UIElement
from jinja2 import Environment, FileSystemLoader

from .elements import put
from .look import STYLE, THEME

if TYPE_CHECKING:
    from .board import Board

_templates = Environment(
    loader=FileSystemLoader(os.path.join(distributed.http.__path__[0], "templates"))
)

_OVER = (
    "<b>This page is no longer live.</b> The plugin was detached from the scheduler, or attached anew: "
    "reload the page."
)


class Page(ABC):
    """One open page: one document of one browser tab.

    A subclass builds its elements in `build`, once, and brings them up to date in `update`, which is
    called every `period_ms`, or less often where that is dear. asks: whether it shows what executors say, so that they are asked.
    """

    path = ""
    title = ""
    about = ""
    period_ms = 1000
    asks = False

    def __init__(self, board: Board) -> None:
        self.board: Board | None = board
        self.now = board.clock()
        self._due = self.now
        self._head = Div(text="", sizing_mode="stretch_width", stylesheets=[STYLE])
        self.status = Div(text="", sizing_mode="stretch_width", stylesheets=[STYLE], name="status")
        self._notice = Div(text="", sizing_mode="stretch_width", stylesheets=[STYLE], name="notice")
        self._body = column(*self.build(), sizing_mode="stretch_width", spacing=10)
        self.root = column(
            self._head, self.status, self._body, sizing_mode="stretch_width", spacing=4
        )
        self._end: Callable[[], None] | None = None

    # To be written by each page

    @abstractmethod
    def build(self) -> list[UIElement]:
        """What it shows; called once."""

    @abstractmethod
    def update(self) -> None:
        """Bring it up to date."""

    # For them to use

    def say(self, text: str) -> None:
        """The line of status."""
        put(self.status, text=f'<div class="status">{text}</div>')

    def instead(self, text: str | None) -> None:
        """Show these words in place of the page's elements; None: show the elements."""
        words = f'<div class="notice">{text}</div>' if text else ""
        put(self._notice, text=words)
        shown = self._notice if text else self._body
        if self.root.children[-1] is not shown:
            self.root.children = [self._head, self.status, shown]

    # Life

    @classmethod
    def maker(cls, board: Board) -> Callable[[Any, dict[str, Any], Document], None]:
        """What Dask's BokehApplication calls for every tab that opens the page."""

        def make(scheduler: Any, extra: dict[str, Any], doc: Document) -> None:
            cls(board).show(extra, doc)

        return make

    def show(self, extra: dict[str, Any], doc: Document) -> None:
        """Fill the document and keep it up to date until it is closed."""
        board = self.board
        assert board is not None
        self._head.text = self._links(board)
        doc.title = f"Dask: {self.title}"
        doc.template = _templates.get_template("simple.html")
        doc.template_variables.update(extra)
        doc.theme = THEME
        doc.add_root(self.root)
        self.refresh()
        callback = doc.add_periodic_callback(self.tick, self.period_ms)
        board.opened(self)
        document = weakref.ref(doc)

        def closed(context: Any) -> None:
            board.left(self)

        def end() -> None:
            still = document()
            if still is not None and still.session_context is not None:
                still.remove_periodic_callback(callback)
                still.add_next_tick_callback(self.say_over)

        doc.on_session_destroyed(closed)
        self._end = end

    def end(self) -> None:
        """The board is closed: show that, and refer to it no more."""
        self.board = None
        if self._end is not None:
            self._end()

    def say_over(self) -> None:
        self.say(f'<div class="notice">{_OVER}</div>')

    def tick(self) -> None:
        """Bring the page up to date, unless that would cost the scheduler too much."""
        if self.board is None or self.board.clock() < self._due:
            return
        self.refresh()

    def refresh(self, *event: Any) -> None:
        """Bring the page up to date now: the viewer wants it."""
        if self.board is None or self.board.watch.policy is None:
            return
        started = time.thread_time()
        self.now = self.board.clock()
        self.update()
        self._due = self.now + self.board.pause_s(time.thread_time() - started)

    def _links(self, board: Board) -> str:
        from .board import PAGES

        links = []
        for page in PAGES:
            name = html.escape(page.title)
            if page is type(self):
                links.append(f"<b>{name}</b>")
            else:
                links.append(f'<a href="{page.path.strip("/")}">{name}</a>')
        return f'<div class="links">{" ".join(links)}</div><div class="about">{self.about}</div>'
