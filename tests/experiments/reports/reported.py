"""Helpers that tests of reports share."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from cabs.experiments.problems import CIFAR10
from cabs.experiments.runs.config import RunConfig


def config(**given: Any) -> RunConfig:
    return RunConfig.make(CIFAR10, {"examples": 10_000, "threads": 1, **given})


class Parser(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def page_data(page: str) -> list[dict[str, Any]]:
    """The numbers in a page."""
    data = re.search(r'id="sections">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    sections: list[dict[str, Any]] = json.loads(data[1])
    return sections
