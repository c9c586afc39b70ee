"""``report.html`` in a real headless Chromium: what is drawn, what clicks and keys do, what it may not do."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.records import Verdict
from mindspeed_precision.report.grid import CODES, grid_of
from mindspeed_precision.testing.fake_runs import LINEAR

pytestmark = pytest.mark.matrix

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EVERY = (
    "diverged",
    "healthy",
    "tolerated",
    "nan",
    "one_step",
    "no_loss",
    "layouts",
    "longer",
    "frozen",
    "not_certified",
    "hostile",
)


def chromium() -> str:
    """Return the Chromium to use (``MSP_CHROMIUM`` names one), or skip and say why."""
    found = os.environ.get("MSP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here: make chromium installs it, MSP_CHROMIUM names one")
    return found


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    path = chromium()
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running.new_context(reduced_motion="reduce")
        running.close()


@dataclass
class Opened:
    """A page, and whatever it said or asked for."""

    page: object
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.page, name)


@pytest.fixture
def show(browser, make_report):
    """Return a function that opens the report of a case; at the end nothing may have gone wrong in it."""
    opened: list[Opened] = []

    def open_(case, *, width=1400, scheme="light", before=""):
        page = browser.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        one = Opened(page)
        page.on("console", lambda message: one.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: one.said.append(str(error)))
        page.on("dialog", lambda dialog: one.said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: one.asked.append(request.url))
        if before:
            page.add_init_script(before)
        report = make_report(case)
        page.goto(report.url)
        page.wait_for_selector("body[data-ready=yes]", timeout=20_000)
        opened.append(one)
        return one

    yield open_
    for one in opened:
        assert one.said == []
        assert len(one.asked) == 1, one.asked
        one.page.close()


def cell_at(page, report, row, column):
    """Return where on the screen a cell of the list is, after scrolling to it."""
    return page.evaluate(
        """([row, column, ratio]) => {
            const list = document.getElementById("heatmap-list");
            list.scrollTop = row * 16 - 100;
            list.scrollIntoView({ block: "center" });
            const box = list.getBoundingClientRect(), wide = list.clientWidth;
            const room = Math.max(wide - Math.min(Math.max(wide * 0.42, 150), 430), 40);
            const cell = Math.min(room / ratio, 40), spare = room - cell * ratio > 210 ? 210 : 0;
            const left = wide - cell * ratio - spare - 4;
            return [box.left + 1 + left + (column + 0.5) * cell, box.top + 9 + row * 16 - list.scrollTop];
        }""",
        [row, column, len(grid_of(report.diagnosis.comparisons).columns)],
    )


@pytest.mark.parametrize("case", EVERY)
def test_every_report_opens_without_a_word_to_the_console(case, show, make_report):
    page = show(case)
    assert page.evaluate("window.pwned") is None
    assert not page.is_visible("#trouble")
    assert page.inner_text("h1")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_timeout(60)
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, "the page scrolls sideways"
    for part in (
        "curves",
        "heatmap",
        "tree",
        "growth",
        "distribution",
        "groups",
        "configuration",
        "operands",
        "coverage",
    ):
        assert page.locator(f"#{part}-body").inner_text().strip() or page.locator(f"#{part}-body svg").count()


def test_a_click_on_a_cell_opens_the_tensor(show, make_report):
    report = make_report("diverged")
    page, grid = show("diverged"), grid_of(report.diagnosis.comparisons)
    row = next(
        n for n, one in enumerate(grid.rows) if (one.fqn, one.role.value) == ("output_layer", "output")
    )
    assert "output_layer" not in page.inner_text("#detail h3 >> nth=0")
    page.mouse.click(*cell_at(page, report, row, 2))
    said = page.inner_text("#detail")
    assert said.startswith("output_layer\n")
    pair = report.diagnosis.comparisons[grid.worst[row, 2]].pair
    assert f"{pair.candidate.digest.fingerprint:016x}" in said
    assert f"step {pair.key.step}" in said
    assert "identical" in said
    assert page.locator("#detail svg rect").count() > 4  # both sides' exponents


def test_it_opens_at_the_first_divergence_with_both_sides(show, make_report):
    page, report = show("diverged"), make_report("diverged")
    said = page.inner_text("#detail")
    pair = report.diagnosis.origins[0].comparison.pair
    for record in (pair.baseline, pair.candidate):
        assert f"{record.digest.fingerprint:016x}" in said
    for words in (
        LINEAR,
        "diverged",
        "An origin",
        "strides",
        "contiguous",
        "minimum",
        "mindspeed-precision show",
    ):
        assert words in said
    assert LINEAR in page.inner_text("#distribution-body h3")


def test_the_map_of_the_whole_has_the_colours_of_the_verdicts(show, make_report):
    page, grid = show("diverged"), grid_of(make_report("diverged").diagnosis.comparisons)
    found = page.evaluate(
        """() => {
            const canvas = document.querySelector(".mini"), { width, height } = canvas;
            const pixels = Array.from(canvas.getContext("2d").getImageData(0, 0, width, height).data);
            return { width, height, pixels, colours: palette() };
        }"""
    )
    apart, same = grid.cells & 7 == CODES[Verdict.DIVERGED], grid.cells & 7 == CODES[Verdict.IDENTICAL]
    pixels = np.array(found["pixels"]).reshape(found["height"], found["width"], 4)[..., :3]

    def where(codes):
        colours = [found["colours"][code] for code in set(codes.tolist())]
        return np.any([(pixels == colour).all(axis=-1) for colour in colours], axis=0)

    seen = where(grid.cells[apart])
    columns = (np.nonzero(seen)[1] * len(grid.columns) / found["width"]).astype(int)
    assert set(columns) == set(np.nonzero(apart)[1])
    shares = where(grid.cells[same]).mean(), same.mean()
    assert abs(shares[0] - shares[1]) < 0.1


def test_modules_fold_and_unfold(show):
    page = show("diverged")
    rows = page.locator("#tree-body tbody tr")
    before = rows.count()
    layer = page.locator("#tree-body tr[title='decoder.layers']")
    assert layer.get_attribute("aria-expanded") == "true"
    layer.locator("td").first.click()
    assert page.locator("#tree-body tr[title='decoder.layers']").get_attribute("aria-expanded") == "false"
    assert rows.count() < before
    page.keyboard.press("ArrowRight")
    assert rows.count() == before
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.title") == "decoder.layers.0"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.title") == "decoder.layers"
    page.click("text=fold all")
    assert rows.count() < before


def test_a_cell_of_the_tree_opens_its_worst_record(show):
    page = show("diverged")
    page.click("#tree-body tr[title='output_layer'] button[aria-label^='update']")
    assert page.inner_text("#detail h3 >> nth=0") == "output_layer.weight"
    cell = page.locator(f"#tree-body tr[title='{LINEAR}'] button[aria-label^='wgrad']")
    assert "diverged" in cell.get_attribute("aria-label")
    assert cell.inner_text().startswith("≠")  # not by colour alone


def test_search_and_filters(show, make_report):
    page, grid = show("diverged"), grid_of(make_report("diverged").diagnosis.comparisons)
    rows, apart = grid.rows, (grid.cells & 7 == CODES[Verdict.DIVERGED]).any(axis=1)
    accumulated = apart & np.array([row.phase.value == "accumulate" for row in rows])
    assert 0 < accumulated.sum() < apart.sum() < len(rows)
    count = page.locator(".filters .count")
    assert count.inner_text().startswith(f"{len(rows)} of {len(rows)}")
    page.fill("#search", "fc1 wgrad")
    wanted = [
        row for row in rows if "fc1" in row.fqn and (row.role.value == "wgrad" or row.phase.value == "wgrad")
    ]
    assert count.inner_text().startswith(f"{len(wanted)} of")
    page.fill("#search", "no such thing")
    assert count.inner_text().startswith("0 of")
    page.fill("#search", "")
    page.click("text=only what differs")
    assert count.inner_text().startswith(f"{apart.sum()} of")  # how far a difference gets, roundings decide
    page.select_option("select[aria-label=Phase]", "accumulate")
    assert count.inner_text().startswith(f"{accumulated.sum()} of")


def test_keys(show):
    page = show("diverged")
    title = page.locator("#detail h3").first
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("output_layer")
    page.keyboard.press("n")  # a letter of the search, not a key
    assert page.input_value("#search") == "output_layern"
    page.keyboard.press("Escape")
    assert page.input_value("#search") == ""
    page.keyboard.press("n")
    assert title.inner_text() == f"{LINEAR}.weight"
    page.keyboard.press("p")
    assert title.inner_text() == LINEAR
    page.focus("#heatmap-list")
    before = page.inner_text("#heatmap-readout")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#heatmap-readout") != before
    assert "step 2" in page.inner_text("#heatmap-readout")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "detail"
    page.keyboard.press("o")
    assert title.inner_text() == LINEAR
    page.keyboard.press("?")
    assert page.is_visible("#help")
    assert page.locator("#help dt").count() >= 9
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    page.keyboard.press("3")
    assert abs(page.evaluate("document.getElementById('tree').getBoundingClientRect().top")) < 120


LAST_CELL = """() => {
    const canvas = document.querySelector(".mini");
    return canvas.getContext("2d").getImageData(canvas.width - 8, canvas.height - 8, 1, 1).data[0];
}"""


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_light_and_dark(scheme, dark, show):
    page = show("diverged", scheme=scheme)

    def light():
        colour = page.evaluate("getComputedStyle(document.querySelector('.answer')).backgroundColor")
        return int(colour.split("(")[1].split(",")[0]) > 128

    assert light() is not dark
    page.keyboard.press("t")
    assert light() is dark
    dark_or_light = [page.evaluate(LAST_CELL)]
    page.keyboard.press("t")
    dark_or_light.append(page.evaluate(LAST_CELL))
    assert dark_or_light[0] != dark_or_light[1]  # drawings follow


PAPER = "getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"


def test_on_paper_it_is_light_and_whole(show):
    page = show("diverged", scheme="dark", width=760)
    assert page.evaluate(PAPER) == "#14181d"
    page.emulate_media(media="print")
    assert page.evaluate(PAPER) == "#ffffff"  # by the style alone: no script has to come first
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    for gone in (".bar", ".filters >> nth=0", ".mini"):
        assert not page.is_visible(gone)
    assert page.is_visible(".scroller canvas")
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 2 <= pdf.count(b"/Type /Page\n") <= 14
    page.emulate_media(media="screen")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    assert page.evaluate(PAPER) == "#14181d"


def test_hostile_names_are_shown_and_do_nothing(show):
    page = show("hostile")
    assert page.evaluate("window.pwned") is None
    said = page.inner_text("body")
    assert "</script><script>window.pwned=1</script>" in said
    assert "\\u202e" in said
    assert "\u202e" not in said
    assert page.title().endswith("</title><script>window.pwned=2</script>")
    page.keyboard.press("n")
    page.fill("#search", "</script>")
    assert not page.inner_text(".filters .count").startswith("0 of")


def test_nothing_else_may_run_or_load(show):
    page = show("healthy")
    refused = page.evaluate(
        """() => new Promise((done) => {
            const seen = new Set();
            addEventListener("securitypolicyviolation", (event) => {
                seen.add(event.effectiveDirective);
                if (seen.has("img-src")) done([...seen]);
            });
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/x";
            document.body.append(image);
            try { document.body.innerHTML = "<b>x</b>"; } catch (error) { seen.add("trusted"); }
        })"""
    )
    assert "img-src" in refused
    assert {"trusted", "require-trusted-types-for"} & set(refused)
    page.said.clear()  # the browser says what it refused,
    del page.asked[1:]  # and names what was not sent


def test_older_browsers_unpack_the_same(show):
    page = show("tolerated", before="delete window.DecompressionStream")
    assert page.evaluate("typeof DecompressionStream") == "undefined"
    new = show("tolerated")
    equal = new.evaluate(
        """async () => {
            const grid = JSON.parse(document.getElementById("facts").textContent).grid;
            const [one, two] = [await unpack(grid.cells), inflate(bytesOf(grid.cells))];
            return one.length > 500 && one.length === two.length && one.every((byte, n) => byte === two[n]);
        }"""
    )
    assert equal
    assert page.inner_text(".filters .count") == new.inner_text(".filters .count")


def test_pictures_say_what_they_are(show):
    page = show("diverged")
    assert page.locator("svg").count() >= 8
    assert page.locator("svg:not([role=img][aria-label])").count() == 0
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select")].filter((one) =>
            !(one.textContent.trim() || one.ariaLabel || one.labels?.length)).length"""
    )
    assert nameless == 0
    assert page.locator("#operands-body svg.memory").count() == 4  # grad_output twice, input, dW
    assert "neighbours along columns" in page.locator("#operands-body svg.memory").nth(1).get_attribute(
        "aria-label"
    )


def test_narrow_screens_keep_everything_in_sight(show):
    page = show("diverged", width=420)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert page.is_visible("#heatmap-list")
    assert page.is_visible("#detail")


def shrunk(page, width=70, height=45) -> np.ndarray:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed: pip install pillow")
    shot = (
        image.open(io.BytesIO(page.screenshot())).convert("L").resize((width, height), image.Resampling.BOX)
    )
    return np.asarray(shot, np.float64)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_looks_as_it_did(scheme, show):
    """Shrunk to 20 × 20 pixels a pixel, where fonts hardly matter; ``MSP_UPDATE_GOLDEN=1`` draws anew."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed: pip install pillow")
    path = GOLDEN / f"page-{scheme}.png"
    page = show("diverged", scheme=scheme)
    page.evaluate("document.getElementById('heatmap').scrollIntoView()")
    page.wait_for_timeout(80)
    seen = shrunk(page)
    if os.environ.get("MSP_UPDATE_GOLDEN"):
        image.fromarray(seen.astype(np.uint8)).save(path)
    golden = np.asarray(image.open(path), np.float64)

    def distance(other):
        return float(np.abs(other - golden).mean())

    other = show("healthy", scheme=scheme)
    assert distance(seen) < 4
    assert distance(shrunk(other)) > 8  # another page is far from it: the bound can be missed
