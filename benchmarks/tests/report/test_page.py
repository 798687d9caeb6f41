"""The page as a document: what it links to, what it holds, and that nothing is fetched for it."""

import json
import re
from html.parser import HTMLParser

import pytest

from benchmarks.harness import results
from benchmarks.report import __main__ as command
from benchmarks.report import page, pictures, plots, sections

VOID = {"meta", "link", "br", "img", "input"}


class Document(HTMLParser):
    """Ids, links, what is fetched, and the text of every section of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.fetched, self.open = [], [], [], []
        self.text, self.figures = {}, {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in VOID:
            self.open.append((tag, found.get("id")))
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        else:
            self.fetched += [(tag, found[k]) for k in ("src", "href", "srcset") if k in found]
        if tag == "figure":
            self.figures[self.section()] = self.figures.get(self.section(), 0) + 1
        assert tag not in ("script", "iframe", "img")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text.setdefault(self.section(), []).append(data.strip())

    def section(self):
        return next((name for tag, name in reversed(self.open) if tag == "section"), None)


@pytest.fixture(scope="module")
def text():
    """The page of all committed results. Empty pictures, because drawing them takes ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "as_svg", lambda figure, prefix: f'<svg id="{prefix}-picture"></svg>')
        return page.render()


@pytest.fixture(scope="module")
def document(text):
    return Document(text)


def committed():
    return sorted(results.RESULTS.rglob("*.json"))


def test_every_result_file_has_a_section_of_its_own(document):
    anchors = {f"{p.parent.name}-{p.stem}": p for p in committed()}
    assert len(anchors) > 15
    assert set(document.text) == {None, "summary", *anchors}
    for anchor, path in anchors.items():
        assert f"{path.parent.name}/{path.name}" in document.text[anchor]


def test_every_link_of_the_page_leads_somewhere(document):
    assert len(document.ids) == len(set(document.ids))
    inner = {link[1:] for link in document.links if link.startswith("#")}
    assert inner <= set(document.ids)
    assert {s for s in document.text if s} <= inner


def test_nothing_is_fetched(text, document):
    outer = {link for link in document.links if not link.startswith("#")}
    assert outer == {link for _, link in page.PROJECTS.values() if link}
    assert document.fetched == [("link", "data:,")]
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    assert not document.open


def test_every_section_says_where_it_is_from(document):
    words = {
        "h100-80gb-hbm3": "ran on NVIDIA H100 80GB HBM3",
        "h200": "ran on NVIDIA H200",
        "cpu": "emulated",
        "predicted": "predicted",
        "published": "published by others",
        "suite": "ran on a CPU",
    }
    for path in committed():
        cells = document.text[f"{path.parent.name}-{path.stem}"]
        assert words[path.parent.name] in cells
        assert "How this is known" in cells
        commit = json.loads(path.read_text()).get("provenance", {}).get("commit")
        assert commit is None or commit in cells


def test_every_op_has_plots_and_the_times_of_all_settings(document):
    for path in committed():
        content = json.loads(path.read_text())
        if "place" not in content:
            continue
        anchor = f"{path.parent.name}-{path.stem}"
        assert document.figures[anchor] >= 1
        assert {r["setting"] for r in content["rows"]} <= set(document.text[anchor])
        assert document.text[anchor].count("energy, J per call") == 1


def test_text_of_result_files_is_escaped(tmp_path, monkeypatch, decode_result):
    content = decode_result("lightning_decode", (16, 64, 128))
    content["title"] = "<b>x</b>"
    path = tmp_path / "toy-100" / "lightning_decode.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    monkeypatch.setattr(plots, "as_svg", lambda figure, prefix: "<svg></svg>")
    text = page.render(tmp_path)
    assert "&lt;b&gt;x&lt;/b&gt;" in text and "<b>" not in text


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert command.main(["--results", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "expected result files, found none" in capsys.readouterr().err
    assert not out.exists()


def test_pictures_need_a_browser(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "render", lambda root: "<p>page</p>")
    monkeypatch.setattr(pictures, "NAMES", ())
    monkeypatch.delenv("CHROMIUM", raising=False)
    out = tmp_path / "page.html"
    words = ["--out", str(out), "--pictures", str(tmp_path / "pictures")]
    assert command.main(words) == 2
    assert pictures.MISSING in capsys.readouterr().err
    assert out.read_text() == "<p>page</p>"


def test_the_browser_is_the_one_that_is_named(tmp_path, monkeypatch):
    program = tmp_path / "browser"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setattr(pictures, "NAMES", ("browser",))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert pictures.browser() == str(program)
    monkeypatch.setenv("CHROMIUM", "elsewhere")
    assert pictures.browser() is None


def test_registered_ops_come_first_in_their_own_order():
    names = [path.stem for path in sections.files() if not path.stem.endswith("_sustained")]
    assert names[:2] == ["lightning_decode", "lightning_decode_80sm"]
    assert names.index("lite_backward") < names.index("ncu_decode") < names.index("time")


def test_the_gpu_with_most_results_comes_first(tmp_path):
    for file in ("a100/kda_prefill", "h200/kda_prefill", "h200/lite_attention", "cpu/emulator"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / f"{file}.json").write_text("{}")
    folders = [path.parent.name for path in sections.files(tmp_path)]
    assert folders == ["h200", "h200", "a100", "cpu"]


def test_sustained_times_come_behind_the_bursts_of_their_op(tmp_path):
    for op in ("lite_attention", "first_call", "kda_prefill", "kda_prefill_sustained"):
        (tmp_path / "h200").mkdir(exist_ok=True)
        (tmp_path / "h200" / f"{op}.json").write_text("{}")
    names = [path.stem for path in sections.files(tmp_path)]
    assert names == ["kda_prefill", "kda_prefill_sustained", "lite_attention", "first_call"]
