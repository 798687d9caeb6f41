"""Result files: a round trip, and what is refused."""

import pytest

from benchmarks.harness import results


def test_result_is_valid_and_survives_a_round_trip(toy_result, tmp_path):
    path = tmp_path / "toy" / "op.json"
    results.save(toy_result, path)
    assert results.load(path) == toy_result


def test_result_files_hold_one_row_per_line(toy_result, tmp_path):
    results.save(toy_result, tmp_path / "op.json")
    lines = (tmp_path / "op.json").read_text().splitlines()
    assert sum(line.startswith('  {"setting"') for line in lines) == len(toy_result["rows"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r.pop("rows"), "result.rows: missing"),
        (lambda r: r.update(schema=2), "schema: expected 1"),
        (lambda r: r["rows"][0].pop("gbps"), r"rows\[0\].gbps: missing"),
        (lambda r: r["rows"][0].update(median_us="1"), r"rows\[0\].median_us: expected int/float"),
        (lambda r: r["rows"][0].update(samples=True), r"rows\[0\].samples: expected int"),
        (lambda r: r["rows"][0].update(p20_us=1e6), r"rows\[0\]: expected 0 < p20_us"),
        (lambda r: r["rows"][0].update(method="guess"), r"rows\[0\].method"),
        (lambda r: r["rows"].append(r["rows"][0]), "appears twice"),
        (lambda r: r["rows"][0].update(power_w="700"), r"rows\[0\].power_w: expected int/float"),
        (
            lambda r: r["rows"][0].update(method="sustained"),
            "sustained rows in a file of their own",
        ),
    ],
)
def test_validation_names_the_field(toy_result, spoil, message):
    spoil(toy_result)
    with pytest.raises(ValueError, match=message):
        results.validate(toy_result)


def test_sustained_results_have_a_file_of_their_own():
    assert results.file_name("toy", ("graph", "eager-host")) == "toy"
    assert results.file_name("toy", ("sustained",)) == "toy_sustained"
