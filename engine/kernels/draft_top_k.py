"""The K most probable tokens of each draft position, with log-probabilities of fixed bits.

Order: larger logit first, ties (0 and -0 are one) to the lower token id; tokens of logit -inf come
last, marked by log-probability -inf. With m the row's largest logit,
  log_prob(x) = fp32(fp32(x - m) - ln S),   S = sum over the row of e^(x - m).
Best-first trees branch on the last bit of these values, so each step is a stated fp32 or integer
operation (goldens/draft_top_k.py does the same): e^d is a degree-6 polynomial by fma, its terms are
integers in units of 2^-44, and integer sums have no order. The sum is taken chunk by chunk of 4096
tokens, each relative to the chunk's largest logit, and the chunks are then scaled to m. Against the
exact log-probability the error is below (4 + 2 |x - m| + 2 ln S) 2^-24 + 2^-23; values never rise
along a row and are at most 0.

Decomposition. `_scan`, a block a chunk of a row: largest logit and sum of the chunk, largest logit
of every group of 32 neighbouring tokens. `_select`, a block a row: the K groups with the largest
maxima hold the K best tokens, whatever the data, so a search on the maxima, which lie in registers,
finds a threshold that K to LIST groups pass, and only their tokens above the threshold are read. A
search among those leaves little more than K, which are ranked by counting. Where ties or plateaus
let more than CANDIDATES pass, the search goes on among the tokens in memory. Keys are (logit, id),
all different, so each search ends; a step counts at three thresholds and leaves a quarter of the
range. A row's bits depend on its own logits alone.

status[row]: 0; 1 = a NaN or +inf among the logits; 2 = every logit is -inf. Such a row gets
log-probabilities -inf and tokens -1.
"""

import math

from engine import activation
from engine.device import (
    cdiv,
    check,
    cuda,
    f32,
    family,
    function,
    i32,
    kernel,
    ptr,
    static_range,
    u32,
    u64,
)
from engine.ptx import (
    advance,
    bits_to_f32,
    f32_to_bits,
    fma,
    mul_high_u64,
    pdl_launch_dependents,
    pdl_wait,
    popc,
    warp_max_u32,
    warp_sum_u32,
)
from engine.warp import FULL, SIGN, bits_of_key, order_key

MAX_K = 1024
GROUP = 32  # tokens: one load of a warp
CHUNK = 4096  # tokens: a block's; part of the definition of the log-probability
HEADER = 4  # workspace words a chunk: sum low, sum high, key of the largest logit, anything bad
SCAN_THREADS = 256
SCAN_WARPS = SCAN_THREADS // 32
SCAN_GROUPS = CHUNK // GROUP // SCAN_WARPS  # of a warp
SELECT_THREADS = 1024
SELECT_WARPS = SELECT_THREADS // 32
LIST = 1536  # group numbers
HELD = 8  # groups of a thread in registers: a vocabulary of 262144; of more, the rest is read again
BATCH = 8  # groups of a warp whose tokens are fetched together
CANDIDATES = 2048
KEPT = 1184  # most that are ranked: K, an eighth more, and zeros up to whole turns

BAD_LOGIT, NO_TOKEN = 1, 2
KEY_OF_MINUS_INFINITY = 0x007FFFFF

# e^d = 2^(d log2 e); 2^f on [-1/2, 1/2] to 2e-9, fitted with the constant term 1.
LOG2_E = 1.44269502162933349609375
E1, E2, E3 = 0.6931471824645996, 0.24022647738456726, 0.055503323674201965
E4, E5, E6 = 0.00961843691766262, 0.0013398875016719103, 0.00015353361959569156
SMALLEST_EXPONENT = -60.0  # far below 2^-44
TO_INTEGER, TO_INTEGER_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23: adding it rounds to an integer
UNIT = 44  # S counts in 2^-44
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860676533018704503775e-06
SQRT2 = 1.41421353816986083984375


@function
def _key(value):
    """u32 that orders as the f32 does; -0 is 0."""
    bits = f32_to_bits(value)
    if bits == u32(SIGN):
        bits = u32(0)
    return order_key(bits)


@function
def _value(key):
    return bits_to_f32(bits_of_key(key))


@function
def _exponential(d):
    """e^d for d <= 0 as (mantissa of 24 bits, shift): mantissa 2^-(23 + shift)."""
    y = max(fma(d, f32(LOG2_E), f32(0)), f32(SMALLEST_EXPONENT))
    shifted = f32(y + f32(TO_INTEGER))
    f = f32(y - f32(shifted - f32(TO_INTEGER)))
    p = fma(f32(E6), f, f32(E5))
    p = fma(p, f, f32(E4))
    p = fma(p, f, f32(E3))
    p = fma(p, f, f32(E2))
    p = fma(p, f, f32(E1))
    bits = f32_to_bits(fma(p, f, f32(1)))
    mantissa = u32(u32(bits & u32(0x7FFFFF)) | u32(0x800000))
    exponent = u32(f32_to_bits(shifted) - u32(TO_INTEGER_BITS))  # of y, negative or 0
    return mantissa, u32(u32(u32(127) - u32(bits >> u32(23))) - exponent)


@function
def _logarithm(total):
    """ln of total 2^-44 for total in [2^44, 2^63)."""
    exponent = f32(0)
    while total >= u64(1 << (UNIT + 1)):
        total = u64(total >> u64(1))
        exponent = f32(exponent + f32(1))
    x = f32(f32(u32(total >> u64(UNIT - 23))) * f32(2**-23))
    if x > f32(SQRT2):
        x = f32(x * f32(0.5))
        exponent = f32(exponent + f32(1))
    s = f32(f32(x - f32(1)) / f32(x + f32(1)))
    s2 = fma(s, s, f32(0))
    q = fma(s2, f32(1 / 9), f32(1 / 7))
    q = fma(q, s2, f32(1 / 5))
    q = fma(q, s2, f32(1 / 3))
    q = fma(q, s2, f32(0))
    twice = f32(s + s)
    return fma(exponent, f32(LN2_HIGH), fma(exponent, f32(LN2_LOW), fma(twice, q, twice)))


@function
def _warp_sum_u64(value):
    for step in static_range(5):
        low = u32(cuda.shfl_xor_sync(FULL, i32(value & u64(FULL)), 16 >> step))
        high = u32(cuda.shfl_xor_sync(FULL, i32(value >> u64(32)), 16 >> step))
        value = u64(value + u64(u64(u64(high) << u64(32)) | u64(low)))
    return value


@function
def _block_counts(counts, totals, turn):
    """Three sums over the block; row turn % 3 of totals [3, 3] is 0 before, the next is cleared."""
    here = u32(u32(turn % u32(3)) * u32(3))
    following = u32(u32(u32(turn + u32(1)) % u32(3)) * u32(3))
    for i in static_range(3):
        count = warp_sum_u32(counts[i])
        if u32(u32(cuda.threadIdx.x) & u32(31)) == u32(0):
            cuda.atomic.add(totals, u32(here + u32(i)), count)
    if u32(cuda.threadIdx.x) < u32(3):
        totals[u32(following + u32(cuda.threadIdx.x))] = u32(0)
    cuda.syncthreads()
    return (
        u32(totals[here]),
        u32(totals[u32(here + u32(1))]),
        u32(totals[u32(here + u32(2))]),
    )


@function
def _halfway(low, high):
    return u64(low + u64(u64(high - low) >> u64(1)))


@function
def _thresholds(low, high):
    """Three between low and high that leave quarters."""
    middle = _halfway(low, high)
    return _halfway(low, middle), middle, _halfway(middle, high)


@function
def _narrowed(low, high, count, at, found, k):
    """The quarter whose lower end at least k reach and whose upper end fewer do, and how many."""
    if found[2] >= k:
        low, count = at[2], found[2]
    elif found[1] >= k:
        low, high, count = at[1], at[2], found[1]
    elif found[0] >= k:
        low, high, count = at[0], at[1], found[0]
    else:
        high = at[0]
    return low, high, count


@function
def _ordered(key, index):
    """Larger key first, then lower index."""
    return u64(u64(u64(key) << u64(32)) | u64(u32(index ^ u32(FULL))))


@family({"bf16": True}, {"bf16": False})
def _scan(*, bf16: bool):
    load = activation.load(bf16)

    @kernel(threads=SCAN_THREADS, registers=64, dependent_launch=True)
    def draft_top_k_scan(
        logits: ptr[activation.element(bf16)],  # [rows, vocabulary]
        vocabulary: u32,
        chunks: u32,
        words: u32,
        workspace: ptr[u32],  # [rows, words], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        warp_top = cuda.shared.array(SCAN_WARPS, u32)
        warp_sum = cuda.shared.array(SCAN_WARPS, u64)
        chunk, row = u32(cuda.blockIdx.x), u32(cuda.blockIdx.y)
        thread = u32(cuda.threadIdx.x)
        warp, lane = u32(thread >> u32(5)), u32(thread & u32(31))
        source = advance(logits, u64(u64(row) * u64(vocabulary)))
        out = advance(workspace, u64(u64(row) * u64(words)))
        group = u32(u32(u32(chunk * u32(SCAN_WARPS)) + warp) * u32(SCAN_GROUPS))
        values = cuda.local.array(SCAN_GROUPS, f32)
        for i in static_range(SCAN_GROUPS):
            token = u32(u32(u32(group + u32(i)) * u32(GROUP)) + lane)
            values[i] = f32(-math.inf)
            if token < vocabulary:
                values[i] = load(source, token)
        top = u32(0)
        mine = u32(0)
        bad = False
        for i in static_range(SCAN_GROUPS):
            bad = bad or not values[i] < f32(math.inf)
            best = warp_max_u32(_key(values[i]))
            top = max(top, best)
            if lane == u32(i):
                mine = best
        if lane < u32(SCAN_GROUPS) and u32(u32(group + lane) * u32(GROUP)) < vocabulary:
            out[u32(u32(chunks * u32(HEADER)) + u32(group + lane))] = mine
        if lane == u32(0):
            warp_top[warp] = top
        any_bad = cuda.syncthreads_or(i32(BAD_LOGIT) if bad else i32(0))
        for w in static_range(SCAN_WARPS):
            top = max(top, u32(warp_top[u32(w)]))
        highest = _value(top)
        total = u64(0)
        if highest > f32(-math.inf):
            for i in static_range(SCAN_GROUPS):
                mantissa, shift = _exponential(f32(values[i] - highest))
                total = u64(total + u64(u64(u64(mantissa) << u64(UNIT - 23)) >> u64(shift)))
        total = _warp_sum_u64(total)
        if lane == u32(0):
            warp_sum[warp] = total
        cuda.syncthreads()
        if thread == u32(0):
            for w in static_range(1, SCAN_WARPS):
                total = u64(total + u64(warp_sum[u32(w)]))
            header = u32(chunk * u32(HEADER))
            out[header] = u32(total & u64(FULL))
            out[u32(header + u32(1))] = u32(total >> u64(32))
            out[u32(header + u32(2))] = top
            out[u32(header + u32(3))] = u32(any_bad)

    return draft_top_k_scan


@family({"bf16": True}, {"bf16": False})
def _select(*, bf16: bool):
    load = activation.load(bf16)

    @kernel(threads=SELECT_THREADS, registers=64, dependent_launch=True)
    def draft_top_k_select(
        logits: ptr[activation.element(bf16)],  # [rows, vocabulary]
        workspace: ptr[u32],  # [rows, words]
        vocabulary: u32,
        chunks: u32,
        words: u32,
        k: u32,
        log_probs: ptr[f32],  # [rows, k], out
        tokens: ptr[i32],  # [rows, k], out
        status: ptr[i32],  # [rows], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        totals = cuda.shared.array(9, u32)
        sizes = cuda.shared.array(3, u32)  # groups, candidates, kept
        shared_top = cuda.shared.array(2, u32)
        shared_log = cuda.shared.array(1, f32)
        chosen = cuda.shared.array(LIST, u32)
        candidates = cuda.shared.array(CANDIDATES, u64)
        kept = cuda.shared.array(KEPT, u64)
        held = cuda.local.array(HELD, u64)
        values = cuda.local.array(BATCH, f32)
        row = u32(cuda.blockIdx.x)
        thread = u32(cuda.threadIdx.x)
        warp, lane = u32(thread >> u32(5)), u32(thread & u32(31))
        source = advance(logits, u64(u64(row) * u64(vocabulary)))
        header = advance(workspace, u64(u64(row) * u64(words)))
        maxima = advance(header, u32(chunks * u32(HEADER)))
        groups = u32(u32(vocabulary + u32(GROUP - 1)) // u32(GROUP))
        first_out = u32(row * k)
        for j in static_range(HELD):
            i = u32(thread + u32(SELECT_THREADS * j))
            held[j] = u64(0)
            if i < groups:
                held[j] = _ordered(u32(maxima[i]), i)

        if warp == u32(0):
            top = u32(0)
            bad = u32(0)
            c = lane
            while c < chunks:
                top = max(top, u32(header[u32(u32(c * u32(HEADER)) + u32(2))]))
                bad = u32(bad | u32(header[u32(u32(c * u32(HEADER)) + u32(3))]))
                c = u32(c + u32(32))
            top = warp_max_u32(top)
            bad = warp_max_u32(bad)
            highest = _value(top)
            total = u64(0)
            c = lane
            while c < chunks:
                at = u32(c * u32(HEADER))
                part = u64(u64(header[at]) | u64(u64(header[u32(at + u32(1))]) << u64(32)))
                if part != u64(0):  # 0 where the whole chunk is -inf
                    d = f32(_value(u32(header[u32(at + u32(2))])) - highest)
                    mantissa, shift = _exponential(d)
                    scaled = mul_high_u64(u64(part << u64(1)), u64(u64(mantissa) << u64(40)))
                    total = u64(total + u64(scaled >> u64(shift)))
                c = u32(c + u32(32))
            total = _warp_sum_u64(total)
            if lane == u32(0):
                if top <= u32(KEY_OF_MINUS_INFINITY):
                    bad = u32(bad | u32(NO_TOKEN))
                shared_top[0] = top
                shared_top[1] = bad
                for i in static_range(3):
                    totals[i] = u32(0)
                    sizes[i] = u32(0)
                if bad == u32(0):
                    shared_log[0] = _logarithm(total)
        cuda.syncthreads()
        top = u32(shared_top[0])
        bad = u32(shared_top[1])
        if thread == u32(0):
            status[row] = i32(bad & u32(BAD_LOGIT)) if bad & u32(BAD_LOGIT) else i32(bad)
        if bad != u32(0):
            i = thread
            while i < k:
                log_probs[u32(first_out + i)] = f32(-math.inf)
                tokens[u32(first_out + i)] = i32(-1)
                i = u32(i + u32(SELECT_THREADS))
            return

        # Groups: the largest threshold found that at least k of them reach, or all of them.
        turn = u32(0)
        enough = u32(u32(k + u32(k >> u32(2))) + u32(32))
        count = groups
        low, high = u64(0), u64(u64(u64(top) + u64(1)) << u64(32))
        while count > enough:
            at = _thresholds(low, high)
            one, two, three = u32(0), u32(0), u32(0)
            for j in static_range(HELD):
                one = u32(one + (u32(1) if held[j] >= at[0] else u32(0)))
                two = u32(two + (u32(1) if held[j] >= at[1] else u32(0)))
                three = u32(three + (u32(1) if held[j] >= at[2] else u32(0)))
            i = u32(thread + u32(SELECT_THREADS * HELD))
            while i < groups:
                entry = _ordered(u32(maxima[i]), i)
                one = u32(one + (u32(1) if entry >= at[0] else u32(0)))
                two = u32(two + (u32(1) if entry >= at[1] else u32(0)))
                three = u32(three + (u32(1) if entry >= at[2] else u32(0)))
                i = u32(i + u32(SELECT_THREADS))
            found = _block_counts((one, two, three), totals, turn)
            turn = u32(turn + u32(1))
            low, high, count = _narrowed(low, high, count, at, found, k)
        for j in static_range(HELD):
            i = u32(thread + u32(SELECT_THREADS * j))
            if i < groups and held[j] >= low:
                chosen[cuda.atomic.add(sizes, 0, u32(1))] = i
        i = u32(thread + u32(SELECT_THREADS * HELD))
        while i < groups:
            if _ordered(u32(maxima[i]), i) >= low:
                chosen[cuda.atomic.add(sizes, 0, u32(1))] = i
            i = u32(i + u32(SELECT_THREADS))
        cuda.syncthreads()
        listed = u32(sizes[0])

        # Their tokens: all that reach the groups' threshold are candidates, if there is room.
        low, high = u64(u64(low >> u64(32)) << u64(32)), u64(u64(u64(top) + u64(1)) << u64(32))
        below = u32(u32(u32(1) << lane) - u32(1))  # the lanes
        g = warp
        while g < listed:
            for j in static_range(BATCH):
                values[j] = f32(-math.inf)
                other = u32(g + u32(SELECT_WARPS * j))
                if other < listed:
                    token = u32(u32(chosen[other] * u32(GROUP)) + lane)
                    if token < vocabulary:
                        values[j] = load(source, token)
            for j in static_range(BATCH):
                other = u32(g + u32(SELECT_WARPS * j))
                if other < listed:
                    token = u32(u32(chosen[other] * u32(GROUP)) + lane)
                    entry = _ordered(_key(values[j]), token)
                    passes = u32(cuda.ballot_sync(FULL, token < vocabulary and entry >= low))
                    to = u32(0)
                    if lane == u32(0):
                        to = u32(cuda.atomic.add(sizes, 1, popc(passes)))
                    to = u32(u32(cuda.shfl_sync(FULL, i32(to), 0)) + popc(u32(passes & below)))
                    if u32(u32(passes >> lane) & u32(1)) == u32(1) and to < u32(CANDIDATES):
                        candidates[to] = entry
            g = u32(g + u32(SELECT_WARPS * BATCH))
        cuda.syncthreads()
        size = u32(sizes[1])
        if size > u32(CANDIDATES):
            while size > u32(CANDIDATES):
                at = _thresholds(low, high)
                one, two, three = u32(0), u32(0), u32(0)
                g = warp
                while g < listed:
                    token = u32(u32(chosen[g] * u32(GROUP)) + lane)
                    if token < vocabulary:
                        entry = _ordered(_key(load(source, token)), token)
                        one = u32(one + (u32(1) if entry >= at[0] else u32(0)))
                        two = u32(two + (u32(1) if entry >= at[1] else u32(0)))
                        three = u32(three + (u32(1) if entry >= at[2] else u32(0)))
                    g = u32(g + u32(SELECT_WARPS))
                found = _block_counts((one, two, three), totals, turn)
                turn = u32(turn + u32(1))
                low, high, size = _narrowed(low, high, size, at, found, k)
            if thread == u32(0):
                sizes[1] = u32(0)
            cuda.syncthreads()
            g = warp
            while g < listed:
                token = u32(u32(chosen[g] * u32(GROUP)) + lane)
                if token < vocabulary:
                    entry = _ordered(_key(load(source, token)), token)
                    if entry >= low:
                        candidates[cuda.atomic.add(sizes, 1, u32(1))] = entry
                g = u32(g + u32(SELECT_WARPS))
            cuda.syncthreads()

        # Little more than k of the candidates.
        mine, other_mine = u64(0), u64(0)
        if thread < size:
            mine = u64(candidates[thread])
        if u32(thread + u32(SELECT_THREADS)) < size:
            other_mine = u64(candidates[u32(thread + u32(SELECT_THREADS))])
        enough = u32(u32(k + u32(k >> u32(3))) + u32(8))
        while size > enough:
            at = _thresholds(low, high)
            one = u32(u32(1) if mine >= at[0] else u32(0))
            two = u32(u32(1) if mine >= at[1] else u32(0))
            three = u32(u32(1) if mine >= at[2] else u32(0))
            one = u32(one + (u32(1) if other_mine >= at[0] else u32(0)))
            two = u32(two + (u32(1) if other_mine >= at[1] else u32(0)))
            three = u32(three + (u32(1) if other_mine >= at[2] else u32(0)))
            found = _block_counts((one, two, three), totals, turn)
            turn = u32(turn + u32(1))
            low, high, size = _narrowed(low, high, size, at, found, k)
        if mine >= low and mine != u64(0):
            kept[cuda.atomic.add(sizes, 2, u32(1))] = mine
        if other_mine >= low and other_mine != u64(0):
            kept[cuda.atomic.add(sizes, 2, u32(1))] = other_mine
        if thread < u32(16):
            kept[u32(size + thread)] = u64(0)
        cuda.syncthreads()

        # Four lanes count how many are ahead of one.
        log_total = shared_log[0]
        highest = _value(top)
        base = u32(warp * u32(8))
        while base < size:
            place = u32(base + u32(lane >> u32(2)))
            ahead = u32(0)
            entry = u64(0)
            if place < size:
                entry = u64(kept[place])
                j = u32(lane & u32(3))
                while j < size:
                    for i in static_range(4):
                        further = u64(kept[u32(j + u32(4 * i))])
                        ahead = u32(ahead + (u32(1) if further > entry else u32(0)))
                    j = u32(j + u32(16))
            ahead = u32(ahead + u32(cuda.shfl_xor_sync(FULL, i32(ahead), 1)))
            ahead = u32(ahead + u32(cuda.shfl_xor_sync(FULL, i32(ahead), 2)))
            if place < size and u32(lane & u32(3)) == u32(0) and ahead < k:
                d = f32(_value(u32(entry >> u64(32))) - highest)
                log_probs[u32(first_out + ahead)] = f32(d - log_total)
                tokens[u32(first_out + ahead)] = i32(u32(entry & u64(FULL)) ^ u32(FULL))
            base = u32(base + u32(SELECT_THREADS // 4))

    return draft_top_k_select


def workspace_words(vocabulary: int) -> int:
    """32-bit words of workspace that a row needs."""
    return HEADER * cdiv(vocabulary, CHUNK) + cdiv(vocabulary, GROUP)


def draft_top_k(logits, *, top_k: int, log_probs, tokens, status, workspace, stream=None) -> None:
    """logits [requests, length, vocabulary] bf16 or fp32; log_probs fp32 and tokens int32
    [requests, length, top_k], status int32 [requests, length]; workspace uint32
    [requests, length, words], words at least workspace_words(vocabulary). top_k <= vocabulary;
    top_k > 1024 is NotImplementedError."""
    dims = check(
        "draft_top_k",
        logits=(logits, "requests length vocabulary", activation.ACTIVATIONS),
        log_probs=(log_probs, "requests length chosen", "float32"),
        tokens=(tokens, "requests length chosen", "int32"),
        status=(status, "requests length", "int32"),
        workspace=(workspace, "requests length words", "uint32"),
    )
    vocabulary = dims["vocabulary"]
    if not 1 <= top_k <= vocabulary:
        raise ValueError(f"draft_top_k: top_k is {top_k}, expected 1..{vocabulary} (vocabulary)")
    if top_k > MAX_K:
        raise NotImplementedError(f"draft_top_k: top_k is {top_k}, more than {MAX_K}")
    if dims["chosen"] != top_k:
        raise ValueError(f"draft_top_k: tokens has {dims['chosen']} columns, expected {top_k}")
    if dims["words"] < workspace_words(vocabulary):
        raise ValueError(
            f"draft_top_k: workspace has {dims['words']} words a row, "
            f"expected at least {workspace_words(vocabulary)}"
        )
    rows, chunks = dims["requests"] * dims["length"], cdiv(vocabulary, CHUNK)
    bf16 = activation.is_bf16(logits)
    _scan(bf16=bf16).launch(
        (chunks, rows), logits, vocabulary, chunks, dims["words"], workspace, stream=stream
    )
    _select(bf16=bf16).launch(
        rows, logits, workspace, vocabulary, chunks, dims["words"], top_k, log_probs, tokens,
        status, stream=stream,
    )  # fmt: skip
