"""Tables and plots of skip-list attention, from made-up times."""

import copy
import subprocess
import sys

import pytest

from benchmarks import plot, tables
from benchmarks.harness import results
from benchmarks.ops.lite import (
    lite_attention,
    lite_backward,
    lite_stages,
    lite_sweeps,
    lite_training,
    quality_rows,
)
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import tables as lite_tables
from benchmarks.ops.lite.problem import setting

ROLES = {
    "lite": "ours", "lite_sm89": "variant", "lite_int8": "variant", "lite_deterministic": "variant",
    "lite_dense": "peer", "torch_flash": "peer", "torch_cudnn": "peer",
    **{p.name: p.role for op in (lite_training, lite_stages) for p in op.OP.providers},
}  # fmt: skip


@pytest.fixture
def result_of(toy_result):
    def make(op, times):
        """times: {setting: {provider: us}}, settings of the op in their own order."""
        rows = []
        for problem, by_provider in times:
            for name, us in by_provider.items():
                rows.append(
                    {
                        "setting": problem.name,
                        "params": dict(problem.params),
                        "l2": "cold",
                        "provider": name,
                        "role": ROLES[name],
                        "method": "graph",
                        "median_us": us,
                        "p20_us": us * 0.9,
                        "p80_us": us * 1.1,
                        "samples": 10,
                        "calls_per_sample": 1,
                        "bytes": 1000,
                        "gbps": 1.0,
                        "floor_us": 1.0,
                    }
                )
                if op.flops is not None:
                    rows[-1]["tflops"] = round(op.flops(problem) / us / 1e6, 1)
        results.add_ratios(rows)
        return {**toy_result, "op": op.name, "title": op.title, "rows": rows}

    return make


DENSE = [setting("dense", s, heads=h) for s, h in ((4096, 16), (8192, 16), (16384, 24))]


@pytest.fixture
def forward(result_of):
    """Dense at 400 TFLOP/s of ours; overhead of 2 %; an eighth of the tiles in a seventh of the time."""
    times = []
    for p in DENSE:
        us = lite_attention.OP.flops(p) / 400e6
        peers = {"torch_flash": us * 1.1, "torch_cudnn": us / 1.6}
        times.append((p, {"lite": us, "lite_int8": us / 1.25, **peers}))
    times.append((setting("full", 4096), {"lite": 102.0, "lite_int8": 81.6, "lite_dense": 100.0}))
    for n, density in enumerate((1 / 2, 1 / 4, 1 / 8)):
        us = 1400.0 / (2, 4, 7)[n]
        times.append(
            (setting("list", 16384, density=density), {"lite": us, "lite_int8": us, "lite_dense": 1400.0})
        )  # fmt: skip
    return result_of(lite_attention.OP, times)


@pytest.fixture
def backward(result_of):
    dense = {"lite": 1000.0, "lite_deterministic": 1500.0, "torch_flash": 900.0}
    listed = {"lite": 100.0, "lite_deterministic": 160.0, "lite_dense": 1000.0}
    times = [(DENSE[1], dense), (setting("list", 8192, density=0.05), listed)]
    return result_of(lite_backward.OP, times)


def test_rates_of_every_provider_but_int8(forward):
    header, lines = lite_tables.rates(forward, "graph", "dense-*")
    assert header == [
        "setting", "lite, us", "lite TFLOP/s", "torch_flash, us", "torch_flash TFLOP/s",
        "torch_cudnn, us", "torch_cudnn TFLOP/s", "x torch_flash", "x torch_cudnn",
    ]  # fmt: skip
    assert lines[0] == [
        "dense-B1-S4096-H16-D128", "343.6 (309.2-378.0)", "400", "378.0", "364", "214.7", "640", "1.10", "0.62",
    ]  # fmt: skip
    assert [line[0] for line in lines] == [p.name for p in DENSE]


def test_rates_of_the_backward_pass_show_the_deterministic_kernels(backward):
    header, (line,) = lite_tables.rates(backward, "graph", "dense-*")
    assert header[3:] == [
        "lite_deterministic, us", "lite_deterministic TFLOP/s", "torch_flash, us", "torch_flash TFLOP/s",
        "x torch_flash",
    ]  # fmt: skip
    assert line[1:] == [
        "1000.0 (900.0-1100.0)", "1374", "1500.0", "916", "900.0", "1527", "0.90",
    ]  # fmt: skip


def test_overhead_of_deciding(forward):
    header, (line,) = lite_tables.overhead(forward, "graph", "full-*")
    assert header == ["setting", "lite, us", "TFLOP/s", "dense, us", "overhead"]
    assert line[0] == "full-B1-S4096-H16-D128" and line[2:] == ["1347", "100.0", "+2.0%"]


def test_lists_are_compared_with_our_dense_kernel(forward):
    header, lines = lite_tables.lists(forward, "graph", "list*")
    assert header == [
        "setting", "tiles listed", "lite, us", "dense, us", "speedup", "of dense rate per tile",
    ]  # fmt: skip
    assert [[line[1], *line[3:]] for line in lines] == [
        ["50.0%", "1400.0", "2.00", "100%"],
        ["25.0%", "1400.0", "4.00", "100%"],
        ["12.5%", "1400.0", "7.00", "88%"],
    ]


def test_lists_of_the_backward_pass(backward):
    """5 % of 128 tiles are 6, that is 4.7 %."""
    header, (line,) = lite_tables.lists(backward, "graph", "list*")
    assert header[-2:] == ["lite_deterministic, us", "lite_deterministic speedup"]
    assert line[1:2] + line[3:] == ["4.7%", "1000.0", "10.00", "47%", "160.0", "6.25"]


def test_int8_is_compared_with_16_bits(forward):
    header, lines = lite_tables.int8(forward, "graph", "*")
    assert header == ["setting", "lite_int8, us", "TFLOP/s", "lite, us", "x lite"]
    assert [line[-1] for line in lines] == ["1.25"] * 4 + ["1.00"] * 3
    assert lines[0][1:4] == ["274.9 (247.4-302.4)", "500", "343.6"]


@pytest.fixture
def trained(result_of):
    """A step of 1500 us, 1000 of it backward; torch's take 1600 and 800. An eighth of the tiles: 700, of it 200."""
    dense = {"lite": 1500.0, "lite_backward": 1000.0, "torch_flash": 1600.0, "torch_cudnn": 800.0}
    listed = {"lite": 700.0, "lite_listed": 300.0, "lite_backward": 200.0, "lite_dense": 1500.0}
    other = {"lite": 6000.0, "lite_backward": 4000.0}
    times = [(DENSE[0], dense), (setting("list", 4096, density=1 / 8), listed), (DENSE[1], other)]
    return result_of(lite_training.OP, times)


def test_training_is_compared_with_the_dense_step_of_the_same_shape(trained):
    header, lines = lite_tables.training(trained, "graph", "*-S4096-*")
    assert header == [
        "setting", "tiles with gradients", "lite, us", "x dense", "x torch_flash", "x torch_cudnn",
        "both passes listed, us", "both, x dense", "backward alone, us", "backward, x dense",
    ]  # fmt: skip
    assert lines == [
        [
            "dense-B1-S4096-H16-D128", "100.0%", "1500.0 (1350.0-1650.0)", "1.00", "1.07", "0.53", "-", "-",
            "1000.0", "1.00",
        ],
        [
            "list12.5-B1-S4096-H16-D128", "12.5%", "700.0 (630.0-770.0)", "2.14", "2.29", "1.14", "300.0", "5.00",
            "200.0", "5.00",
        ],
    ]  # fmt: skip
    _, (line,) = lite_tables.training(trained, "graph", "*-S8192-*")
    assert line[3:] == ["1.00", "-", "-", "-", "-", "4000.0", "1.00"]


def test_lists_show_their_steps_without_a_dense_one(trained):
    _, (line,) = lite_tables.training(trained, "graph", "list*")
    assert line[3] == "2.14" and line[5] == "1.14"
    trained["rows"] = [r for r in trained["rows"] if not r["setting"].startswith("dense")]
    _, (line,) = lite_tables.training(trained, "graph", "list*")
    assert line[3:] == ["-", "-", "-", "300.0", "-", "200.0", "-"]


@pytest.fixture
def staged(result_of):
    dense = {"lite": 1600.0, "forward": 400.0, "gradients": 1120.0}
    listed = {"lite": 800.0, "forward": 400.0, "transpose": 16.0, "gradients": 200.0}
    times = [(DENSE[0], dense), (setting("list", 4096, density=1 / 8), listed)]
    return result_of(lite_stages.OP, times)


def test_stages_and_their_shares_of_the_step(staged):
    header, lines = lite_tables.stages(staged, "graph", "*")
    names = ["dense-B1-S4096-H16-D128", "list12.5-B1-S4096-H16-D128"]
    assert header == ["stage", *(w for n in names for w in (f"{n}, us", "of the step"))]
    assert lines == [
        ["forward", "400.0", "25.0%", "400.0", "50.0%"],
        ["transpose", "-", "-", "16.0", "2.0%"],
        ["gradients", "1120.0", "70.0%", "200.0", "25.0%"],
        ["all stages", "1520.0", "95.0%", "616.0", "77.0%"],
        ["the step", "1600.0", "100.0%", "800.0", "100.0%"],
    ]
    assert lite_tables.stages(staged, "graph", "full-*") == (["stage"], [])


@pytest.fixture
def swept(result_of):
    times = []
    for dim in (64, 256):
        us = 1e-6 * lite_attention.OP.flops(setting("dense", 8192, dim=dim)) / 400
        peers = {"torch_flash": us * 1.2} | ({"torch_cudnn": us / 2} if dim == 64 else {})
        times.append((setting("dense", 8192, dim=dim), {"lite": us, **peers}))
        times.append((setting("full", 8192, dim=dim), {"lite": us * 1.03, "lite_dense": us}))
        listed = {"lite": us / 7, "lite_dense": us}
        times.append((setting("list", 8192, dim=dim, density=1 / 8), listed))
    return result_of(lite_sweeps.OP, times)


def test_a_sweep_has_a_line_per_shape(swept):
    header, lines = lite_tables.sweep(swept, "graph", "*-S8192-*")
    assert header == [
        "shape", "dense, us", "TFLOP/s", "torch_flash, us", "torch_cudnn, us", "x torch_flash", "x torch_cudnn",
        "nothing skipped, us", "overhead", "listed, us", "tiles listed", "speedup",
    ]  # fmt: skip
    # 4 H S^2 D is 274.9 GFLOP at D = 64, and four times that at D = 256.
    assert lines[0] == [
        "B1-S8192-H16-D64", "687.2 (618.5-755.9)", "400", "824.6", "343.6", "1.20", "0.50", "707.8", "+3.0%", "98.17",
        "12.5%", "7.00",
    ]  # fmt: skip
    assert lines[1][:2] == ["B1-S8192-H16-D256", "2748.8 (2473.9-3023.7)"]
    assert lines[1][4] == lines[1][6] == "-"
    _, (line,) = lite_tables.sweep(swept, "graph", "full-*-D256")
    assert line[1:7] == ["-"] * 6 and line[8:] == ["+3.0%", "-", "-", "-"]


def test_what_is_missing_is_a_dash(forward):
    forward["rows"] = [
        r for r in forward["rows"] if r["provider"] not in ("lite_dense", "torch_cudnn")
    ]
    assert lite_tables.overhead(forward, "graph", "full-*")[1][0][3:] == ["-", "-"]
    assert lite_tables.lists(forward, "graph", "list*")[1][0][3:] == ["-", "-", "-"]
    forward["rows"] = [
        r for r in forward["rows"] if r["setting"] != DENSE[0].name or r["role"] != "peer"
    ]
    assert lite_tables.rates(forward, "graph", "dense-*")[1][0][3:] == ["-", "-", "-"]
    assert lite_tables.overhead(forward, "eager-host", "*")[1] == []


@pytest.mark.parametrize("op", [lite_attention, lite_backward])
def test_the_share_of_tiles_is_that_of_the_problems(op):
    assert lite_tables.TILE == lite.BLOCK_N
    for problem in op.settings(False):
        tiles = lite.tiles(problem.params["S"])[1]
        assert lite_tables.listed_share(problem.params) == lite.listed_tiles(problem) / tiles


def region(root, words, op="lite_attention"):
    text = f"<!-- bench:{op}:toy-100 {words} -->\n<!-- /bench -->\n"
    return tables.rendered(text, root)


@pytest.fixture
def root(forward, tmp_path):
    results.save(forward, results.result_path("lite_attention", "toy-100", tmp_path))
    return tmp_path


def test_regions_choose_a_table(root):
    text = region(root, "settings=full-* method=graph table=overhead")
    assert "\n| setting | lite, us | TFLOP/s | dense, us | overhead |\n" in text
    assert "| 1347 | 100.0 | +2.0% |\n\nMedian (20-80 %) of graph. NVIDIA Toy 100" in text
    assert "| of floor |" in region(root, "settings=full-* method=graph")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("table=all", r"expected a table of \[.*'int8', .*, got 'all'"),
        ("settings=x* table=lists", "no row"),
        ("method=eager-host table=lists", "no row"),
    ],
)
def test_bad_tables_are_refused(root, words, message):
    with pytest.raises(ValueError, match=message):
        region(root, words)


def test_an_unknown_table_is_refused_before_there_are_results(tmp_path):
    assert "Not measured on toy-100." in region(tmp_path, "table=lists")
    with pytest.raises(ValueError, match="expected a table of"):
        region(tmp_path, "table=all")


def test_quality_has_its_own_table(tmp_path, forward):
    row = {name: kinds[0]() for name, kinds in quality_rows.FIELDS.items()}
    row |= {"calibration": None, "best_dense": "torch_cudnn", "dense_us": {"torch_cudnn": 1.0}}
    result = copy.deepcopy(forward)
    for r in result["rows"]:
        r |= row | {"density": 0.25, "rel_l1": 0.0312, "speedup": 1.75}
    results.save(result, results.result_path("lite_quality", "toy-100", tmp_path))
    text = region(tmp_path, "settings=full-*", "lite_quality")
    header, _, line = text.splitlines()[2:5]
    assert header.startswith("| setting | density | L1 | worst step | oracle |")
    assert line.startswith("| full-B1-S4096-H16-D128 | 0.250 | 3.12% |") and "| 1.75 |" in line
    del result["rows"][0]["density"]
    results.save(result, results.result_path("lite_quality", "toy-100", tmp_path))
    with pytest.raises(ValueError, match="density: missing"):
        region(tmp_path, "settings=full-*", "lite_quality")


def test_tables_are_made_without_torch():
    """Where documents are checked there is none."""
    code = "import sys; sys.modules['torch'] = None; import benchmarks.tables"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tables.ROOT)


def test_lists_and_lengths_are_drawn(forward, tmp_path):
    (title,) = plot.panels(forward, "density", "list*")
    assert title == "kind=list, B=1, S=16384, H=16, D=128, L2 cold"
    assert plot.panels(forward, "S", "dense-*") == {}
    (rows,) = plot.panels(forward, "S", "dense-*", ["H"]).values()
    lines = plot.series(rows, "S")
    assert [r["params"]["H"] for r in lines["torch_flash"]] == [16, 16, 24]
    path, out = tmp_path / "lite.json", tmp_path / "lite.png"
    results.save(forward, path)
    words = [str(path), "--x", "S", "--merge", "H", "--settings", "dense-*"]
    assert plot.main(words) == 0 and out.stat().st_size > 10_000
    assert plot.main([*words[:3], "--out", str(out)]) == 2


def test_providers_have_colours_of_their_own(forward, decode_result):
    found = plot.colors(forward["rows"])
    assert list(found) == ["lite", "lite_int8", "torch_flash", "torch_cudnn", "lite_dense"]
    assert len(set(found.values())) == 5
    decode = decode_result("lightning_decode", (16, 64, 128))["rows"]
    assert plot.colors(decode) == {
        "cula": "tab:red", "inplace_ceiling": "tab:gray", "fla": "tab:blue",
    }  # fmt: skip
