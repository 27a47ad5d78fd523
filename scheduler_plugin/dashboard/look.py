"""Colours, theme and style sheet of all pages. The colours keep apart for the colour-blind (Okabe, Ito)."""

from __future__ import annotations

from bokeh.themes import Theme

COMPUTE = "#0072B2"
LOAD = "#E69F00"
TRANSFER = "#009E73"
FAILED = "#D55E00"
WAITS = "#C9CFD6"
RUNS = "#56B4E9"
ABSENT = "#E8EBEE"
INK = "#333C45"

#: By tenant, as ranked on the page; the rest are grey.
TENANTS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7A5BBE", "#8C6D31"),
)
REST = "#9AA3AC"

THEME = Theme(
    json={
        "attrs": {
            "Plot": {
                "background_fill_color": None,
                "border_fill_color": None,
                "outline_line_color": None,
                "min_border_right": 12,
            },
            "Title": {"text_color": INK, "text_font_size": "14px", "text_font_style": "bold"},
            "Axis": {
                "axis_label_text_font_style": "normal",
                "axis_label_text_font_size": "12px",
                "axis_label_text_color": INK,
                "axis_label_standoff": 6,
                "axis_line_color": "#B4BCC4",
                "major_tick_line_color": "#B4BCC4",
                "minor_tick_line_color": None,
                "major_label_text_font_size": "11px",
                "major_label_text_color": INK,
            },
            "Grid": {"grid_line_color": "#E4E8EC"},
            "Legend": {
                "border_line_color": None,
                "background_fill_color": None,
                "label_text_font_size": "11px",
                "label_text_color": INK,
                "glyph_height": 14,
                "glyph_width": 14,
                "spacing": 2,
                "padding": 2,
                "margin": 2,
            },
            "Toolbar": {"logo": None, "autohide": True},
        }
    }
)

STYLE = """
:host { font-family: Helvetica, Arial, sans-serif; color: #333C45; }
.links { font-size: 16px; margin: 4px 0 2px 0; }
.links a, .links b { margin-right: 18px; }
a { color: #0072B2; text-decoration: none; }
a:hover { text-decoration: underline; }
.status { font-size: 14px; }
.about { font-size: 13px; color: #5A6570; }
.notice { font-size: 15px; background: #F0F3F6; border-left: 4px solid #56B4E9; padding: 12px 16px; }
.hint { font-size: 13px; color: #5A6570; padding-top: 6px; white-space: nowrap; }
code { background: #E8EBEE; padding: 1px 4px; }
"""
