"""Plots of synthetic results."""

import pytest

from benchmarks import plot

BATCHES = (16, 64, 128, 256)


def test_plot_writes_a_png(tmp_path, decode_result):
    out = tmp_path / "plots" / "decode.png"
    plot.draw(decode_result("lightning_decode", BATCHES), out)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert out.stat().st_size > 10_000


def test_plot_panels_group_by_everything_but_x(decode_result):
    result = decode_result("lightning_decode", BATCHES)
    result["rows"][0]["params"]["layout"] = "vk"
    panels = plot.panels(result, "B")
    assert list(panels) == ["T=1, state=fp32, layout=kv, commit=True, L2 cold"]
    (rows,) = panels.values()
    lines = plot.series(rows, "B")
    assert [r["params"]["B"] for r in lines["fla"]] == list(BATCHES)
    assert [r["params"]["B"] for r in lines["cula"]] == list(BATCHES[1:])


def test_plot_refuses_a_result_without_a_curve(toy_result, tmp_path):
    with pytest.raises(ValueError, match="3 or more values of B"):
        plot.draw(toy_result, tmp_path / "x.png")


def test_four_peers_differ_in_colour_and_marker_from_each_other_and_the_floor():
    names = ["ours", "a", "b", "c", "d"]
    rows = [{"provider": n, "role": "ours" if n == "ours" else "peer"} for n in names]
    looks = plot.styles(rows)
    assert len({look["color"] for look in looks.values()} | {"black"}) == 6
    assert len({look["marker"] for look in looks.values()}) == 5
