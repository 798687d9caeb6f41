"""The page in a browser: its width, its contrast, its plots, and what it asks the network for.

The session `report` runs these with the Chromium that it finds, and fails without one.
"""

import pytest

from benchmarks.report import page, pictures

pytestmark = pytest.mark.browser

SCREENS = [(size, scheme) for size in pictures.SIZES for scheme in pictures.SCHEMES]
# Contrast as WCAG 2 defines it, of every text (but the third and later lines of tables, which look like the second) and
# of everything that is drawn in a colour of the plots.
CONTRASTS = """() => {
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    throw "a page without a background";
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const found = { text: [], lines: [] };
  document.querySelectorAll("details").forEach(e => { e.open = true; });
  for (const e of document.querySelectorAll("body *:not(tbody tr:nth-child(n+3) *)")) {
    const style = getComputedStyle(e);
    const words = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (words) {
      const color = parse(e.closest("svg") ? style.fill : style.color);
      found.text.push([ratio(color, behind(e)), e.tagName, e.textContent.slice(0, 30)]);
    } else if (/--tab-/.test(e.getAttribute("style") || "") && style.stroke !== "none") {
      found.lines.push([ratio(parse(style.stroke), behind(e)), e.tagName, style.stroke]);
    }
  }
  return found;
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page.render(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def running():
    if pictures.browser() is None:
        pytest.fail(f"{pictures.MISSING}; -m 'not browser' leaves such tests out", pytrace=False)
    with pictures.started() as browser:
        yield browser


@pytest.fixture(scope="module", params=SCREENS, ids="-".join)
def tab(request, running, address):
    """The page on a screen; `errors` and `requests` hold what the browser said and asked for."""
    size, scheme = request.param
    width, height = pictures.SIZES[size]
    opened = running.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened.errors, opened.requests, opened.scheme = [], [], scheme
    opened.on("console", lambda message: opened.errors.append(message.text))
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("request", lambda wanted: opened.requests.append(wanted.url))
    opened.goto(address)
    yield opened
    opened.close()


def test_the_browser_is_silent_and_asks_for_nothing(tab, address):
    assert tab.errors == []
    assert {url for url in tab.requests if not url.startswith("data:")} == {address}


def test_the_page_is_as_wide_as_the_screen(tab):
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    wide = tab.evaluate("Math.max(document.body.scrollWidth, document.documentElement.scrollWidth)")
    assert wide <= tab.viewport_size["width"]


def test_wide_tables_scroll_inside_their_box(tab):
    boxes = tab.evaluate(
        "[...document.querySelectorAll('.scroll')].map(e => [e.clientWidth, e.scrollWidth])"
    )
    assert len(boxes) > 15 and all(0 < inner for inner, _ in boxes)
    assert any(table > inner for inner, table in boxes)


def test_every_plot_is_seen(tab):
    sizes = tab.evaluate(
        "[...document.querySelectorAll('figure svg')].map(e => {"
        " const b = e.getBoundingClientRect(); return [b.width, b.height]; })"
    )
    assert len(sizes) > 20
    assert min(width for width, _ in sizes) > 250 and min(height for _, height in sizes) > 100


def test_text_and_lines_stand_out(tab):
    found = tab.evaluate(CONTRASTS)
    assert len(found["text"]) > 1000 and len(found["lines"]) > 200
    assert [text for text in found["text"] if text[0] < 4.5] == []
    assert [line for line in found["lines"] if line[0] < 3] == []


def test_light_and_dark_differ(tab):
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (tab.scheme == "light")
