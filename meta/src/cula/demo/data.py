"""Text for the demo: which files are read, how many bytes of each, and the random projections of those bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

MIN_STREAM = 32
_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT_SOURCES = (
    "README.md",
    "meta/src/cula/varlen.py",
    "meta/src/cula/kda.py",
    "meta/src/cula/lightning.py",
    "meta/src/cula/lite.py",
)


class DataError(Exception):
    """A file the demo cannot use; the message is one line for the user."""


@dataclass(frozen=True)
class Document:
    """The bytes read from one file."""

    name: str
    data: bytes

    def __len__(self) -> int:
        return len(self.data)

    def tensor(self) -> torch.Tensor:
        """The bytes as an int64 vector `[len(self)]` on the CPU."""
        return torch.tensor(list(self.data), dtype=torch.int64)


@dataclass(frozen=True)
class Corpus:
    """Documents that share a budget of bytes.

    `companions` are other texts to pack beside a lone document; they are not part of the text itself.
    """

    documents: tuple[Document, ...]
    companions: tuple[Document, ...] = ()

    def stream(self, limit: int) -> torch.Tensor:
        """All documents in a row, at most `limit` bytes (int64), repeated when shorter than `MIN_STREAM`."""
        parts = share([len(d) for d in self.documents], limit)
        text = torch.cat([d.tensor()[:n] for d, n in zip(self.documents, parts, strict=True)])
        if len(text) < MIN_STREAM:
            text = text.repeat(-(-MIN_STREAM // len(text)))[:MIN_STREAM]
        return text

    def packable(self, limit: int) -> list[tuple[str, torch.Tensor]]:
        """Name and bytes of the documents to pack, at least two of them, together at most `limit` bytes (one each)."""
        chosen = self.documents if len(self.documents) > 1 else self.documents + self.companions
        parts = share([len(d) for d in chosen], limit)
        return [(d.name, d.tensor()[:n]) for d, n in zip(chosen, parts, strict=True)]


def share(lengths: Sequence[int], budget: int) -> list[int]:
    """Split `budget` evenly over texts of these lengths, at least 1 each; what short ones leave goes to longer ones."""
    parts = [0] * len(lengths)
    left = budget
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for rank, i in enumerate(order):
        parts[i] = max(1, min(lengths[i], left // (len(order) - rank)))
        left = max(0, left - parts[i])
    return parts


def default_files() -> list[Path]:
    """README and sources of the checkout around the package or the working directory, else the package's sources."""
    for root in (_PACKAGE, Path.cwd(), *_PACKAGE.parents, *Path.cwd().parents):
        if (root / "README.md").is_file() and (root / "meta/src/cula/__init__.py").is_file():
            return [root / name for name in _CHECKOUT_SOURCES if _has_bytes(root / name)]
    return _own_sources()


def load(paths: Sequence[Path], tokens: int) -> Corpus:
    """Read at most `tokens` bytes of text from the files, shared evenly.

    Raises DataError, naming the file, when one is missing, not a file, unreadable or empty. Any bytes will do:
    a binary file is text over the same 256 symbols.
    """
    documents = [_read(path, tokens) for path in paths]
    parts = share([len(d) for d in documents], tokens)
    cut = tuple(Document(d.name, d.data[:n]) for d, n in zip(documents, parts, strict=True))
    companions: tuple[Document, ...] = ()
    if len(cut) == 1:
        others = [p for p in _own_sources() if p.resolve() != paths[0].resolve()][:3]
        companions = tuple(_read(p, max(1, tokens // 4)) for p in others)
    return Corpus(cut, companions)


def _own_sources() -> list[Path]:
    files = [
        p
        for p in sorted(_PACKAGE.glob("*.py")) + sorted(_PACKAGE.glob("demo/*.py"))
        if _has_bytes(p)
    ]
    return sorted(files, key=lambda p: p.stat().st_size, reverse=True)[:4]


def _has_bytes(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _read(path: Path, limit: int) -> Document:
    if path.is_dir():
        raise DataError(f"{path}: expected a file, got a directory")
    try:
        with path.open("rb") as handle:
            data = handle.read(limit)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not data:
        raise DataError(f"{path}: the file is empty, at least one byte is needed")
    return Document(path.name, data)


@dataclass(frozen=True)
class Projections:
    """Fixed random projections of bytes, the same for the same seed on every machine.

    Every table is drawn on the CPU in fp32; callers cast the result to the dtype and device they compute with.
    """

    seed: int

    def table(self, label: str, *shape: int) -> torch.Tensor:
        """A standard normal table of this shape; `label` keeps tables of one seed independent of each other."""
        mixed = self.seed
        for char in label:
            mixed = (mixed * 1_000_003 + ord(char)) % (2**63)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(mixed))

    def embed(self, text: torch.Tensor, label: str, heads: int, dim: int) -> torch.Tensor:
        """One unit vector per byte and head: `[..., heads, dim]` for a `text` of shape `[...]`."""
        return F.normalize(self.table(label, 256, heads, dim), dim=-1)[text]

    def blend(
        self, text: torch.Tensor, label: str, heads: int, dim: int, span: int = 3
    ) -> torch.Tensor:
        """Unit vectors that depend on the last `span` bytes, the newest weighted most: `[..., T, heads, dim]`."""
        mixed = torch.zeros(*text.shape, heads, dim)
        for back in range(min(span, text.shape[-1])):
            table = self.table(f"{label}{back}", 256, heads, dim)
            mixed[..., back:, :, :] += table[text[..., : text.shape[-1] - back]] * 0.5**back
        return F.normalize(mixed, dim=-1)
