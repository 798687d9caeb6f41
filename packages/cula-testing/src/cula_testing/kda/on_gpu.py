"""The kernels on a GPU, through the public function. Most tests share the kernels of a few sets of options."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cula_core.delta_rule import launch

from ..comparing import assert_within, bits, relative_rmse, same
from ..packing import spread
from ..tensors import int32, turned
from .checks import (
    MAX_BFLOAT16_ERROR,
    MAX_ERROR,
    MAX_ONE_KEY_ERROR,
    attend,
    check,
    fused,
    nan_workspace,
    recurrence,
)
from .inputs import BOUNDED_KINDS, inputs
from .subject import Subject

RAGGED = [100, 1, 0, 63, 64, 65, 0, 128, 200, 1, 37]
# Some are cut into segments of 1,024 tokens and more, into three at least: the second one starts from the bits of the
# uncut call, and only behind it does it matter what a segment applies to a state.
LONG = [4200, 0, 1, 1100, 64, 3300, 65]
ACTIVATIONS = ("q", "k", "v", "g", "beta")
FP16, BF16 = torch.float16, torch.bfloat16
SERIAL, CUT = {"use_intracard_cp": False}, {"use_intracard_cp": True}
each_way = pytest.mark.parametrize("way", [SERIAL, CUT], ids=["serial", "cut"])


def make(
    device: torch.device,
    size: int | list[int],
    tokens: int = 0,
    heads: int = 2,
    heads_v: int = 4,
    kind: str = "moderate",
    **more,
) -> dict:
    """Inputs for a batch of `size` sequences of `tokens` tokens, or for packed sequences of the lengths `size`."""
    if isinstance(size, list):
        more["lengths"] = size
        size, tokens = 1, sum(size)
    return inputs(size, tokens, heads, heads_v, kind, initial=True, device=device, **more)


def slots(device: torch.device, *values: int) -> Tensor:
    return int32(*values).to(device)


PLAIN = {"use_qk_l2norm_in_kernel": False}
LOGITS = {"use_beta_sigmoid_in_kernel": True}
LOOSE = {"bound": MAX_BFLOAT16_ERROR}
# What a backward pass takes, all of it.
KEPT = {"return_intra": True, "disable_recompute": True}
# Sizes, gate, what the inputs are, options: everything that is compiled in, several at a time.
CASES = {
    "fp16, log gate, V first, cut": (
        [(1, 3300), (2, 2100)], "log", {"dtype": FP16, "gate_dtype": BF16, "normalized": True},
        PLAIN | LOOSE | CUT | {"v_first": True},
    ),
    "resets, packed, read, V first": (
        [RAGGED, [700, 0, 300]], "log", {"kind": "resets", "dtype": FP16},
        {"state": "read", "v_first": True},
    ),
    "softplus, fp16 gates, no states": (
        [(1, 1), (2, 129), (1, 700)], "softplus", {"kind": "resets", "gate_dtype": FP16},
        {"state": "none"},
    ),
    "logits of both signs, packed": (
        [RAGGED, [1], [300] * 3], "safe", {"logits": True, "beta_dtype": BF16},
        LOGITS | {"allow_neg_eigval": True, "state": "final"},
    ),
    "logits, bf16 operands, cut": (
        [(1, 3300)], "safe", {"logits": True, "beta_dtype": FP16},
        LOGITS | LOOSE | CUT | {"operand_dtype": BF16, "state": "initial"},
    ),
    "fp16 operands, packed, cut": (
        [LONG], "log", {"normalized": True}, PLAIN | CUT | {"operand_dtype": FP16},
    ),
    "a lower bound": ([(2, 300)], "safe", {}, {"lower_bound": -8.0, "safe_gate": False}),
    "a scale": ([(2, 300)], "safe", {}, {"scale": -1.5}),
    "nothing comes out": ([(2, 300)], "safe", {}, {"scale": 0.0}),
    "products and inverse": ([(1, 1), (2, 300)], "safe", {}, {"return_intra": True}),
    "intermediates, packed, pool": (
        [RAGGED, [1], [700, 0, 300]], "softplus", {"kind": "resets", "dtype": FP16},
        KEPT | {"state": "pool"},
    ),
    "intermediates, pieces": (
        [(2, 300), RAGGED], "safe", {"logits": True}, KEPT | LOGITS | {"chunks": 3, "v_first": True},
    ),
    "intermediates, bf16 operands, cut": (
        [(1, 3300), LONG], "log", {"normalized": True}, KEPT | PLAIN | LOOSE | CUT,
    ),
}  # fmt: skip


class OnGpu:
    """The kernels on a GPU, through the public function."""

    subject: Subject
    pytestmark = pytest.mark.gpu

    def attend(self, x: dict, *arguments, **options) -> tuple:
        """Calls the public function of the package as `checks.attend` does."""
        return attend(self.subject.package.chunk_kda, x, *arguments, **options)

    def check(self, x: dict, *arguments, **options) -> dict[str, float]:
        """Checks the public function of the package as `checks.check` does."""
        return check(self.subject.package.chunk_kda, x, *arguments, **options)

    def repeated(self, x: dict, gate: str = "safe", **options) -> tuple[Callable[[], None], Tensor]:
        """Returns a step that runs into NaN-filled buffers and counts bits unlike the first run's, and the count."""
        options["out"] = out = torch.full_like(x["v"], math.nan)
        given = x | {"initial_state": x["initial_state"].clone()}
        if options.get("state") == "pool":
            options["indices"] = slots(out.device, *range(len(x["initial_state"])))
        call = partial(
            self.attend, given, gate, "resets" if gate == "log" else "moderate", **options
        )
        expected, final = (bits(value).clone() for value in call())
        wrong = torch.zeros((), dtype=torch.int64, device=out.device)

        def step() -> None:
            given["initial_state"].copy_(x["initial_state"])
            out.fill_(math.nan)
            _, state = call()
            wrong.add_((bits(out) != expected).sum())
            wrong.add_((bits(state) != final).sum())

        return step, wrong

    @pytest.fixture
    def gpu(self) -> torch.device:
        """The GPU; one that the package has no kernels for fails the test in one line."""
        if not torch.cuda.is_available():
            pytest.fail("needs a CUDA GPU; -m 'not gpu' leaves such tests out", pytrace=False)
        targets = self.subject.target.compiles_for
        if torch.cuda.get_device_capability() not in targets:
            known = " or ".join(f"{major}.{minor}" for major, minor in targets)
            name = torch.cuda.get_device_name()
            pytest.fail(f"needs a GPU of compute capability {known}, not {name}", pytrace=False)
        return torch.device("cuda", torch.cuda.current_device())

    # ---- numbers ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", BOUNDED_KINDS)
    def test_kinds(self, gpu, kind):
        x = make(gpu, 1, 4000, 2, 4, kind)
        if kind == "one_key":  # all that it does would vanish in the initial state
            x["initial_state"].zero_()
        bound = MAX_ONE_KEY_ERROR if kind == "one_key" else MAX_ERROR
        self.check(x, kind=kind, bound=bound, ways=(SERIAL, CUT))

    @pytest.mark.parametrize("kind", ["resets", "mixed", "near_zero", "strong"])
    @pytest.mark.parametrize("gate", ["log", "softplus"])
    def test_decays_of_any_size(self, gpu, gate, kind):
        x = make(gpu, 1, 3300, 2, 4, kind, gate=gate)
        self.check(x, gate, kind, safe_gate=False, **CUT)

    @pytest.mark.parametrize("sizes, gate, given, options", CASES.values(), ids=list(CASES))
    def test_options(self, gpu, sizes, gate, given, options):
        given = {"kind": "moderate"} | given
        for seed, size in enumerate(sizes):
            batch, tokens = size if isinstance(size, tuple) else (size, 0)
            x = make(gpu, batch, tokens, gate=gate, seed=seed, **given)
            self.check(x, gate, given["kind"], **options)

    @pytest.mark.parametrize(
        "size",
        [
            (1, 1500, 64, 64), (2, 1024, 16, 64), (1, 6000, 4, 8), (1, 131, 2, 256), (1, 2100, 1, 1),
            (1, 2100, 3, 3), (3, 2100, 1, 4),
        ],
        ids=str,
    )  # fmt: skip
    def test_sizes(self, gpu, size):
        """The numbers of segments and V tiles that the shapes ask for."""
        self.check(make(gpu, *size))

    @pytest.mark.parametrize(
        "lengths",
        [
            RAGGED, [1], [64], [4000], [0], [0, 0, 0], [1] * 300, [64] * 20, [100] * 300, LONG,
            [0] * 299 + [100], [1, 0, 1, 3000], spread(3, 20, 8192), spread(4, 300, 8192),
        ],
        ids=lambda x: f"{len(x)}-{sum(x)}",
    )  # fmt: skip
    def test_packed(self, gpu, lengths):
        self.check(make(gpu, lengths, 0, 1, 4), state="pool")

    @pytest.mark.parametrize("kind", ["moderate", "correlated_weak"])
    @pytest.mark.parametrize("lengths", [LONG, [1] * 20 + [4000], [2048], [0, 3100, 3100]])
    def test_packed_and_cut(self, gpu, lengths, kind):
        x = make(gpu, lengths, 0, 1, 2, kind)
        copied = {"cu_seqlens_cpu": x["cu_seqlens"].cpu()}
        self.check(x, kind=kind, state="pool", ways=(SERIAL, CUT, CUT | copied))

    @pytest.mark.parametrize("kind", ["moderate", "near_zero"])
    def test_large_values(self, gpu, kind):
        """Up to about 1e4, with operands in fp16."""
        x = make(gpu, 1, 500, 2, 4, kind)
        x["v"].mul_(2000)
        x["initial_state"].mul_(2000)
        self.check(x, kind=kind)

    def test_packed_views_and_offsets_of_64_bits(self, gpu):
        x = make(gpu, RAGGED)
        twin = fused(x, 8, 8) | {"cu_seqlens": x["cu_seqlens"].long()}
        assert all(map(same, self.attend(twin), self.attend(x)))

    @pytest.mark.parametrize("kind", ["near_zero", "typical", "correlated_weak"])
    def test_segments_lose_no_precision(self, gpu, kind):
        """Against the same call uncut: 1.5e-3 between the two, and at most a tenth more of error."""
        x = make(gpu, 1, 8192, 2, 2, kind)
        wanted = recurrence(x, kind=kind)
        serial, cut = (self.attend(x, kind=kind, **way) for way in (SERIAL, CUT))
        for name, expected, one, other in zip(("output", "state"), wanted, serial, cut):
            assert relative_rmse(other, one) <= 1.5e-3, name
            lost = assert_within(one, expected, MAX_ERROR, name=name)
            assert relative_rmse(other, expected) <= 1.1 * lost, name

    # ---- memory, pieces ---------------------------------------------------------------------------------------------

    @each_way
    @pytest.mark.parametrize("offset, gap", [(0, 8), (8, 0), (3, 0)])
    def test_activations_may_be_any_view(self, gpu, way, offset, gap):
        """Aligned or not, the same bits as dense tensors; nothing is written beside the output."""
        x = make(gpu, 2, 3100 if way is CUT else 200)
        expected = self.attend(x, **way)
        batch, tokens, heads_v, width = x["v"].shape
        shape = (batch, heads_v, tokens + 4, width + offset + gap)
        storage = torch.full(shape, 7.0, dtype=x["v"].dtype, device=gpu)
        out = storage[:, :, 2:-2, offset : offset + width].transpose(1, 2)
        twin = fused(x, offset, gap)
        twin["beta"] = x["beta"].mT.contiguous().mT
        got = self.attend(twin, out=out, **way)
        assert got[0] is out and all(map(same, got, expected))
        out.fill_(7.0)
        assert (storage == 7.0).all()

    def test_pools_may_have_gaps_or_be_transposed(self, gpu):
        x = make(gpu, [100, 64, 1])
        expected, states = self.attend(x)
        gaps = torch.full((9, 7, *states.shape[2:]), 7.0, device=gpu)
        indices, pool = slots(gpu, 3, 0, 1), gaps[1::2, 2:6]
        pool[indices] = x["initial_state"]
        out, final = self.attend(x | {"initial_state": pool}, state="pool", indices=indices)
        assert final is pool and same(out, expected) and same(pool[indices], states)
        assert (gaps[::2] == 7).all() and (gaps[:, :2] == 7).all() and (gaps[:, 6:] == 7).all()

        pool = turned(x["initial_state"])
        out, final = self.attend(
            x | {"initial_state": pool}, state="pool", indices=slots(gpu, 0, 1, 2)
        )
        assert final is pool and same(out, expected) and same(pool, states)

    @pytest.mark.parametrize("rows", [[2, -1, -3, 0, -1], [-1, -2, -3, -4, -5]], ids=str)
    @each_way
    def test_padding_slots(self, gpu, rows, way):
        """Nothing of a padding slot is read or written, not even NaN."""
        x = make(gpu, [100, 3200, 0, 3100, 7], 0, 1, 2)
        used = [row for row in rows if row >= 0]
        unused = [row for row in range(4) if row not in used]
        pool = torch.full((4, *x["initial_state"].shape[1:]), math.nan, device=gpu)
        pool[used] = 1.0
        before = pool.clone()
        padding = [
            slice(*x["cu_seqlens"].tolist()[n : n + 2]) for n, row in enumerate(rows) if row < 0
        ]
        for tokens in padding:
            for name in ACTIVATIONS:
                x[name][:, tokens] = math.nan
        out = torch.full_like(x["v"], math.nan)
        options = way | {"state": "pool", "indices": slots(gpu, *rows), "out": out}
        self.attend(x | {"initial_state": pool}, **options)
        assert torch.isfinite(out).all() and not any(out[:, tokens].any() for tokens in padding)
        assert same(pool[unused], before[unused]) and torch.isfinite(pool[used]).all()

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @each_way
    def test_neighbours_are_not_seen(self, gpu, way, bad):
        """Every second sequence is broken in all it has; the others have the bits that they have between sound ones."""
        x = make(gpu, [100, 1, 37, 64, 3300, 130, 5, 1, 300, 70], 0, 1, 2)
        sound = self.attend(x, **way)
        bounds = x["cu_seqlens"].tolist()
        for n in range(1, 10, 2):
            for name in ACTIVATIONS:
                x[name][:, bounds[n] : bounds[n + 1]] = bad
        x["initial_state"][1::2] = bad
        out, final = self.attend(x, **way)
        assert torch.isfinite(final[::2]).all() and same(final[::2], sound[1][::2])
        for n in range(0, 10, 2):
            tokens = slice(bounds[n], bounds[n + 1])
            assert torch.isfinite(out[:, tokens]).all() and same(
                out[:, tokens], sound[0][:, tokens]
            )

    def test_other_rows_heads_and_later_chunks_are_not_seen(self, gpu):
        x = make(gpu, 3, 200)
        sound, states = self.attend(x)
        for name in ("q", "k", "v", "g", "initial_state"):
            x[name][1] = math.nan
        x["v"][:, :, 3] = math.nan
        x["v"][2, 128:] = math.nan
        out, final = self.attend(x)
        assert same(out[0, :, :3], sound[0, :, :3]) and same(final[0, :3], states[0, :3])
        assert same(out[2, :128, :3], sound[2, :128, :3])
        assert out[1].isnan().all() and out[:, :, 3].isnan().all()

    @pytest.mark.parametrize("chunks", [1, 5])
    @pytest.mark.parametrize(
        "size, state",
        [(2, "both"), (2, "none"), (RAGGED, "pool"), (RAGGED, "read"), (RAGGED, "both")],
        ids=["dense", "no_states", "packed_pool", "packed_read", "packed"],
    )
    def test_a_small_workspace_has_the_bits_of_one_piece(self, gpu, size, state, chunks):
        x = make(gpu, size, 700)
        self.check(x, state=state, chunks=chunks)
        pooled = state in ("pool", "read")
        indices = slots(gpu, *reversed(range(len(RAGGED)))) if pooled else None
        results = []
        for room in (None, chunks):
            given = x | {"initial_state": x["initial_state"].clone()}
            workspace = nan_workspace(x, room)
            results.append(
                self.attend(given, state=state, indices=indices, workspace=workspace, **SERIAL)
            )
        assert all(one is other or same(one, other) for one, other in zip(*results))

    def test_calls_one_after_another_have_the_bits_of_one(self, gpu):
        """Where they are cut at chunks."""
        x = make(gpu, 2, 1500)
        whole = self.attend(x, **SERIAL)
        for ends in ([64, 128, 1024, 1500], [*range(192, 1500, 192), 1500]):
            outs, state = [], x["initial_state"]
            for first, last in zip([0, *ends], ends):
                part = {name: x[name][:, first:last] for name in ACTIVATIONS}
                out, state = self.attend(x | part | {"initial_state": state}, **SERIAL)
                outs.append(out)
            assert same(torch.cat(outs, 1), whole[0]) and same(state, whole[1])

    # ---- again and again --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "size, options",
        [
            ((2, 130, 1, 2), SERIAL),
            ((1, 130, 8, 72), SERIAL),
            ((1, 300, 1, 2), SERIAL | {"gate": "log"}),
            ((RAGGED, 0, 2, 16), SERIAL | {"state": "pool"}),
            ((1, 3100, 1, 2), CUT),
            (([3100, 0, 1, 70], 0, 1, 2), CUT | {"state": "pool"}),
        ],
        ids=["one_tile", "two_tiles", "any_decay", "pool", "cut", "pool_cut"],
    )
    def test_ten_thousand_runs_are_bit_identical(self, gpu, size, options):
        gate = options.get("gate", "safe")
        x = make(gpu, *size, "resets" if gate == "log" else "moderate", gate=gate)
        step, wrong = self.repeated(x, **options)
        step()
        assert wrong.item() == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                step()
        for _ in range(500):
            graph.replay()
        assert wrong.item() == 0
        # The count is able to see a difference.
        x["q"].neg_()
        graph.replay()
        assert wrong.item() > 0

    @pytest.mark.parametrize(
        "way, chunks", [(SERIAL, None), (CUT, None), (SERIAL, 7)], ids=["serial", "cut", "pieces"]
    )
    @pytest.mark.parametrize("state", ["both", "pool"])
    def test_graph_replay_sees_new_contents(self, gpu, way, chunks, state):
        """Captured after one call; replayed with other lengths, inputs and slots, on one stream and then on another."""
        packings = [[4000, 0, 0, 0, 0], [100, 1, 0, 563, 3336], [0, 0, 0, 0, 4000], [800] * 5]
        x = make(gpu, packings[0], 0, 1, 2)
        options = way | {"state": state, "out": torch.empty_like(x["v"])}
        if chunks is not None:
            options["workspace"] = nan_workspace(x, chunks)
        if state == "pool":
            x["initial_state"] = torch.zeros(8, 2, 128, 128, device=gpu)
            options["indices"] = slots(gpu, *range(5))
        self.attend(x, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, final = self.attend(x, **options)

        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for seed, packing in enumerate(packings + packings[::-1]):
            fresh = make(gpu, packing, 0, 1, 2, seed=seed)
            if state == "pool":
                fresh["initial_state"] = torch.randn_like(x["initial_state"])
                rows = torch.randperm(8)[:5].tolist()
                rows[seed % 5] = -1
                options["indices"].copy_(slots(gpu, *rows))
            for name, value in fresh.items():
                x[name].copy_(value)
            twin = options | {"out": torch.full_like(x["v"], math.nan)}
            expected = self.attend(fresh, **twin)
            options["out"].fill_(math.nan)
            torch.cuda.synchronize()
            stream = streams[seed % 2]
            with torch.cuda.stream(stream):
                graph.replay()
            stream.synchronize()
            assert same(options["out"], expected[0]) and same(final, expected[1])

    def test_streams_side_by_side(self, gpu):
        """Different problems at once, each with a workspace of its own."""
        problems = [
            (make(gpu, 1, 4000, 1, 2, seed=1), CUT),
            (make(gpu, spread(5, 20, 4000), 0, 1, 2, seed=2), SERIAL),
            (make(gpu, 1, 2500, 1, 3, seed=3), SERIAL),
            (make(gpu, LONG, 0, 1, 2, seed=4), CUT | {"state": "pool"}),
        ]
        runs = [self.repeated(x, **options) for x, options in problems]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in problems]
        for _ in range(50):
            for stream, (step, _) in zip(streams, runs):
                with torch.cuda.stream(stream):
                    step()
        torch.cuda.synchronize()
        assert [wrong.item() for _, wrong in runs] == [0] * len(runs)

    @each_way
    def test_calls_run_on_the_current_stream_and_do_not_wait(self, gpu, way):
        """The input arrives on a side stream after a long wait: the call is back before, its kernels start after it."""
        x = make(gpu, 1, 3100)
        expected = self.attend(x, **way)
        late = x | {name: torch.zeros_like(x[name]) for name in ACTIVATIONS}
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
            for name in ACTIVATIONS:
                late[name].copy_(x[name])
            got = self.attend(late, **way)
            assert not side.query(), "the call has waited for the GPU"
        side.synchronize()
        assert all(map(same, got, expected))

    @pytest.mark.parametrize(
        "size, options, chunks",
        [
            ((2, 300), SERIAL, None),
            ((2, 300), SERIAL, 2),
            ((2, 4000), CUT, None),
            ((RAGGED, 0), SERIAL | {"state": "pool"}, None),
            ((RAGGED, 0), SERIAL | {"state": "pool"}, 3),
            ((LONG, 0), CUT | {"state": "both"}, None),
        ],
        ids=["serial", "pieces", "cut", "pool", "pool_pieces", "packed_cut"],
    )
    def test_calls_neither_synchronise_nor_allocate(self, gpu, size, options, chunks):
        """Nothing but the final states, what a segment does and starts from where sequences are cut, and a table of
        segments where they are packed."""
        x = make(gpu, *size, 1, 2)
        states, pool = x["initial_state"], options.get("state") == "pool"
        options = options | {"out": torch.empty_like(x["v"]), "workspace": nan_workspace(x, chunks)}
        if pool:
            options["indices"] = slots(gpu, *range(len(states)))
        for _ in range(2):  # the second is written down, and keeps its memory meanwhile
            self.attend(x, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            kept = self.attend(x, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        used = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        assert torch.isfinite(kept[0]).all()
        segments, allowed = len(states), 0 if pool else states.nbytes
        if options["use_intracard_cp"]:
            segments += x["v"].shape[0] * x["v"].shape[1] // 1024
            allowed += 3 * segments * states[0].nbytes
        if x["cu_seqlens"] is not None:
            # Of two pieces at a time.
            allowed += 2 * (24 * (1 + segments) + 8)
        assert used <= allowed, (used, allowed)

    # ---- large addresses, compilers ---------------------------------------------------------------------------------

    def test_activations_and_workspaces_beyond_two_billion_elements(self, gpu):
        """These gates forget all that lies 128 tokens back, so windows of 192 tokens tell their last 64."""
        tokens, heads = 140_000, 64
        shape = (2, tokens, heads, 128)
        x = {name: torch.randn(shape, dtype=BF16, device=gpu) for name in ("q", "k", "v")}
        x |= {"g": torch.randn(shape, device=gpu), "beta": torch.rand(shape[:3], device=gpu)}
        x |= {
            "A_log": torch.zeros(heads, device=gpu),
            "dt_bias": torch.ones(shape[2:], device=gpu),
        }
        x |= {"initial_state": torch.zeros(2, heads, 128, 128, device=gpu), "cu_seqlens": None}
        out, workspace = torch.full_like(x["v"], math.nan), nan_workspace(x)
        assert out.numel() > 2**31 and workspace.numel() > 2**32
        _, final = self.attend(x, out=out, workspace=workspace)
        boundary = 2**31 // (heads * 128) - tokens
        for row, end in ((0, 192), (0, tokens), (1, 192), (1, boundary + 32), (1, tokens)):
            part = {name: x[name][row : row + 1, end - 192 : end] for name in ACTIVATIONS}
            expected, state = recurrence(x | part | {"initial_state": None})
            last = slice(end - 64, end)
            assert_within(out[row : row + 1, last], expected[:, -64:], MAX_ERROR, name="output")
            if end == tokens:
                assert_within(final[row : row + 1], state, MAX_ERROR, name="state")
        assert torch.isfinite(out.view(2, -1).sum(1, dtype=torch.float32)).all()

    def test_strides_and_pools_beyond_two_billion_elements(self, gpu):
        x = make(gpu, 2, 200, 1, 2)
        expected, states = self.attend(x)
        storage = torch.full((2**31 + 200 * 256 + 8,), math.nan, dtype=BF16, device=gpu)
        out = storage.as_strided(x["v"].shape, (2**31 + 8, 256, 128, 1))
        got = self.attend(fused(x, 0, 8, far=2**31 + 16), out=out)
        assert same(got[0], expected) and same(got[1], states)
        assert storage[200 * 256 : 2**31].isnan().all()
        del storage, out, got

        rows = torch.zeros(3 * 2**30 + 2**15, device=gpu)
        pool = rows.as_strided((4, 2, 128, 128), (2**30, 2**14, 128, 1))
        indices = slots(gpu, 3, 1)
        pool[indices] = x["initial_state"]
        out, _ = self.attend(x | {"initial_state": pool}, state="pool", indices=indices)
        assert same(out, expected) and same(pool[indices], states)
        pool[indices] = 0
        assert not rows.any()

    def test_torch_compile_sees_one_graph(self, gpu, fresh_compiler):
        """A dense and a packed call in one graph, at two sizes."""
        chunk_kda = self.subject.package.chunk_kda

        def step(q, k, v, g, beta, A_log, dt_bias, state, pool, rows, cu_seqlens):
            options = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}
            options |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
            out, state = chunk_kda(
                q, k, v, g, beta, initial_state=state, output_final_state=True, **options
            )
            options |= {"cu_seqlens": cu_seqlens, "state_pool": pool, "initial_state_indices": rows}
            second, pool = chunk_kda(q, k, out * 2, g, beta, **options)
            return out, second + 1, state, pool * 1

        compiled = torch.compile(step, fullgraph=True)
        for tokens in (200, 333):
            x = make(gpu, 1, tokens, seed=tokens)
            del x["cu_seqlens"]
            pools = [torch.ones(5, 4, 128, 128, device=gpu) for _ in range(2)]
            rows, cu_seqlens = slots(gpu, 3, -1, 0), slots(gpu, 0, 70, 71, tokens)
            expected = step(*x.values(), pools[0], rows, cu_seqlens)
            got = compiled(*x.values(), pools[1], rows, cu_seqlens)
            assert all(map(same, got, expected)) and same(*pools)

    def test_one_compile_serves_all_sizes(self, gpu, monkeypatch):
        self.attend(make(gpu, 1, 100, 1, 1), **SERIAL)
        compiled: list[object] = []
        monkeypatch.setattr(launch, "kernel", compiled.append)
        for i in range(40):
            heads = 1 + i % 3
            x = make(gpu, 1 + i % 5, 1 + 37 * i, heads, heads * (1 + i % 2), seed=i)
            self.attend(x, scale=1 / (1 + i), **SERIAL)
        assert not compiled
