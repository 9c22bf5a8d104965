import dataclasses
import json
import math
import re
import resource
import signal
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs
from sample_results import HOSTILE, clustering, hostile, retrieval

from practicum.checks import check
from practicum.checks.figures import curve_plot, paired_plot, trade_off_plots
from practicum.checks.report import RULES, render_report, write_report
from practicum.checks.results import ClaimResult, ResultError
from practicum.checks.verdict import VERDICTS
from practicum.checks.words import MISSING, deviation, three_digits

PLOTLY = get_plotlyjs()
VOID = {"meta", "link", "br", "img", "hr", "input"}
APART = {"td", "th", "dt", "dd", "li", "p", "h2", "h3", "h4"}
VOID_SVG = {"path", "line", "rect", "circle", "use"}


class Page(HTMLParser):
    """A page as elements: ``found`` has (tag, attributes, text inside), and every tag must close in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found = []
        self.open = []
        self.feed(text.replace(PLOTLY, ""))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append([tag, dict(attributes), ""])
        if tag not in VOID:
            self.open.append(self.found[-1])

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID_SVG
        self.found.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag
        if tag in APART:
            self.handle_data(" ")

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag, **wanted):
        wanted = {name.rstrip("_"): value for name, value in wanted.items()}
        return [e for e in self.found if e[0] == tag and all(e[1].get(k) == v for k, v in wanted.items())]

    def text(self, tag, **wanted):
        return [" ".join(element[2].split()) for element in self.all(tag, **wanted)]

    def figures(self):
        (holder,) = self.text("script", id="figures")
        assert "<" not in holder, "it could end its script element, or open a comment in it"
        return json.loads(holder, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


@pytest.fixture(scope="module")
def text():
    return render_report([retrieval(), clustering()])


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


@pytest.fixture(scope="module")
def hostile_page():
    return Page(render_report([hostile()], title=HOSTILE))


def test_the_table_over_all_claims_comes_first_and_has_a_row_for_each(page):
    table = page.all("table")[0]
    assert table[1]["class"] == "claims"
    for claim in (*retrieval().claims, *clustering().claims):
        assert claim.text in table[2]
    assert len(page.all("td", class_="verdict")) == 6


def test_each_verdict_is_a_word_and_an_icon(page):
    kinds = {}
    for tag, attributes, words in page.found:
        if tag == "span" and attributes.get("class", "").startswith("badge "):
            kinds[words.strip()] = attributes["class"].removeprefix("badge ")
    assert set(VERDICTS) <= set(kinds)
    assert len({kinds[verdict] for verdict in VERDICTS}) == len(VERDICTS)
    drawn = {element[1]["href"] for element in page.all("use")}
    assert {f"#icon-{kinds[verdict]}" for verdict in VERDICTS} <= drawn
    assert drawn <= {"#" + element[1]["id"] for element in page.all("symbol")}


def test_the_tally_counts_the_verdicts(page):
    assert page.text("ul", class_="tally") == ["2 holds 1 does not hold 2 inconclusive 1 could not measure"]


def test_claims_show_effect_interval_margin_seeds_scale_and_date(page):
    effects = page.text("td", class_="effect")
    claim = retrieval().claims[0]
    numbers = f"{three_digits(claim.effect)}× ({three_digits(claim.low)}× to {three_digits(claim.high)}×)"
    assert numbers in effects[0]
    assert "ratio at least 3×" in effects[0]
    assert "difference within ±0.02" in effects[3]
    assert "the data has no labels" in effects[4]
    rows = [" ".join(row[2].split()) for row in page.all("tr", role="row")]
    assert rows[1].endswith("3 full 2026-11-29")
    assert rows[-1].endswith("1 quick 2026-11-30")


def drawings(claim):
    found = Page(render_report([dataclasses.replace(retrieval(), claims=[claim])]))
    return [e for e in found.found if e[0] in ("line", "circle", "rect", "path") and "class" in e[1]]


def drawn(rule, margin, effect, low, high):
    claim = ClaimResult("c", "Claim.", "m", "a", ["b"], rule, margin, False, "inconclusive", effect, low, high, 3)
    parts = drawings(claim)
    table = parts[: next(i for i, e in enumerate(parts) if e[0] == "circle") + 1]
    at = {}
    for tag, attributes, _ in table:
        at.setdefault(attributes["class"], []).append({"tag": tag, **attributes})
    return at


def test_the_interval_is_drawn_to_scale():
    at = drawn("difference_at_least", 0.5, 2.0, 1.0, 3.0)
    point = float(at["point"][0]["cx"])
    low, high = float(at["range"][0]["x1"]), float(at["range"][0]["x2"])
    margin, null = float(at["margin"][0]["x1"]), float(at["null"][0]["x1"])
    assert point == pytest.approx((low + high) / 2, abs=0.2)
    assert (low - null) / (high - low) == pytest.approx(0.5, abs=0.01)
    assert (margin - null) / (high - low) == pytest.approx(0.25, abs=0.01)
    wanted = at["wanted"][0]
    assert float(wanted["x"]) == margin
    assert float(wanted["x"]) + float(wanted["width"]) > high


def test_ratios_are_drawn_on_a_log_scale():
    at = drawn("ratio_at_most", 0.5, 4.0, 2.0, 8.0)
    point, margin = float(at["point"][0]["cx"]), float(at["margin"][0]["x1"])
    low, high = float(at["range"][0]["x1"]), float(at["range"][0]["x2"])
    assert point - low == pytest.approx(high - point, abs=0.2)
    assert low - margin == pytest.approx(high - low, abs=0.2)
    assert float(at["wanted"][0]["x"]) + float(at["wanted"][0]["width"]) == pytest.approx(margin, abs=0.2)


def test_equivalence_shades_the_band():
    at = drawn("within", 0.1, 0.0, -0.3, 0.3)
    left, right = (float(line["x1"]) for line in at["margin"])
    assert (float(at["wanted"][0]["x"]), float(at["wanted"][0]["width"])) == (
        left,
        pytest.approx(right - left, abs=0.11),
    )


@pytest.mark.parametrize(("low", "high"), [(-math.inf, math.inf), (None, None), (0.0, math.inf)])
def test_an_interval_without_end_gets_arrows(low, high):
    at = drawn("ratio_at_least", 2.0, 3.0, low, high)
    assert [end["tag"] for end in at["end"]] == ["path", "path"]


@pytest.mark.parametrize("effect", [None, math.nan, math.inf])
def test_no_effect_no_drawing(effect):
    claim = ClaimResult("c", "Claim.", "m", "a", ["b"], "ratio_at_least", 2.0, False, "could not measure", effect)
    assert len([e for e in drawings(claim) if e[1]["class"] == "point"]) == 1, "only the key has a point"


def test_every_rule_can_be_read():
    assert set(RULES) == set(check.RULES)


def test_a_plot_for_each_claim_with_pairs_and_each_trade_off(page):
    places = [e[1]["id"] for e in page.all("div", class_="plot")]
    assert places == list(page.figures())
    assert len(places) == 4 + 1 + 1 + 1 + 1
    assert all(e[1]["role"] == "img" and e[1]["aria-label"] for e in page.all("div", class_="plot"))


def test_paired_plot_joins_the_pairs_of_each_seed():
    claim = retrieval().claims[0]
    figure = paired_plot(claim, retrieval().arms, log=True)
    lines = [trace["y"] for trace in figure["data"] if trace["mode"] == "lines"]
    assert lines == [[pair["against"], pair["arm"]] for pair in claim.pairs]
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["xaxis"]["ticktext"] == ["best of<br>muvera-10240,<br>token-ann", "lemur"]


def test_a_value_is_plotted_with_its_margin_in_sight():
    figure = paired_plot(retrieval().claims[2], retrieval().arms, log=False)
    (shape,) = figure["layout"]["shapes"]
    low, high = figure["layout"]["yaxis"]["range"]
    assert shape["y0"] == 0.96
    assert low < min(figure["data"][0]["y"]) < 0.96 < high


def test_trade_off_has_a_trace_for_each_arm_through_its_points():
    result = retrieval()
    means = {(arm, metric): mean for arm, metrics in result.means().items() for metric, mean in metrics.items()}
    ((timed, quality, figure),) = trade_off_plots(result.trade_offs, means, result.arms)
    assert (timed, quality) == ("queries per second", "recall")
    points = {trace["meta"]: list(zip(trace["x"], trace["y"], strict=True)) for trace in figure["data"]}
    assert list(points) == ["lemur", "muvera-10240", "token-ann", "mean-pooling", "exact-torch"]
    expected = [(means["lemur", f"recall@{r}"], means["lemur", f"queries_per_second@{r}"]) for r in ("0.80", "0.90")]
    assert points["lemur"][:2] == expected
    assert len(points["mean-pooling"]) == 3
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert len({(t["marker"]["color"], t["marker"]["symbol"]) for t in figure["data"]}) == 5


def test_a_curve_is_the_mean_over_seeds_of_the_points_that_are_there():
    result = retrieval(seeds=3)
    figure = curve_plot(result.curves[0], result.rows, result.arms)
    ours = next(trace for trace in figure["data"] if trace["meta"] == "lemur")
    assert ours["x"] == pytest.approx([0.2, 0.6, 0.9])
    assert ours["y"] == pytest.approx([0.31, 0.5, 0.8])
    (diagonal,) = figure["layout"]["shapes"]
    assert (diagonal["x0"], diagonal["x1"]) == (diagonal["y0"], diagonal["y1"])
    assert curve_plot({"name": "nothing", "x": "", "y": ""}, result.rows, result.arms) is None


def test_metrics_are_means_and_deviations_by_arm_in_families(page):
    table = page.all("table", class_="plain metrics")[0]
    words = " ".join(table[2].split())
    assert words.startswith("Metric lemur muvera-10240 token-ann mean-pooling exact-torch pearson 0.945 ± 0.0024")
    families = page.text("th", scope="rowgroup")
    assert families == ["queries per second", "recall", "candidates", "seconds"]
    assert len(page.all("th", title="queries_per_second@0.99")) == 1


def test_a_metric_of_some_seeds_says_of_how_many():
    result = retrieval()
    result.rows[0].missing["pearson"] = "memory ran out"
    found = Page(render_report([result]))
    (table,) = found.text("table", class_="plain metrics")
    assert "2 of 3 seeds" in table
    assert "lemur, pearson (seed 0): memory ran out" in " ".join(found.text("ul", class_="gaps"))


def test_arms_show_memory_failures_and_reasons(page):
    failures = page.text("div", class_="failure")
    assert len(failures) == 1
    assert "muvera-2048, seeds 0, 1, 2: RuntimeError: expected 2048 dimensions, found 2560" in failures[0]
    assert 'File "fde.py", line 71, in encode' in failures[0]
    notes = " ".join(page.text("dl", class_="notes"))
    assert "fast-plaid Unavailable: fast-plaid is not installed" in notes
    assert "maxsim-cpu 0.1.0 was slower here" in notes
    arms = next(e[2] for e in page.all("table", class_="plain") if "Peak memory" in e[2])
    assert len(re.findall(r"\d [MG]iB", arms)) == 10
    assert "failed on 3 of 3 seeds" in arms
    assert (
        "mean-pooling, queries per second @ 0.99, recall@0.99 (seeds 0, 1, 2): recall 0.99 was not reached"
        in " ".join(page.text("ul", class_="gaps"))
    )


def test_device_memory_has_a_column_where_it_was_recorded(page):
    assert "Device memory" not in page.text("thead")[-1]
    result = clustering()
    result.rows[0].resources["peak_device_memory_bytes"] = 3 * 2**30
    found = Page(render_report([result]))
    assert "3 GiB" in " ".join(found.text("table", class_="plain"))


def test_request_machine_versions_and_remarks_are_told(page):
    words = " ".join(page.text("main"))
    for told in ("AMD EPYC 9354", "16 GiB", "2.13.0", "customers.csv", "embedded default", "2026-11-29 09:31:47 UTC"):
        assert told in words
    assert "a strong rival here" in " ".join(page.text("ul", class_="remarks"))


def test_no_results_gives_a_page_that_says_so():
    found = Page(render_report([]))
    assert found.text("p", class_="empty")[0].startswith("No results to report yet.")
    assert found.all("script", id="figures") == []


def test_nothing_is_loaded_from_elsewhere(page):
    for tag, attributes, _ in page.found:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            address = attributes.get(name, "")
            assert address is None or address == "data:," or address == "" or address.startswith("#"), (tag, address)
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy[1]["content"].startswith("default-src 'none';")
    assert all("url(" not in style and "@import" not in style for style in page.text("style"))


def test_the_same_results_give_the_same_page(text):
    assert render_report([retrieval(), clustering()]) == text


def test_ids_are_unique_and_every_inner_link_leads_somewhere(page, hostile_page):
    for found in (page, hostile_page, Page(render_report([retrieval(), retrieval()]))):
        ids = [e[1]["id"] for e in found.found if "id" in e[1]]
        assert len(ids) == len(set(ids))
        targets = {e[1]["href"].removeprefix("#") for e in found.all("a")}
        targets |= {e[1]["aria-labelledby"] for e in found.found if "aria-labelledby" in e[1]}
        assert targets <= set(ids)


def test_mark_up_in_strings_stays_text(page, hostile_page):
    assert len(hostile_page.all("script")) == len(page.all("script"))
    assert hostile_page.all("img") == []
    assert hostile_page.text("h1") == [HOSTILE]
    assert hostile_page.text("title") == [HOSTILE]
    assert "49" not in hostile_page.text("h1")[0]
    figures = hostile_page.figures()
    traces = [trace for figure in figures.values() for trace in figure["data"]]
    assert HOSTILE in [trace.pop("meta", None) for trace in traces], (
        "a name that is not shown as text, whole in the data"
    )
    assert "<img" not in json.dumps(figures)
    assert "&lt;img" in json.dumps(figures)


def test_numbers_that_are_none_are_dashes_and_never_reach_a_plot(hostile_page):
    assert set(hostile_page.figures()) == {"m1-c1-pairs", "m1-trade-off-1", "m1-trade-off-2"}
    words = " ".join(hostile_page.text("main"))
    assert not re.search(r"\b(nan|NaN|None|inf|Infinity)\b", words.replace(HOSTILE, ""))


def test_a_result_of_many_arms_and_no_claims_can_be_drawn():
    result = dataclasses.replace(retrieval(), claims=[], arms=[f"arm {i}" for i in range(11)], trade_offs=[["x", "y"]])
    found = Page(render_report([result]))
    assert "This result has no claims." in found.text("table", class_="claims")[0]


def test_written_whole_and_readable(tmp_path, text):
    path = tmp_path / "deep" / "report.html"
    write_report([retrieval(), clustering()], path)
    assert path.read_text(encoding="utf-8") == text
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match=r"cannot write .*report\.html"):
        write_report([], tmp_path / "file" / "report.html")


def test_a_full_disk_leaves_the_old_report(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ResultError, match=r"cannot write .*report\.html: File too large"):
            write_report([], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (999.6, "1,000"),
        (1e6, "1,000,000"),
        (12345678.0, "1.23 × 10⁷"),
        (0.00012345, "1.23 × 10⁻⁴"),
        (0.0012345, "0.00123"),
        (-0.0999999, "−0.100"),
        (7.0, "7"),
        (0.0, "0"),
        (-math.inf, "−∞"),
        (None, MISSING),
    ],
)
def test_three_digits(number, words):
    assert three_digits(number) == words


@pytest.mark.parametrize(
    ("number", "words"), [(0.0996, "0.10"), (99.6, "100"), (1.5e-9, "1.50 × 10⁻⁹"), (math.nan, "–")]
)
def test_deviation(number, words):
    assert deviation(number) == words
