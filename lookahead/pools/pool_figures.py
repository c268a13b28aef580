"""What there is to say about a pool and its making, in words and rows; drawing them is left to the command line."""

from __future__ import annotations

from lookahead.ngram.pool_file import VERSION, PoolHeader
from lookahead.pools.build_pool import PoolTotals


def header_rows(path: str, header: PoolHeader) -> list[tuple[str, str]]:
    """What a pool file says of itself, each figure with its name."""
    return [
        ("pool", path),
        ("documents", f"{header.documents:,}"),
        ("tokens", f"{header.tokens:,}"),
        ("largest token id", str(header.largest_token)),
        ("bytes", f"{header.file_bytes:,}"),
        ("bytes per token", f"{header.file_bytes / header.tokens:.1f}"),
        ("tokenizer", f"{header.fingerprint:016x}"),
        ("checksum", f"{header.checksum:016x}"),
        ("format", f"version {VERSION}"),
    ]


def describe_pool(path: str, header: PoolHeader) -> str:
    """What a pool holds, in a line."""
    return f"{path}: {header.tokens:,} tokens in {header.documents:,} {_documents(header.documents)}"


def describe_reading(totals: PoolTotals) -> str:
    """What was read for a pool, in a line."""
    skipped = f", {totals.rejected:,} skipped" if totals.rejected else ""
    full = "; all the tokens it may have, the rest was not read" if totals.is_full else ""
    return f"{totals.tokens:,} tokens of {totals.documents:,} {_documents(totals.documents)} taken{skipped}{full}"


def _documents(number: int) -> str:
    """The noun that goes with a number."""
    return "document" if number == 1 else "documents"
