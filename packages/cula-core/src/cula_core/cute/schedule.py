"""The order of work for packed sequences: a table of segments, longest first, made on the device from cu_seqlens."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from .types import I32
from .warp import prefix_sum

THREADS = 256  # and buckets of lengths
WORDS = THREADS + THREADS // 32  # of shared memory
COUNTERS = 4  # for passes over the segments


def counter_of(segments: cute.Tensor | None, number: int) -> cute.Tensor | None:
    """Returns the counter of the table that hands segments out to a pass, by the number of the pass. For host code."""
    if segments is None:
        return None
    return cute.make_tensor(segments.iterator + 1 + number, cute.make_layout(1))


class SegmentTable:
    """Cuts sequences into segments, sorts these by length and resets the counters that hand them out.

    Row 0 of the table holds the number of segments and the counters, the others describe a segment each. Segments of
    like length fall into one of 256 buckets; their order within one is arbitrary, which changes no result. A segment's
    slot is its number in the order of the sequences. chunk: tokens of a chunk, by which lengths are compared.
    """

    def __init__(self, chunk: int):
        self.chunk = chunk

    @cute.jit
    def __call__(
        self,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        segment_tokens: cutlass.Int32,
        longest: cutlass.Int32,
        stream,
    ):
        """cu_seqlens [N + 1]; segments int32 [1 + capacity, 6], written. segment_tokens: length of a segment, longest:
        of any."""
        self.kernel(cu_seqlens, segments, segment_tokens, longest).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        segment_tokens: cutlass.Int32,
        longest: cutlass.Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        memory = SmemAllocator().allocate_array(I32, WORDS, byte_alignment=16)
        self.make(cu_seqlens, segments, segment_tokens, longest, memory)

    @cute.jit
    def make(
        self,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        segment_tokens: cutlass.Int32,
        longest: cutlass.Int32,
        memory: cute.Pointer,
    ):
        """Makes the table with the threads of one CTA, 256. memory: shared, of 264 words."""
        tidx, _, _ = cute.arch.thread_idx()
        buckets = cute.make_tensor(memory, cute.make_layout(THREADS))
        sums = cute.make_tensor(memory + THREADS, cute.make_layout(THREADS // 32))
        sequences = I32(cute.size(cu_seqlens) - 1)
        rounds = cute.ceil_div(sequences, THREADS)
        buckets[tidx] = I32(0)
        cute.arch.sync_threads()

        for i in cutlass.range(rounds, unroll=1):
            n = i * THREADS + tidx
            if n < sequences:
                length = I32(cu_seqlens[n + 1]) - I32(cu_seqlens[n])
                for part in cutlass.range(self.parts(length, segment_tokens), unroll=1):
                    size = cutlass.min(segment_tokens, length - part * segment_tokens)
                    self.fetch_add(buckets, self.bucket(size, longest))
        cute.arch.sync_threads()
        count = buckets[tidx]
        before, total = self.scan(count, sums, tidx)
        buckets[tidx] = before
        if tidx == 0:
            segments[0, 0] = total
            for i in cutlass.range_constexpr(COUNTERS):
                segments[0, 1 + i] = I32(0)

        slot = I32(0)
        for i in cutlass.range(rounds, unroll=1):
            n = i * THREADS + tidx
            start, length, parts = I32(0), I32(0), I32(0)
            if n < sequences:
                start = I32(cu_seqlens[n])
                length = I32(cu_seqlens[n + 1]) - start
                parts = self.parts(length, segment_tokens)
            before, total = self.scan(parts, sums, tidx)
            for part in cutlass.range(parts, unroll=1):
                first = part * segment_tokens
                size = cutlass.min(segment_tokens, length - first)
                row = segments[1 + self.fetch_add(buckets, self.bucket(size, longest)), None]
                row[0], row[1], row[2] = start + first, size, n
                row[3], row[4], row[5] = slot + before + part, part, parts
            slot = slot + total

    @cute.jit
    def parts(self, length, segment_tokens):
        """Returns the number of segments; an empty sequence has one, which passes its state on."""
        return cutlass.max(cute.ceil_div(length, segment_tokens), 1)

    @cute.jit
    def bucket(self, size, longest):
        """Returns the bucket of a length, 0 for the longest."""
        chunks, most = cute.ceil_div(size, self.chunk), cute.ceil_div(longest, self.chunk)
        return THREADS - 1 - chunks * (THREADS - 1) // most

    @cute.jit
    def fetch_add(self, buckets: cute.Tensor, bucket):
        """Adds one to a bucket's counter and returns what it was before."""
        return cute.arch.atomic_add((buckets.iterator + bucket).llvm_ptr, I32(1), scope="cta")

    @cute.jit
    def scan(self, value, sums: cute.Tensor, tidx):
        """Returns the exclusive sum over the threads, and the sum of all."""
        lane, warp = tidx % 32, tidx // 32
        upto = prefix_sum(value, lane)
        if lane == 31:
            sums[warp] = upto
        cute.arch.sync_threads()
        before, total = I32(0), I32(0)
        for w in cutlass.range_constexpr(THREADS // 32):
            before = before + sums[w] if w < warp else before
            total = total + sums[w]
        cute.arch.sync_threads()
        return before + upto - value, total
