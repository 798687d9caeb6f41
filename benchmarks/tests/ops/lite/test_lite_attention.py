"""Skip-list attention's workloads, oracle, checks and settings; on the CPU with tiles of 8 queries and 4 keys."""

import dataclasses
import math
from fnmatch import fnmatchcase

import pytest
import torch

from benchmarks import plot
from benchmarks.harness import registry, report, results
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lite import lite_attention, workloads
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite.problem import Result, setting
from benchmarks.ops.lite.providers import (
    LITE,
    LITE_DENSE,
    LITE_INT8,
    LITE_SM89,
    TORCH_CUDNN,
    TORCH_FLASH,
)
from benchmarks.ops.lite.workloads import Shape
from benchmarks.tests.ops.common import assert_every_setting_is_measured, assert_fits_the_h200
from liteattention_sm89 import choice

ALL = lite_attention.settings(False)
BY_NAME = {s.name: s for s in ALL}
LN2 = math.log(2)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(lite, "BLOCK_M", 8)
    monkeypatch.setattr(lite, "BLOCK_N", 4)
    monkeypatch.setattr(lite, "ORACLE_ROWS", 24)


def problem_of(kind="list", tokens=150, heads=3, dim=16, **options):
    if kind == "list":
        options.setdefault("density", 0.25)
    return setting(kind, tokens, heads=heads, dim=dim, **options)


def naive(
    problem,
    x,
    threshold=-math.inf,
    direction=1,
    *,
    dense=False,
    own=True,
    first=True,
    sign=1,
    lse_base=1.0,
    scale=1.0,
):
    """Tile by tile with explicit loops, a running sum as the kernels have it; the keywords plant one mistake each."""
    p, m_size, n_size = problem.params, lite.BLOCK_M, lite.BLOCK_N
    rows, keys = lite.tiles(p["S"])
    seen = lite.visited(problem, None if dense else x.mask, "cpu")
    write = torch.zeros_like(seen)
    out = torch.zeros_like(x.q, dtype=torch.float32)
    lse = torch.full((p["B"], p["H"], p["S"]), -math.inf)
    for b in range(p["B"]):
        for h in range(p["H"]):
            q, k, v = (t[b, :, h].float() for t in (x.q, x.k, x.v))
            for m in range(rows):
                place = slice(m * m_size, min((m + 1) * m_size, p["S"]))
                count = place.stop - place.start
                top = torch.full((count,), -math.inf)
                total, mixed, visits = torch.zeros(count), torch.zeros(count, p["D"]), 0
                for n in range(keys)[:: direction * sign]:
                    if not seen[b, h, m, n]:
                        continue
                    part = slice(n * n_size, min((n + 1) * n_size, p["S"]))
                    logits = q[place] @ k[part].T * (scale * p["D"] ** -0.5 / LN2)
                    if p["causal"]:
                        i, j = torch.arange(place.start, place.stop), torch.arange(p["S"])[part]
                        logits = logits.masked_fill(j > i[:, None], -math.inf)
                    tile_top = logits.amax(-1)
                    keep = bool((tile_top - top > threshold).any())
                    write[b, h, m, n] = (keep and own) or (visits == 0 and first)
                    visits += 1
                    new = torch.maximum(top, tile_top)
                    base = new.masked_fill(new == -math.inf, 0)
                    weights = torch.exp2(logits - base[:, None])
                    shrink = torch.exp2(top - base)
                    total = total * shrink + weights.sum(-1)
                    mixed = mixed * shrink[:, None] + weights @ v[part]
                    top = new
                out[b, place, h] = mixed / total[:, None]
                lse[b, h, place] = (top + total.log2()) * LN2 * lse_base
    return Result(out.to(x.q.dtype), lse, lite.pack(write))


CHECKED = [
    problem_of(batch=2),
    problem_of(tokens=144, density=0.5),
    problem_of(tokens=30, density=0.05),
    problem_of("full"),
    problem_of("full", tokens=96, causal=True),
]
DENSE = [problem_of("dense", batch=2), problem_of("dense", dim=32, causal=True)]
# For the package's own tiles of 128 queries and 64 keys.
OURS = [
    problem_of(tokens=2200, density=0.1),
    problem_of(tokens=500, batch=2, density=0.5),
    problem_of("full", tokens=500, dim=32),
    problem_of("full", tokens=400, causal=True),
    problem_of("dense", tokens=300, batch=2),
    problem_of("dense", tokens=300, causal=True),
]


def name_of(problem):
    return problem.name


@pytest.mark.parametrize("problem", CHECKED, ids=name_of)
def test_check_accepts_an_independent_implementation(small, problem):
    errors = lite.check_listed(naive, problem, "cpu")
    assert 0 < errors["output"] < lite.OUTPUT_LIMIT / 2
    assert 0 < errors["lse"] < 1e-5
    whole = lite.check_dense(lambda p, x: naive(p, x, dense=True), problem, "cpu")
    assert whole["output"] < lite.OUTPUT_LIMIT / 2


@pytest.mark.parametrize("problem", OURS, ids=name_of)
def test_lite_passes_its_checks_on_the_cpu(problem):
    assert LITE.supports(problem) is None
    for provider in (LITE, LITE_SM89, LITE_DENSE):
        errors = lite_providers.check(provider, problem, "cpu")
        assert errors["output"] < lite.OUTPUT_LIMIT and errors["lse"] < lite.LSE_LIMIT


@pytest.mark.parametrize("problem", OURS, ids=name_of)
def test_8_bit_scores_pass_a_looser_check_and_fail_the_other(monkeypatch, problem):
    """Rounding alone moves outputs by about 0.012, so less than 0.008 would mean 16-bit scores."""
    errors = lite_providers.check(LITE_INT8, problem, "cpu")
    assert 8e-3 < errors["output"] < lite.INT8.output == 2e-2
    assert lite.LSE_LIMIT < errors["lse"] < lite.INT8.lse
    monkeypatch.setattr(lite, "INT8", lite.EXACT)
    with pytest.raises(CheckFailed, match="relative RMSE of the output is"):
        lite_providers.check(LITE_INT8, problem, "cpu")


@pytest.mark.parametrize("problem", [OURS[1], OURS[4]], ids=name_of)
def test_8_bit_scores_are_asked_for_in_the_call_that_is_timed(monkeypatch, problem):
    calls = []
    monkeypatch.setattr(
        "liteattention_sm89.lite_attention", lambda *x, **options: calls.append((x, options))
    )
    x = lite.make_inputs(problem, "cpu", 0)
    for provider in (LITE, LITE_INT8):
        provider.bind(problem, x)()
    ((tensors, plain), (same, rounded)) = calls
    assert (plain.pop("use_int8"), rounded.pop("use_int8")) == (False, True)
    assert plain == rounded and all(a is b for a, b in zip(tensors, same, strict=True))


@pytest.mark.parametrize("problem", [OURS[1], OURS[4]], ids=name_of)
def test_kernels_are_asked_for_in_the_call_that_is_timed(monkeypatch, problem):
    calls = []
    monkeypatch.setattr(
        "liteattention_sm89.lite_attention",
        lambda *x, **options: calls.append((choice._asked, options)),
    )
    x = lite.make_inputs(problem, "cpu", 0)
    for provider in (LITE, LITE_SM89, LITE):
        provider.bind(problem, x)()
    assert [asked for asked, _ in calls] == [None, "sm89", None]
    assert calls[0] == calls[2] and calls[0][1] == calls[1][1]
    asked = []
    monkeypatch.setattr(lite, "check_dense", lambda *_: asked.append(choice._asked) or {})
    monkeypatch.setattr(lite, "check_listed", lambda *_: asked.append(choice._asked) or {})
    for provider in (LITE, LITE_SM89):
        lite_providers.check(provider, problem, "cpu")
    assert asked == [None, "sm89"]


@pytest.mark.parametrize("problem", DENSE, ids=name_of)
def test_torch_passes_its_checks_on_the_cpu(small, problem):
    errors = lite_providers.check(TORCH_FLASH, problem, "cpu")
    assert list(errors) == ["output"]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"dense": True}, "relative RMSE of the output|tiles that were not visited"),
        ({"scale": 1.05}, "relative RMSE of the output"),
        ({"lse_base": 1.001}, "largest error of the lse"),
        ({"own": False}, "has lost tiles"),
        ({"sign": -1}, "lacks the first tile"),
    ],
    ids=str,
)
def test_check_refuses_a_wrong_implementation(small, mistake, message):
    problem = problem_of(density=0.2)
    with pytest.raises(CheckFailed, match=message):
        lite.check_listed(lambda p, x, t, d: naive(p, x, t, d, **mistake), problem, "cpu")


def edited(edit):
    """The naive implementation with its result changed, and the call that produced it told apart by its direction."""

    def run(problem, x, threshold, direction):
        result = naive(problem, x, threshold, direction)
        edit(result, direction, x)
        return result

    return run


def spoil_head(result, direction, x):
    result.out[0, 5, 2] = math.nan


def shift_last_head(result, direction, x):
    result.out[0, :, 2] += 0.05 * result.out[0, :, 2].roll(1, 0)


def blind_row(result, direction, x):
    result.lse[0, 1, 7] = -math.inf


def no_mask(result, direction, x):
    result.write = None


def bits_behind(result, direction, x):
    result.write[0, 0, 0, -1] |= 1 << 30


def too_many(result, direction, x):
    if direction < 0:
        result.write = lite.pack(torch.ones(1, 3, 19, 38, dtype=torch.bool))


def keeps_all(result, direction, x):
    if direction < 0:
        result.write = x.mask.clone()


def wrong_way(result, direction, x):
    if direction < 0:
        result.out *= 1.02


def in_place(result, direction, x):
    x.mask[0, 0, 0, 0] ^= 1 if direction < 0 else 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (spoil_head, "output holds values that are not finite"),
        (shift_last_head, "relative RMSE of the output is"),
        (blind_row, "lse holds values that are not finite"),
        (no_mask, "there is no write mask"),
        (bits_behind, "bits behind the last tile"),
        (too_many, "tiles that were not visited"),
        (keeps_all, "differs from the rule"),
        (wrong_way, "relative RMSE of the output is"),
        (in_place, "the read mask was changed"),
    ],
)
def test_check_names_what_is_wrong(small, edit, message):
    with pytest.raises(CheckFailed, match=message):
        lite.check_listed(edited(edit), problem_of(), "cpu")


def test_margins_by_hand():
    """One query tile of two rows, four tiles; tile 2 is not visited."""
    ninf = -math.inf
    peaks = torch.tensor([[[1.0, 4.0, 9.0, 3.5], [ninf, ninf, 9.0, 0.0]]])
    seen = torch.tensor([[True, True, False, True]])
    up, down = (lite.margins(peaks, seen, d).tolist() for d in (1, -1))
    assert up == [[math.inf, 3.0, ninf, math.inf]]
    assert down == [[-3.0, 0.5, ninf, math.inf]]


def test_masks_have_equally_many_tiles_everywhere(small):
    problem = problem_of(tokens=300, batch=2, density=0.1)
    x, again = (lite.make_inputs(problem, "cpu", 7) for _ in range(2))
    bits = lite.unpack(x.mask)
    assert x.mask.dtype == torch.int32 and x.mask.shape == (2, 3, 38, 3)
    assert bits.sum(-1).unique().tolist() == [lite.listed_tiles(problem)] == [8]
    assert not bits[..., 75:].any() and (bits[..., :75].sum((0, 1, 2)) > 0).all()
    assert torch.equal(x.mask, again.mask) and torch.equal(x.q, again.q)
    assert not torch.equal(x.mask, lite.make_inputs(problem, "cpu", 8).mask)
    assert torch.equal(lite.pack(bits), x.mask) and (x.mask < 0).any()


def test_every_tile_is_listed_in_a_full_problem(small):
    x = lite.make_inputs(problem_of("full", tokens=150), "cpu", 0)
    assert x.mask.unique().tolist() == [-1, 63]
    assert lite.make_inputs(problem_of("dense"), "cpu", 0).mask is None


def test_causal_tiles_that_some_row_sees(small):
    seen = lite.visible(problem_of("full", tokens=18, causal=True), "cpu")
    assert seen.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: setting("sparse", 8), "kind: expected one of"),
        (lambda: setting("list", 8), "density: expected below 1 for lists"),
        (lambda: setting("full", 8, density=0.5), "and 1 for others, got 0.5"),
        (lambda: setting("list", 8, density=0.0), "density"),
        (lambda: setting("list", 8, density=0.5, causal=True), "causal: expected False for lists"),
        (lambda: next(workloads.structured(Shape(1, (1, 1, 8), 1, 7), 1, "cpu", 0)), "dim"),
        (
            lambda: next(workloads.drift(Shape(1, (1, 1, 8), 1, 8), 1, "cpu", 0, types=("near",))),
            r"types: expected some of spatial, .* got \('near',\)",
        ),
    ],
)
def test_unknown_problems_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_settings_are_those_16():
    assert registry.get("lite_attention") is lite_attention.OP
    assert list(BY_NAME)[:6] == [
        "dense-B1-S4096-H16-D128", "dense-B1-S8192-H16-D128", "dense-B1-S16384-H24-D128",
        "dense-B2-S4096-H32-D128", "dense-B1-S8192-H16-D64", "dense-B1-S8192-H16-D128-causal",
    ]  # fmt: skip
    assert list(BY_NAME)[6:12] == [name.replace("dense", "full") for name in list(BY_NAME)[:6]]
    assert list(BY_NAME)[12:] == [
        f"list{share}-B1-S16384-H24-D128" for share in ("3.1", "12.5", "25", "50")
    ]
    assert [lite.listed_tiles(s) for s in ALL[12:]] == [8, 32, 64, 128]
    assert {s.name for s in lite_attention.settings(True)} < set(BY_NAME)
    for pattern, count in {"dense-*": 6, "full-*": 6, "list*": 4, "*-S16384-*": 6}.items():
        assert sum(fnmatchcase(name, pattern) for name in BY_NAME) == count


def test_arithmetic_is_counted_as_the_baselines_have_it():
    """B=1, S=4096, H=16, D=128 is 137.4 GFLOP."""
    flops = {name: lite.flops(s) for name, s in BY_NAME.items()}
    assert flops["dense-B1-S4096-H16-D128"] == 137_438_953_472
    assert flops["full-B1-S8192-H16-D128"] == 4 * 137_438_953_472
    assert flops["full-B1-S8192-H16-D128-causal"] == flops["dense-B1-S8192-H16-D64"]
    assert flops["dense-B1-S8192-H16-D64"] == 2 * 137_438_953_472
    whole = flops["dense-B1-S16384-H24-D128"]
    assert [flops[s.name] * 32 // whole for s in ALL[12:]] == [1, 4, 8, 16]


def test_bytes_are_those_of_all_tensors():
    activation, lse, mask = 16384 * 24 * 128 * 2, 16384 * 24 * 4, 24 * 128 * 8 * 4
    dense, listed = BY_NAME["dense-B1-S16384-H24-D128"], BY_NAME["list3.1-B1-S16384-H24-D128"]
    assert LITE.moved(dense) == 4 * activation + lse
    assert LITE.moved(listed) == 4 * activation + lse + 2 * mask
    assert LITE_DENSE.moved(listed) == LITE.moved(dense)
    assert LITE_INT8.moved(listed) == LITE.moved(listed) + 3 * activation
    assert TORCH_CUDNN.moved(dense) == 4 * activation


@pytest.mark.parametrize("problem", ALL, ids=name_of)
def test_a_setting_fits_on_the_card_and_exceeds_the_l2(problem):
    assert_fits_the_h200(lite.read(problem), 6 * lite.moved(problem))
    rows = lite.ORACLE_ROWS * problem.params["S"] * 8
    assert rows * 6 < 2e9 and lite.ORACLE_ROWS % lite.BLOCK_M == 0


def test_providers_say_what_they_need(monkeypatch, card):
    dense, full = BY_NAME["dense-B1-S4096-H16-D128"], BY_NAME["full-B1-S4096-H16-D128"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert TORCH_CUDNN.supports(dense) == TORCH_FLASH.supports(dense) == "needs an NVIDIA GPU"
    card(7, 5)
    assert LITE.supports(full) == "liteattention-sm89 needs compute capability 8.0 or newer"
    card(8, 9)
    assert LITE.supports(full) is LITE.supports(dense) is LITE_DENSE.supports(full) is None
    assert all(LITE_INT8.supports(s) is None for s in ALL)
    assert LITE_SM89.supports(full) == "is lite itself"
    card(9, 0)
    assert LITE_SM89.supports(full) is LITE_SM89.supports(dense) is None
    monkeypatch.setattr(lite_providers, "_hopper_missing", lambda: "not installed")
    assert LITE_SM89.supports(full) == "is lite itself"
    assert LITE_DENSE.supports(dense) == "is lite itself"
    assert TORCH_CUDNN.supports(dense) is TORCH_FLASH.supports(dense) is None
    assert TORCH_CUDNN.supports(full) == TORCH_FLASH.supports(full) == "takes no lists of tiles"


@pytest.mark.parametrize("provider", [TORCH_FLASH, TORCH_CUDNN], ids=name_of)
def test_torch_is_called_with_one_backend_and_no_copies(monkeypatch, provider):
    calls = []
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention",
        lambda *tensors, **options: calls.append((tensors, options)),
    )
    chosen = []
    enter = torch.nn.attention.sdpa_kernel
    monkeypatch.setattr(
        "torch.nn.attention.sdpa_kernel", lambda b: chosen.append(b.name) or enter(b)
    )
    problem = problem_of("dense", causal=True)
    x = lite.make_inputs(problem, "cpu", 0)
    provider.bind(problem, x)()
    (((q, k, v), options),) = calls
    assert options == {"is_causal": True} and q.shape == (1, 3, 150, 16)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip((q, k, v), (x.q, x.k, x.v)))
    assert chosen == [{TORCH_FLASH: "FLASH_ATTENTION", TORCH_CUDNN: "CUDNN_ATTENTION"}[provider]]


@pytest.fixture
def result(small, measured, monkeypatch):
    """The op on the fake device, where every provider takes a time of its own per token."""
    costs = {
        "lite": 10.0,
        "lite_sm89": 20.0,
        "lite_int8": 9.0,
        "lite_dense": 40.0,
        "torch_flash": 12.0,
        "torch_cudnn": 8.0,
    }
    monkeypatch.setattr(lite_providers, "_lite_missing", lambda: None)
    monkeypatch.setattr(lite_providers, "_hopper_missing", lambda: None)

    def dense_only(problem):
        return None if problem.params["kind"] == "dense" else "takes no lists of tiles"

    def check(provider, problem, device):
        if provider.name.startswith("torch"):
            return {"output": 0.0}
        if (
            provider.name in ("lite", "lite_sm89", "lite_int8")
            and problem.params["kind"] != "dense"
        ):
            return lite.check_listed(naive, problem, device)
        return lite.check_dense(lambda p, x: naive(p, x, dense=True), problem, device)

    return measured(
        lite_attention.OP,
        lambda name, problem: costs[name] * problem.params["S"] / 64,
        [problem_of(kind, t) for kind in ("dense", "full", "list") for t in (32, 64, 96)],
        providers=[
            dataclasses.replace(p, supports=dense_only) if p.name.startswith("torch") else p
            for p in lite_attention.OP.providers
        ],
        check=check,
    )


def test_a_run_yields_rates_and_ratios(result):
    results.validate(result)
    assert len(result["rows"]) == 3 * (5 + 4 + 4)
    row = results.rows_of(result, setting="full-B1-S64-H3-D16", provider="lite")[0]
    assert row["ratio_lite_dense"] == 4.0 and "ratio_torch_flash" not in row
    assert row["tflops"] == round(4 * 3 * 64 * 64 * 16 / 10.0 / 1e6, 1)
    row = results.rows_of(result, setting="dense-B1-S64-H3-D16", provider="lite")[0]
    assert (row["ratio_torch_flash"], row["ratio_torch_cudnn"]) == (1.2, 0.8)
    assert {s["reason"] for s in result["skipped"]} == {
        "is lite itself", "takes no lists of tiles",
    }  # fmt: skip
    assert {e for c in result["checks"] for e in c["errors"]} == {"output", "lse"}


def test_rates_of_arithmetic_are_shown_and_drawn(result, tmp_path):
    for row in result["rows"]:
        row["tflops"] = row["params"]["S"] * 4.0
    header, (line, *_) = report.table(result, "graph", "list*")
    assert header[-4:] == ["lite TFLOP/s", "x lite_dense", "of ceiling", "of floor"]
    assert line[-4] == "128"
    plot.draw(result, tmp_path / "lite.png", "S", "dense*")
    assert (tmp_path / "lite.png").stat().st_size > 10_000


def test_measured_results_hold_every_setting():
    assert_every_setting_is_measured("lite_attention", BY_NAME, ("lite", "lite_int8"))
