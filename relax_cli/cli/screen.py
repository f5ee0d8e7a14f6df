"""The console of every command: the one place where text of others is cleaned on its way to a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from relax_cli.config.text import printable, with_program


class Screen(Console):
    """rich's console, whose texts cannot contain control codes; those that rich makes itself stay."""

    def __init__(self, **arguments: Any) -> None:
        # NO_COLOR alone leaves rich's bold and dim.
        colours = None if os.environ.get("NO_COLOR") else "auto"
        super().__init__(**{"color_system": colours, "highlight": False, **arguments})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments with control characters written out."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def render_str(self, text: str, **arguments: Any) -> Text:
        """A text in which commands name the program as it was typed."""
        return super().render_str(with_program(text), **arguments)
