"""The Triton programs of tree attention: `attend` processes one split of the slots, `merge` combines splits.

Splits of the keys are processed in parallel and merged by log-sum-exp: Dao et al. 2023, "Flash-Decoding for
long-context inference". One mask serves every tree: Miao et al. 2024, "SpecInfer", §4.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# These change from call to call. With specialization (on 1, on multiples of 16) tree widths would run different machine
# code, and a chain's result could depend on how many nodes are scored at once.
_VARYING = ["width", "word_count", "splits", "split_size", "window", "chunk"]
_UNALIGNED = ["lengths", "nodes", "depths", "words", "sinks"]


@triton.jit
def _first_position(depths, node, is_live, row, length, width, window, chunk):
    """The first position each node may see; nodes after the last count as the root, which sees furthest back."""
    position = length + tl.load(depths + row * width + node, mask=is_live, other=0)
    return tl.maximum(position - window + 1, position // chunk * chunk)


@triton.jit
def _tile(base, stride, offsets, is_wanted, DIM: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Load `[offsets, BLOCK]`: zeros beyond DIM and, unless ALL, in unwanted rows, which may hold NaN."""
    dims = tl.arange(0, BLOCK)
    at = base + offsets[:, None] * stride + dims[None, :]
    if ALL and BLOCK == DIM:
        tile = tl.load(at)
    elif ALL:
        tile = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(at, mask=is_wanted[:, None] & (dims < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _tree_bits(words, at, length, node, count, word_count):
    """The ancestor bits of each query row for the 64 slots from `at` on: two halves, slot at + n at bit n."""
    ahead = at - length  # the node that slot `at` holds; negative before the tree
    word = ahead >> 6
    shift = (ahead & 63).to(tl.uint64)
    low_count = tl.where((word >= 0) & (word < word_count), count, 0)
    high_count = tl.where((word >= -1) & (word < word_count - 1), count, 0)
    low = tl.load(words + word, mask=node < low_count, other=0).to(tl.uint64)
    high = tl.load(words + word + 1, mask=node < high_count, other=0).to(tl.uint64)
    bits = (low >> shift) | ((high << 1) << (63 - shift))
    return bits.to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def _fold(
    q, k, v, peak, total, acc, is_seen, factor, squeeze,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one block of keys into the running softmax of every row; `peak` is in units of log2.

    A block of which a row sees nothing changes no bit of that row: its peak stays, so the factor on earlier sums is
    exactly 1, and the added sum is exactly 0. Multiplications and additions that the compiler might fuse in one
    caller and not in the other are fused explicitly.
    """
    keys = tl.trans(k)
    if UPCAST:
        keys = keys.to(tl.float32)
    scores = tl.dot(q, keys, input_precision=PRECISION)
    if SOFTCAP:
        fade = tl.exp2(tl.abs(scores * squeeze) * (-2.0 * LOG2E))  # at most 1, so tanh cannot overflow
        bent = (1.0 - fade) / (1.0 + fade)
        scores = tl.where(scores < 0.0, -bent, bent)
    if MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    shrink = tl.exp2(peak - base)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    weights = weights.to(v.dtype)
    if UPCAST:
        weights = weights.to(tl.float32)
        v = v.to(tl.float32)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def _share(peak, total, sinks, HAS_SINKS: tl.constexpr):
    """The final factor of a sum of weighted values; at `sinks` is a logit that takes part in the softmax."""
    share = 1.0 / total
    if HAS_SINKS:
        sink = tl.load(sinks).to(tl.float32) * LOG2E
        top = tl.maximum(peak, sink)
        kept = tl.exp2(peak - top)
        share = kept / tl.fma(total, kept, tl.exp2(sink - top))
    return share


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def attend(
    query, keys, values, lengths, nodes, depths, words, sinks, out, sums, peaks,
    q_row, q_head, q_node, k_row, k_slot, k_head, v_row, v_slot, v_head,
    width, word_count, splits, split_size, factor, squeeze, window, chunk,
    GROUPS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr, HAS_LIMIT: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    IN_ONE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of packed query rows of one KV head against one split of the slots.

    Writes the output if there is only one split (IN_ONE), else the split's sums and peaks for `merge`.
    """
    blocks = tl.cdiv(width * GROUPS, BLOCK_ROWS)
    split = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    count = tl.load(nodes + row)
    packed = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = packed // GROUPS
    is_live = node < count
    start = split * split_size
    stop = tl.minimum(start + split_size, length + count)
    begin = start
    nearest = 0
    first = tl.zeros([BLOCK_ROWS], tl.int32)
    if HAS_LIMIT:
        first = _first_position(depths, node, is_live, row, length, width, window, chunk)
        nearest = tl.maximum(tl.min(first), 0)
        begin = tl.maximum(start, nearest // BLOCK_KEYS * BLOCK_KEYS)
    if not IN_ONE:  # noqa: SIM102 - the compiler decides this one, the GPU the next
        if (begin >= stop) | (block * BLOCK_ROWS >= count * GROUPS):
            return  # no visible slot or no live row: merge does not read this split for these rows

    head = kv_head * GROUPS + packed % GROUPS
    q = _tile(query + row * q_row, 1, head * q_head + node * q_node, is_live, DIM, BLOCK_DIM, False)
    if UPCAST:
        q = q.to(tl.float32)
    k_base = keys + row * k_row + kv_head * k_head + start.to(tl.int64) * k_slot
    v_base = values + row * v_row + kv_head * v_head + start.to(tl.int64) * v_slot
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    columns = tl.arange(0, BLOCK_KEYS)

    committed = tl.minimum(stop, length // BLOCK_KEYS * BLOCK_KEYS)  # whole blocks of committed slots end here
    for at in tl.range(begin, committed, BLOCK_KEYS, num_stages=STAGES):
        slot = at + columns
        k = _tile(k_base, k_slot, slot - start, slot >= nearest, DIM, BLOCK_DIM, not HAS_LIMIT)
        v = _tile(v_base, v_slot, slot - start, slot >= nearest, VALUE_DIM, BLOCK_VALUE, not HAS_LIMIT)
        is_seen = slot[None, :] >= first[:, None]
        peak, total, acc = _fold(
            q, k, v, peak, total, acc, is_seen, factor, squeeze, HAS_LIMIT, SOFTCAP, UPCAST, PRECISION
        )

    row_words = words + (row * width + node) * word_count
    for at in tl.range(tl.maximum(begin, committed), stop, BLOCK_KEYS, num_stages=2):
        slot = at + columns
        is_there = (slot >= nearest) & (slot < length + count)
        k = _tile(k_base, k_slot, slot - start, is_there, DIM, BLOCK_DIM, False)
        v = _tile(v_base, v_slot, slot - start, is_there, VALUE_DIM, BLOCK_VALUE, False)
        low, high = _tree_bits(row_words, at, length, node, count, word_count)
        bits = low[:, None]
        if BLOCK_KEYS > 32:
            bits = tl.where(columns[None, :] < 32, bits, high[:, None])
        is_seen = ((bits >> (columns[None, :] & 31).to(tl.uint32)) & 1) != 0
        is_seen = is_seen | (slot < length)[None, :]
        if HAS_LIMIT:
            ahead = slot - length
            deep = tl.load(depths + row * width + ahead, mask=(ahead >= 0) & (ahead < count), other=0)
            position = tl.where(ahead >= 0, length + deep, slot)
            is_seen = is_seen & (position[None, :] >= first[:, None])
        peak, total, acc = _fold(q, k, v, peak, total, acc, is_seen, factor, squeeze, True, SOFTCAP, UPCAST, PRECISION)

    dims = tl.arange(0, BLOCK_VALUE)
    if IN_ONE:
        share = _share(peak, total, sinks + head, HAS_SINKS)
        result = tl.where(is_live[:, None], acc * share[:, None], 0.0)
        place = ((row * width + node) * tl.num_programs(1) * GROUPS + head) * VALUE_DIM
        is_written = (node < width)[:, None] & (dims < VALUE_DIM)[None, :]
        tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_written)
    else:
        part = ((row * tl.num_programs(1) + kv_head) * splits + split) * width * GROUPS + packed
        tl.store(sums + part[:, None] * BLOCK_VALUE + dims[None, :], acc, mask=is_live[:, None])
        tl.store(peaks + part * 2, peak, mask=is_live)
        tl.store(peaks + part * 2 + 1, total, mask=is_live)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def merge(
    lengths, nodes, depths, sinks, out, sums, peaks, width, splits, split_size, window, chunk,
    GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one packed query row: a left fold over groups of AT_ONCE splits, counted from split 0."""
    packed = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    node = packed // GROUPS
    head = kv_head * GROUPS + packed % GROUPS
    length = tl.load(lengths + row)
    count = tl.load(nodes + row)
    last = tl.cdiv(length + count, split_size)
    nearest = 0
    if HAS_LIMIT:
        first = _first_position(depths, node, node < count, row, length, width, window, chunk)
        nearest = tl.maximum(first, 0) // split_size
    if node >= count:
        last = 0
    dims = tl.arange(0, BLOCK_VALUE)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_VALUE], tl.float32)
    for at in range(nearest // AT_ONCE * AT_ONCE, last, AT_ONCE):
        split = at + tl.arange(0, AT_ONCE)
        is_there = (split >= nearest) & (split < last)
        part = ((row * tl.num_programs(1) + kv_head) * splits + split) * width * GROUPS + packed
        part_peak = tl.load(peaks + part * 2, mask=is_there, other=float("-inf"))
        part_total = tl.load(peaks + part * 2 + 1, mask=is_there, other=0.0)
        part_sum = tl.load(sums + part[:, None] * BLOCK_VALUE + dims[None, :], mask=is_there[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(part_peak, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(part_peak - base)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(part_total * weight, 0)
        acc = acc * shrink + tl.sum(part_sum * weight[:, None], 0)
        peak = new_peak
    result = tl.where(node < count, acc * _share(peak, total, sinks + head, HAS_SINKS), 0.0)
    place = ((row * width + node) * tl.num_programs(1) * GROUPS + head) * VALUE_DIM
    tl.store(out + place + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
