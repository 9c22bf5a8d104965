import re
from itertools import pairwise

import pytest
from sample_results import HOSTILE, clustering, hostile, retrieval

from practicum.checks.report import write_report
from practicum.checks.verdict import VERDICTS

pytestmark = pytest.mark.browser

# The least contrast ratio of any text, with the text; transparent backgrounds show what lies under them.
CONTRAST = """() => {
  const parse = (colour) => {
    const numbers = colour.match(/[\\d.]+/g).map(Number);
    return { rgb: numbers.slice(0, 3), alpha: numbers.length > 3 ? numbers[3] : 1 };
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const under = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const { rgb, alpha } = parse(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return rgb;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const text = texts.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true }) || element.closest("script, style")) continue;
    const styles = getComputedStyle(element);
    const ink = luminance(parse(element.closest("svg") ? styles.fill : styles.color).rgb);
    const paper = luminance(under(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < least[0]) least = [ratio, text];
  }
  return least;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report([retrieval(), clustering()], path)
    return path


class Visits:
    """Opens files, each in a context of its own, and notes what the pages complain of and what they ask for."""

    def __init__(self, browser):
        self.browser, self.complaints, self.requests, self.contexts = browser, [], [], []

    def __call__(self, path, *, width=1200, scheme="light", scripts=True):
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
        )
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())
        if scripts:
            page.wait_for_selector("html[data-plots=drawn]", timeout=60_000)
        return page

    def close(self):
        for context in self.contexts:
            context.close()
        assert self.complaints == []
        assert [url for url in self.requests if not re.match(r"file:///.*\.html$|data:,$", url)] == []


@pytest.fixture
def visit(chromium):
    visits = Visits(chromium)
    yield visits
    visits.close()


@pytest.fixture(scope="module")
def seen(chromium, report):
    """The report as ``seen(width, scheme)``, opened once a width for all tests that leave it as it was."""
    visits, pages = Visits(chromium), {}

    def look(width=1200, scheme="light"):
        if width not in pages:
            pages[width] = visits(report, width=width, scheme=scheme)
        turn_system(pages[width], scheme)
        assert visits.complaints == []
        return pages[width]

    yield look
    visits.close()


def turn_system(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.wait_for_selector(f"#theme[aria-pressed={'true' if scheme == 'dark' else 'false'}]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_shows_every_verdict_and_draws_every_plot_within_the_width(seen, width, scheme):
    page = seen(width=width, scheme=scheme)
    for verdict in VERDICTS:
        badges = page.locator(".claims .badge", has_text=verdict)
        assert badges.count() >= 1
        assert badges.first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    places = page.locator(".plot")
    assert places.count() == 8
    for place in places.all():
        drawing = place.locator("svg.main-svg").first
        place_box, box = place.bounding_box(), drawing.bounding_box()
        assert box["width"] == pytest.approx(place_box["width"], abs=1)
        assert box["height"] == pytest.approx(place_box["height"], abs=1)
        assert place.locator(".point").count() > 0
    assert page.locator(".interval .point").count() == 5 + 5 + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_of_level_aa(seen, scheme):
    page = seen(scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    ratio, text = page.evaluate(CONTRAST)
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = false; })")
    assert ratio >= 4.5, text


def test_no_text_of_a_plot_is_cut_off_or_lies_on_another(seen):
    page = seen(width=400)
    for place in page.locator(".plot").all():
        frame = place.bounding_box()
        boxes = [text.bounding_box() for text in place.locator(".xtick text, .ytick text").all()]
        for box in boxes:
            assert box["x"] >= frame["x"] - 1
            assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 12
        for one, other in pairwise(boxes):
            apart = (
                one["x"] + one["width"] <= other["x"] + 1
                or other["x"] + other["width"] <= one["x"] + 1
                or one["y"] + one["height"] <= other["y"] + 1
                or other["y"] + other["height"] <= one["y"] + 1
            )
            assert apart


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def plot_ink(page):
    return page.evaluate("getComputedStyle(document.querySelector('.plot .xtick text')).fill")


def test_the_theme_is_changed_by_keyboard_and_remembered_and_the_claims_are_two_keys_away(visit, report):
    page = visit(report)
    light, light_ink = background(page), plot_ink(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    assert page.get_attribute("#theme", "aria-pressed") == "false"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    dark, dark_ink = background(page), plot_ink(page)
    assert dark != light
    assert dark_ink != light_ink
    assert page.get_attribute("#theme", "aria-pressed") == "true"

    page.reload()
    page.wait_for_selector("html[data-plots=drawn]")
    assert (background(page), plot_ink(page)) == (dark, dark_ink)
    page.focus("#theme")
    page.keyboard.press("Space")
    assert (background(page), plot_ink(page)) == (light, light_ink)
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "claims"


def test_the_theme_of_the_system_counts_until_one_is_chosen(seen):
    page = seen(scheme="dark")
    dark, dark_ink = background(page), plot_ink(page)
    turn_system(page, "light")
    assert background(page) != dark
    assert plot_ink(page) != dark_ink


def test_wide_tables_scroll_by_keyboard_in_a_named_region(seen):
    page = seen(width=400)
    region = page.locator(".scroll:has(table.metrics)").first
    assert region.get_attribute("role") == "region"
    assert region.get_attribute("aria-label")
    region.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    for _ in range(50):
        if page.evaluate("document.activeElement.scrollLeft") > 20:
            break
        page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.scrollLeft") > 20


def test_cards_keep_the_roles_of_a_table(seen):
    page = seen(width=400)
    table = page.get_by_role("table", name="Every claim with its verdict")
    assert table.get_by_role("row").count() == 6
    assert table.get_by_role("rowheader").count() == 6


def test_the_traceback_opens_by_keyboard(seen):
    page = seen()
    summary = page.locator("summary", has_text="Traceback")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator(".failure pre").is_visible()
    page.keyboard.press("Enter")
    assert not page.locator(".failure pre").is_visible()


def test_print_is_light_and_complete(seen):
    page = seen(scheme="dark")
    assert page.locator("details[open]").count() == 0
    dark_ink = plot_ink(page)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert plot_ink(page) != dark_ink
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert plot_ink(page) == dark_ink
    assert page.locator("details[open]").count() == 0


def test_mark_up_in_results_does_nothing(visit, tmp_path):
    path = tmp_path / "hostile.html"
    write_report([hostile()], path, title=HOSTILE)
    page = visit(path, width=400)
    assert page.title() == HOSTILE
    assert page.locator("img").count() == 0
    assert page.locator(".plot a").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.set_viewport_size({"width": 1200, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_a_page_without_results_works(visit, tmp_path):
    path = tmp_path / "empty.html"
    write_report([], path)
    page = visit(path, width=400)
    assert page.locator(".empty").is_visible()
    page.click("#theme")


def test_without_scripts_the_numbers_are_there(visit, report):
    page = visit(report, scripts=False)
    assert page.locator(".claims .badge", has_text="holds").first.is_visible()
    assert page.locator(".noscript").is_visible()
    assert not page.locator("#theme").is_visible()
