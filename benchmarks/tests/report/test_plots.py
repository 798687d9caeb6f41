"""Plots as elements of the page: ids of their own, text as text, and colours of the style sheet."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from benchmarks.report import page, plots

STYLE = (page.FOLDER / "style.css").read_text()


@pytest.fixture(scope="module")
def pictures():
    """One picture by lines, and one by marks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plots.VIEWS, "lite_backward", plots.VIEWS["lite_backward"][:1])
        found = []
        for op in ("lite_backward", "kda_training"):
            content = plots.results.load(plots.results.result_path(op, "h200"))
            found += plots.of_op(content, f"h200-{op}")
    return found


def test_pictures_are_elements_with_ids_of_their_own(pictures):
    assert len(pictures) == 2
    for picture, prefix in zip(pictures, ("h200-lite_backward-0-", "h200-kda_training-")):
        ids = re.findall(r'\bid="([^"]*)"', picture.svg)
        assert len(ids) == len(set(ids)) > 10
        assert all(name.startswith(prefix) for name in ids)
        used = re.findall(r'(?:url\(|href=")#([^")]*)', picture.svg)
        assert used and set(used) <= set(ids)
        root = ElementTree.fromstring(picture.svg)
        assert {"width", "height"}.isdisjoint(root.attrib) and "viewBox" in root.attrib


def test_text_is_text(pictures):
    words = {e.text for e in ElementTree.fromstring(pictures[0].svg).iter() if e.text}
    assert {"lite", "torch_flash", "floor", "us per call", "8K"} <= words
    words = {e.text for e in ElementTree.fromstring(pictures[1].svg).iter() if e.text}
    assert {"cula", "fla", "floor", "B1-T8192-H16"} <= words


def test_colours_are_those_of_the_style_sheet(pictures):
    light, dark = (dict(re.findall(r"(--[\w-]+): (#\w+)", s)) for s in STYLE.split("@media")[:2])
    assert set(light) == set(dark) >= set(plots.VARIABLES.values())
    for picture in pictures:
        assert not re.search(r"#[0-9a-f]{6}\b", picture.svg)
        assert set(re.findall(r"var\((--[\w-]+)\)", picture.svg)) <= set(light)


def test_a_colour_that_has_no_variable_is_refused():
    figure = Figure()
    figure.subplots().plot([1, 2], color="#123456")
    with pytest.raises(ValueError, match="#123456"):
        plots.as_svg(figure, "x")


def test_the_views_name_registered_ops():
    from benchmarks.harness import registry

    assert set(plots.VIEWS) <= set(registry.names())
