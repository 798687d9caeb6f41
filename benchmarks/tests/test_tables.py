"""Regions of documents, their drift, and ops without results."""

import pytest

from benchmarks import ops, tables
from benchmarks.harness import results

BATCHES = (16, 64, 128, 256)


@pytest.fixture
def root(toy_result, tmp_path):
    results.save(toy_result, results.result_path("toy", "toy-100", tmp_path))
    return tmp_path


REGION = "Before\n\n<!-- bench:toy:toy-100 -->\nold\n<!-- /bench -->\n\nAfter\n"


def test_regions_are_filled_and_stay_filled(root):
    text = tables.rendered(REGION, root)
    assert "old" not in text and "| large | 10.00" in text
    assert text.startswith("Before\n\n<!-- bench:toy:toy-100 -->\n\n| setting |")
    assert text.endswith("<!-- /bench -->\n\nAfter\n")
    assert tables.rendered(text, root) == text


def test_regions_can_choose_settings_and_method(root):
    text = tables.rendered(
        REGION.replace(" -->\nold", " settings=l* method=eager-host -->\nold"), root
    )
    assert "| large |" in text and "| small |" not in text
    assert "of eager-host" in text


def test_several_regions_in_one_document(root):
    text = tables.rendered(REGION + REGION.replace("toy:toy-100", "toy:h200"), root)
    assert text.count("| large |") == 1
    assert "Not measured on h200." in text


def test_sustained_times_stand_beside_those_of_bursts(root, loaded_result):
    region = "<!-- bench:toy_sustained:toy-100 -->\n<!-- /bench -->\n"
    assert "Not measured on toy-100." in tables.rendered(region, root)
    loaded_result["provenance"]["commit"] = "fedcba9876543210"
    path = results.result_path("toy_sustained", "toy-100", root)
    results.save(loaded_result, path)
    text = tables.rendered(region, root)
    assert "| large | ours | 10.00 (10.00-10.00) | 10.00 (10.00-10.00) | 1.00 | 1.00 |" in text
    assert "small" not in text
    sustained, burst = text.split("Sustained: median (20-80 %) under 1 s of load;")[1].split(
        "Burst:"
    )
    assert "commit fedcba987654;" in sustained
    assert burst.startswith(" median (20-80 %) of graph.") and "commit 0123456789ab;" in burst
    results.result_path("toy", "toy-100", root).unlink()
    assert "| large | ours | 10.00 (10.00-10.00) | 1.00 |" in tables.rendered(region, root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:toy:toy-100 -->\nno end\n", "not closed"),
        ("<!-- bench:toy:toy-100 -->\n" + REGION, "not closed"),
        (REGION.replace("toy:toy-100", "toy"), "malformed"),
        (REGION.replace("100 -->", "100 order=up -->"), "expected options"),
        (REGION.replace("100 -->", "100 settings=x* -->"), "no row"),
    ],
)
def test_bad_regions_are_refused(root, text, message):
    with pytest.raises(ValueError, match=message):
        tables.rendered(text, root)


def test_check_names_drift_and_changes_nothing(root):
    page = root / "README.md"
    page.write_text(REGION)
    assert tables.update([page], True, root) == [page]
    assert page.read_text() == REGION
    assert tables.update([page], False, root) == [page]
    assert tables.update([page], True, root) == []


def test_a_new_measurement_is_drift(root, toy_result):
    page = root / "README.md"
    page.write_text(tables.rendered(REGION, root))
    toy_result["rows"][0]["median_us"] = toy_result["rows"][0]["p80_us"] = 11.0
    results.save(toy_result, results.result_path("toy", "toy-100", root))
    assert tables.update([page], True, root) == [page]


def test_documents_leave_out_hidden_and_generated_folders(tmp_path):
    for name in ("README.md", "docs/a.md", ".nox/b.md", "dist/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(p.relative_to(tmp_path)) for p in tables.documents(tmp_path)]
    assert found == ["README.md", "docs/a.md"]


@pytest.mark.parametrize(
    ("excused", "found"),
    [
        ({}, ["other: no result of a GPU, and no reason in WITHOUT_RESULTS"]),
        ({"other": ""}, ["other: no result of a GPU, and no reason in WITHOUT_RESULTS"]),
        ({"other": "not measured yet"}, []),
        (
            {"other": "not measured yet", "toy": "no"},
            ["toy: has a result now; remove it from WITHOUT_RESULTS"],
        ),
        (
            {"other": "not measured yet", "gone": "no"},
            ["gone: WITHOUT_RESULTS names an op that is not registered"],
        ),
    ],
)
def test_every_op_has_a_result_or_a_reason(root, excused, found):
    """Figures of a CPU, of a model and of others are no result of an op."""
    for folder in tables.NOT_GPUS:
        (root / folder).mkdir()
        (root / folder / "other.json").write_text("{}")
    assert tables.without_results(["toy", "other"], excused, root) == found


def test_check_looks_for_the_results_of_ops(monkeypatch, capsys, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("No tables.")
    assert tables.main([str(page), "--check"]) == 0 and capsys.readouterr().out == ""
    without = {**ops.WITHOUT_RESULTS, "kda_prefill": "not measured yet"}
    monkeypatch.setattr(ops, "WITHOUT_RESULTS", without)
    assert tables.main([str(page), "--check"]) == 1
    line = "kda_prefill: has a result now; remove it from WITHOUT_RESULTS"
    assert capsys.readouterr().out.splitlines() == [line]
    assert tables.main([str(page)]) == 0


def test_a_card_without_documents_gets_a_page(tmp_path, decode_result, first_call_result):
    """Results of another GPU land in a folder of their own, without a floor."""
    own = decode_result("lightning_decode", BATCHES)
    own["provenance"] = {**own["provenance"], "gpu": "NVIDIA GeForce RTX 4090"}
    for row in own["rows"]:
        row["floor_us"] = row["ratio_floor"] = None
    for gpu in ("rtx-4090", "h200"):
        results.save(own, results.result_path("lightning_decode", gpu, tmp_path))
    loaded = {**own, "title": "Decode, sustained load", "method": {"load": {"measured_s": 1.0}}}
    loaded["rows"] = [{**row, "method": "sustained"} for row in own["rows"]]
    path = results.result_path("lightning_decode_sustained", "rtx-4090", tmp_path)
    results.save(loaded, path)
    path = results.result_path("first_call", "rtx-4090", tmp_path)
    first_call_result["provenance"] = own["provenance"]
    results.write(first_call_result, path)
    (tmp_path / "published").mkdir()
    written = [path for path in tables.pages(tmp_path) if path.is_relative_to(tmp_path)]
    assert written == [tmp_path / "rtx-4090" / "README.md"]
    assert tables.update(written, False, tmp_path) == written
    text = written[0].read_text()
    assert text.startswith("# Measured on NVIDIA GeForce RTX 4090\n\nWritten by")
    assert "## Decode\n\n| setting |" in text and "| B64-T1-fp32-kv-cold | 135.3" in text
    assert "## Decode, sustained load\n\n| setting | implementation | burst, us |" in text
    assert "## First calls in new processes\n\n| function |" in text
    assert tables.update(written, True, tmp_path) == []


def test_a_page_that_is_missing_has_drifted(monkeypatch, capsys, tmp_path):
    page = tmp_path / "BENCHMARK.md"
    monkeypatch.setattr(tables, "pages", lambda root=None: {page: lambda: "new\n"})
    monkeypatch.setattr(tables, "documents", lambda: [])
    assert tables.main(["--check"]) == 1
    assert "tables differ from the result files" in capsys.readouterr().out and not page.exists()
    assert tables.main([]) == 0 and page.read_text() == "new\n"
    assert tables.main(["--check"]) == 0


def test_the_repository_itself_has_no_drift():
    assert tables.update([*tables.documents(), *tables.pages()], check=True) == []
