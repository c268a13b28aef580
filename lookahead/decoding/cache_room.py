"""Room in a cache whose rows come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lookahead.model.cache import TreeCache
from lookahead.model.facts import input_device

MAX_ROWS = 1024
_ROWS = {"cpu": 16, "cuda": 32}
_SLOTS = {"cpu": 2048, "cuda": 4096}  # default cache slots of a row
_STEP = 256  # slots by which the rows of a cache grow, if there is room
_LEAST_CACHE = 256 << 20  # bytes that a cache may take for any model


def rows_of(model: PreTrainedModel) -> int:
    """Default number of rows that are decoded together."""
    return _ROWS.get(input_device(model).type, _ROWS["cuda"])


def bytes_of_token(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of a token; 0 if the configuration does not show them."""
    config: Any = model.config.get_text_config(decoder=True)
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize)
    except Exception:  # other names, or layers of different sizes, for which transformers raises an error
        return 0


def cache_tokens_of(model: PreTrainedModel, rows: int) -> int:
    """Default capacity in tokens of a cache of `rows` rows, all rows together; see `stream_many`."""
    tokens = rows * _SLOTS.get(input_device(model).type, _SLOTS["cuda"])
    if not (token_bytes := bytes_of_token(model)):
        return tokens
    most_bytes = max(_LEAST_CACHE, int(model.get_memory_footprint()))
    return max(1, min(tokens, most_bytes // token_bytes))


def fits(needs: Sequence[int], cache_tokens: int) -> bool:
    """Whether rows with these needs in tokens fit a cache; a single one always does."""
    return len(needs) < 2 or len(needs) * max(needs) <= cache_tokens


def make_room(cache: TreeCache, needs: Sequence[int], cache_tokens: int, most_rows: int, longest: int = 0) -> None:
    """Grow a cache for the rows that run or join, or shrink it if it is larger than allowed.

    Args:
        cache: The cache.
        needs: Slots of each row that runs or joins.
        cache_tokens: Tokens that the cache may hold, all rows together.
        most_rows: Maximum rows that may run.
        longest: Total tokens of a row, if more than its slots.
    """
    slots, rows, needed = cache.slots, len(needs), max(needs)
    is_too_large = slots.rows > rows and slots.rows * slots.capacity > cache_tokens
    if is_too_large or needed > slots.capacity or rows > slots.rows:
        most = max(rows, min(most_rows, cache_tokens // max(longest, needed)))
        ample = -(-needed // _STEP) * _STEP  # another row may need a few slots more
        capacity = ample if most * ample <= cache_tokens else needed
        cache.resize(rows=most, capacity=max(capacity, min(slots.capacity, cache_tokens // most)))
