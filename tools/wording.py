"""Finds words that only this repository uses in their sense: `python tools/wording.py`.

A reader who has not seen the code knows none of them. Documents are read, and the comments and strings of sources.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT, sources

DOCUMENTS = ("*.md", "docs/*.md", "meta/*.md", "packages/*/*.md", "benchmarks/*.md")
SOURCES = ("meta/src", "packages/*/src")
# What is refused -> what to write instead.
WORDS = {
    r"\b(?:rooms|(?:a|each|every|this|that|its) room)\b": "module, folder, or memory",
    r"\bof no account\b": "does not matter",
    r"\bbytes bind\b|\b(?:whatever|what|which) binds\b|\bbinds? (?:first|on)\b": "is limited by",
    r"\bas (?:it lies|they lie)\b": "in place, or without a copy",
    r"\bnobody (?:owns|has)\b": "belongs to no ...",
    r"\bthat there (?:is|are) not\b": "unknown, or does not exist",
    r"\bwant(?:s)? to know\b": "which facts, for whom",
}


def offences(text: str) -> Iterator[tuple[int, str, str]]:
    """The line of every refused word, the word, and what to write instead. A line break counts as a space."""
    for pattern, instead in WORDS.items():
        for found in re.finditer(pattern.replace(" ", r"\s+(?:#\s*)?"), text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def prose(source: str) -> str:
    """A Python source with everything blanked but comments and strings, on the lines where they stand."""
    lines: list[list[str]] = [[] for _ in source.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, part in enumerate(token.string.splitlines(), token.start[0] - 1):
                lines[number].append(part)
    return "\n".join(map(" ".join, lines))


def violations(root: Path = ROOT) -> list[str]:
    """One line per refused word: `path:line: what, and what to write`."""
    documents = [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]
    texts = {path: path.read_text() for path in documents}
    for pattern in SOURCES:
        for folder in sorted(root.glob(pattern)):
            texts |= {path: prose(path.read_text()) for path in sources(folder)}
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {word!r}: write {instead}"
        for path, text in texts.items()
        for number, word, instead in sorted(offences(text))
    ]


def main(root: Path = ROOT) -> int:
    broken = violations(root)
    for line in broken:
        print(line)
    print(f"wording: {len(broken)} refused" if broken else "wording: nothing refused")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
