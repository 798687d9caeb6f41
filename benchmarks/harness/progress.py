"""A progress bar, which is drawn on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


def progress(items: Iterable[Any], stream: TextIO | None = None) -> Iterator[Any]:
    """Yields the items, each of which has a `name`, and draws on `stream` (stderr) if it is a terminal."""
    stream = stream or sys.stderr
    items = list(items)
    if not stream.isatty():
        yield from items
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield from _plain(items, stream)
        return
    with tqdm(items, file=stream, unit="setting", dynamic_ncols=True) as bar:
        for item in bar:
            bar.set_description(item.name)
            yield item


def _plain(items: list[Any], stream: TextIO) -> Iterator[Any]:
    for done, item in enumerate(items):
        stream.write(f"\r\033[K[{done}/{len(items)}] {item.name}")
        stream.flush()
        yield item
    stream.write("\r\033[K")
    stream.flush()
