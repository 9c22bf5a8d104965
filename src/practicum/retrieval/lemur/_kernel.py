"""MaxSim of a query with chosen documents, compiled by LLVM for the processor it runs on.

The tokens of the candidates lie scattered over memory, so a matrix product needs them gathered first, and that copy
costs as much as the product. This kernel reads each token once, where it lies. The lanes of a vector register stand
for query tokens: for eight document tokens at a time it adds ``token[x] * query[:, x]`` over x in eight registers,
and then keeps the maximum of each lane.

A block of lanes that few query tokens remain for holds them for 2 or 4 values of x at a time, so that no more than
half of a register is ever idle; the sums over those are added at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir

ROWS = 8
GROUPS = (1, 2, 4)
INT16, INT32, INT64, FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


@cache
def host_lanes() -> int:
    """Numbers in a vector register of this processor; 8 where those are narrower, for registers by pairs."""
    return 16 if host_features().get("avx512f") else 8


@cache
def host_features() -> Any:
    """What this processor can do; nothing beyond the basics where LLVM cannot tell."""
    try:
        return llvm.get_host_cpu_features()
    except RuntimeError:
        return llvm.FeatureMap()


def score_candidates(
    tokens: torch.Tensor,
    document_offsets: torch.Tensor,
    query_tokens: torch.Tensor,
    query_lengths: torch.Tensor,
    candidates: torch.Tensor,
    lanes: int | None = None,
) -> torch.Tensor:
    """Return the MaxSim of each query with each of its candidates; -inf where a candidate is negative.

    All tensors are C-contiguous and on the CPU, and every candidate is a document: nothing is verified here. The
    queries are divided among as many threads as torch may use.

    Parameters
    ----------
    tokens : tensor of shape (T, d), float32 or bfloat16
    document_offsets : tensor of shape (N + 1,), int64
    query_tokens : tensor of shape (S, d), float32
    query_lengths : tensor of shape (Q,), int64
    candidates : tensor of shape (Q, K), int64
    lanes : int, optional
        `host_lanes` by default.

    Returns
    -------
    tensor of shape (Q, K), float32
    """
    n_queries, k = candidates.shape
    scores = torch.empty(n_queries, k)
    lanes = host_lanes() if lanes is None else lanes
    packed, plan, counts = pack_queries(query_tokens.numpy(), query_lengths.numpy(), lanes)
    kernel = compiled(tokens.dtype, tokens.shape[1], lanes)
    pointers = [x.data_ptr() for x in (tokens, document_offsets)] + [x.ctypes.data for x in (packed, plan, counts)]

    def score(first: int, last: int) -> None:
        scratch = np.empty(ROWS * tokens.shape[1] + int(plan[:, 4].max()), np.float32)
        kernel(*pointers, scratch.ctypes.data, candidates.data_ptr(), k, first, last, scores.data_ptr())

    threads = min(torch.get_num_threads(), n_queries)
    if threads == 1:
        score(0, n_queries)
    else:
        bounds = np.linspace(0, n_queries, threads + 1).astype(int).tolist()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(score, bounds[:-1], bounds[1:]))
    return scores


def pack_queries(tokens: np.ndarray, lengths: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay the queries out as the kernel reads them.

    Returns
    -------
    packed : ndarray of shape (P,), float32
        The queries' blocks of lanes.
    plan : ndarray of shape (Q, 5), int64
        Of each query: where it begins in ``packed``, its whole blocks, the group size of a last block (0: there is
        none), where its lanes begin in ``counts``, and its lanes in all.
    counts : ndarray of shape (C,), float32
        Per lane, whether its maximum is a term of the sum (1) or not (0). Queries of the same length share theirs.
    """
    d = tokens.shape[1]
    starts = np.cumsum(lengths) - lengths
    plan = np.empty((len(lengths), 5), np.int64)
    packed, counts, at, lane = [], [], 0, 0
    for n_tokens in np.unique(lengths):
        chosen = np.flatnonzero(lengths == n_tokens)
        blocks, group = divide_lanes(int(n_tokens), d, lanes)
        queries = tokens[starts[chosen][:, None] + np.arange(n_tokens)]
        whole, rest = queries[:, : blocks * lanes], queries[:, blocks * lanes :]
        by_block = np.zeros((len(chosen), blocks, d, lanes), np.float32)
        for block in range(blocks):
            part = whole[:, block * lanes : (block + 1) * lanes]
            by_block[:, block, :, : part.shape[1]] = part.transpose(0, 2, 1)
        laid = by_block.reshape(len(chosen), blocks * d * lanes)
        counted = np.zeros((blocks + (group > 0)) * lanes, np.float32)
        counted[: whole.shape[1]] = 1.0
        if group:
            last = np.zeros((len(chosen), d // group, lanes // group, group), np.float32)
            last[:, :, : rest.shape[1]] = rest.reshape(*rest.shape[:2], d // group, group).transpose(0, 2, 1, 3)
            laid = np.concatenate([laid, last.reshape(len(chosen), -1)], axis=1)
            counted[blocks * lanes :: group][: rest.shape[1]] = 1.0
        plan[chosen, 0] = at + np.arange(len(chosen)) * laid.shape[1]
        plan[chosen, 1:] = blocks, group, lane, len(counted)
        packed.append(laid.reshape(-1))
        counts.append(counted)
        at, lane = at + laid.size, lane + len(counted)
    return np.concatenate(packed), plan, np.concatenate(counts)


def divide_lanes(n_tokens: int, d: int, lanes: int) -> tuple[int, int]:
    """Whole blocks of lanes for so many query tokens, and the group size of a last block (0: there is none)."""
    blocks, rest = divmod(n_tokens, lanes)
    if rest == 0:
        return blocks, 0
    group = max(g for g in GROUPS if rest * g <= lanes and d % g == 0)
    return (blocks + 1, 0) if group == 1 else (blocks, group)


@cache
def compiled(dtype: torch.dtype, d: int, lanes: int) -> Any:
    """The kernel for documents of this dtype and dimension, as a ctypes function that runs without the GIL.

    Compiling takes about a tenth of a second.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features().flatten(), opt=3
    )
    module = ir.Module(name=f"maxsim_{dtype}")
    module.triple = llvm.get_process_triple()
    _Kernel(module, d, lanes, halves=dtype == torch.bfloat16).build()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    prototype = ctypes.CFUNCTYPE(None, *[pointer] * 7, integer, integer, integer, pointer)
    function = prototype(engine.get_function_address("maxsim"))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return function


class _Kernel:
    """Writes the function ``maxsim`` into a module; the arguments are those that `score_candidates` passes."""

    def __init__(self, module: ir.Module, d: int, lanes: int, halves: bool) -> None:
        self.d = d
        self.width = lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        self.halves = halves
        stored = (INT16 if halves else FLOAT).as_pointer()
        floats, integers = FLOAT.as_pointer(), INT64.as_pointer()
        arguments = [stored, integers, floats, integers, floats, floats, integers, INT64, INT64, INT64, floats]
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name="maxsim")
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        (
            self.tokens,
            self.offsets,
            self.packed,
            self.plan,
            self.all_counts,
            self.scratch,
            self.candidates,
            self.k,
            self.first,
            self.last,
            self.scores,
        ) = function.args

    def build(self) -> None:
        b = self.b
        self.best = b.gep(self.scratch, [_int(ROWS * self.d)])
        self.total = b.alloca(self.vector)
        with self.loop(self.first, self.last, 1) as i:
            begin, self.blocks, self.group, lane, self.lanes = (
                b.load(b.gep(self.plan, [b.add(b.mul(i, _int(5)), _int(column))])) for column in range(5)
            )
            self.query = b.gep(self.packed, [begin])
            self.counts = b.gep(self.all_counts, [lane])
            with self.loop(_int(0), self.k, 1) as j:
                at = b.add(b.mul(i, self.k), j)
                document, score = b.load(b.gep(self.candidates, [at])), b.gep(self.scores, [at])
                with b.if_else(b.icmp_signed("<", document, _int(0))) as (hole, there):
                    with hole:
                        b.store(ir.Constant(FLOAT, -np.inf), score)
                    with there:
                        self.maxsim(document, score)
        b.ret_void()

    def maxsim(self, document: Any, score: Any) -> None:
        """Store the MaxSim of the query and one document."""
        b = self.b
        start = b.load(b.gep(self.offsets, [document]))
        end = b.load(b.gep(self.offsets, [b.add(document, _int(1))]))
        with self.loop(_int(0), self.lanes, self.width) as lane:
            self.store(self.splat(-np.inf), self.best, lane)
        with b.if_else(b.icmp_signed("<", b.sub(end, start), _int(ROWS))) as (few, many):
            with few, self.loop(start, end, 1) as token:
                self.rows(token, 1)
            with many, self.loop(start, end, ROWS) as token:
                # The last eight overlap the ones before: a maximum may see a token twice.
                latest = b.sub(end, _int(ROWS))
                self.rows(b.select(b.icmp_signed("<", token, latest), token, latest), ROWS)
        b.store(self.splat(0.0), self.total)
        with self.loop(_int(0), self.lanes, self.width) as lane:
            counted = b.fmul(self.load(self.best, lane), self.load(self.counts, lane))
            b.store(b.fadd(b.load(self.total), counted), self.total)
        summed, total = b.load(self.total), ir.Constant(FLOAT, 0.0)
        for lane in range(self.width):
            total = b.fadd(total, b.extract_element(summed, ir.Constant(INT32, lane)))
        b.store(total, score)

    def rows(self, token: Any, n_rows: int) -> None:
        """Let ``n_rows`` tokens from ``token`` on raise the maxima of all lanes."""
        b = self.b
        first = b.gep(self.tokens, [b.mul(token, _int(self.d))])
        if self.halves:
            first = self.widen(first, n_rows)
        # Two blocks at a time share what they read of the rows, where there are registers for both.
        together = 2 if self.width == 16 and n_rows == ROWS else 1
        paired = b.and_(self.blocks, _int(-together))
        with self.loop(_int(0), paired, together) as block:
            self.maxima(first, n_rows, block, together)
        if together == 2:
            with self.loop(paired, self.blocks, 1) as block:
                self.maxima(first, n_rows, block, 1)
        for group in GROUPS[1:]:
            if self.d % group == 0:
                with b.if_then(b.icmp_signed("==", self.group, _int(group))):
                    self.maxima(first, n_rows, self.blocks, 1, group)

    def widen(self, first: Any, n_rows: int) -> Any:
        """Copy rows of bfloat16 to the scratch space as float32."""
        b = self.b
        numbers = n_rows * self.d
        step = next(step for step in (self.width, self.width // 2, 1) if numbers % step == 0)
        bits, wide, single = (ir.VectorType(t, step) for t in (INT16, INT32, FLOAT))
        with self.loop(_int(0), _int(numbers), step) as x:
            half = b.load(b.bitcast(b.gep(first, [x]), bits.as_pointer()), align=2)
            whole = b.shl(b.zext(half, wide), ir.Constant(wide, [16] * step))
            b.store(b.bitcast(whole, single), b.bitcast(b.gep(self.scratch, [x]), single.as_pointer()), align=4)
        return self.scratch

    def maxima(self, first: Any, n_rows: int, block: Any, n_blocks: int, group: int = 1) -> None:
        """Raise the maxima of adjacent blocks of lanes to the inner products of the rows with their query tokens."""
        b = self.b
        block_size = self.d * self.width
        query = b.gep(self.query, [b.mul(block, _int(block_size))])
        unrolled = next(n for n in (4, 2, 1) if self.d % (n * group) == 0)
        before = b.block
        body, after = b.append_basic_block("products"), b.append_basic_block("maxima")
        b.branch(body)
        b.position_at_end(body)
        x, row_at, query_at = b.phi(INT64), b.phi(first.type), b.phi(query.type)
        sums = [[b.phi(self.vector) for _ in range(n_rows)] for _ in range(n_blocks)]
        totals: list[list[Any]] = [list(of_block) for of_block in sums]
        for step in range(unrolled):
            of_query = [self.load(query_at, _int(j * block_size + step * self.width)) for j in range(n_blocks)]
            for row in range(n_rows):
                value = self.repeated(b.gep(row_at, [_int(row * self.d + step * group)]), group)
                for j in range(n_blocks):
                    product = b.fmul(value, of_query[j], flags=("contract",))
                    totals[j][row] = b.fadd(product, totals[j][row], flags=("contract",))
        x_next = b.add(x, _int(unrolled * group))
        carried = [
            (x, _int(0), x_next),
            (row_at, first, b.gep(row_at, [_int(unrolled * group)])),
            (query_at, query, b.gep(query_at, [_int(unrolled * self.width)])),
        ]
        for j in range(n_blocks):
            carried += [(s, self.splat(0.0), t) for s, t in zip(sums[j], totals[j], strict=True)]
        for phi, at_first, later in carried:
            phi.add_incoming(at_first, before)
            phi.add_incoming(later, body)
        b.cbranch(b.icmp_signed("<", x_next, _int(self.d)), body, after)
        b.position_at_end(after)
        for j in range(n_blocks):
            lane = b.mul(b.add(block, _int(j)), _int(self.width))
            highest = self.load(self.best, lane)
            for total in totals[j]:
                summed = self.summed_in_groups(total, group)
                highest = b.select(b.fcmp_ordered(">", summed, highest), summed, highest)
            self.store(highest, self.best, lane)

    def summed_in_groups(self, total: Any, group: int) -> Any:
        """The sums of each ``group`` adjacent lanes, in all of them."""
        for distance in (1, 2)[: group // 2]:
            swapped = ir.Constant(ir.VectorType(INT32, self.width), [i ^ distance for i in range(self.width)])
            total = self.b.fadd(total, self.b.shuffle_vector(total, total, swapped))
        return total

    def repeated(self, place: Any, n: int) -> Any:
        """The ``n`` numbers at a place, over and over in all lanes."""
        b = self.b
        few = ir.VectorType(FLOAT, n)
        numbers = b.load(b.bitcast(place, few.as_pointer()), align=4)
        order = ir.Constant(ir.VectorType(INT32, self.width), [i % n for i in range(self.width)])
        return b.shuffle_vector(numbers, ir.Constant(few, ir.Undefined), order)

    def load(self, array: Any, at: Any) -> Any:
        return self.b.load(self.b.bitcast(self.b.gep(array, [at]), self.vector.as_pointer()), align=4)

    def store(self, value: Any, array: Any, at: Any) -> None:
        self.b.store(value, self.b.bitcast(self.b.gep(array, [at]), self.vector.as_pointer()), align=4)

    def splat(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.width)

    @contextmanager
    def loop(self, start: Any, end: Any, step: int) -> Iterator[Any]:
        """Generate ``for i in range(start, end, step)``."""
        b = self.b
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(INT64)
        i.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", i, end), body, after)
        b.position_at_end(body)
        yield i
        i.add_incoming(b.add(i, _int(step)), b.block)
        b.branch(head)
        b.position_at_end(after)


def _int(value: int) -> ir.Constant:
    return ir.Constant(INT64, value)
