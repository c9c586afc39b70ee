"""The page as a file: what it holds, how large it is, what it may do, and what no name can do to it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from mindspeed_precision.report import files, html
from mindspeed_precision.report.console import render
from mindspeed_precision.report.files import write_files
from mindspeed_precision.report.grid import grid_of
from mindspeed_precision.report.html import report_html, sentence_of
from mindspeed_precision.report.packing import embedded, packed, packed_json, unpacked
from mindspeed_precision.report.visible import visible_text
from mindspeed_precision.testing.fake_runs import LINEAR

CASES = (
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


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._inside = [tag] if tag in ("script", "style", "title", "h1") else self._inside

    def handle_endtag(self, tag):
        self._inside = [] if [tag] == self._inside else self._inside

    def handle_data(self, data):
        for tag in self._inside:
            self.texts.setdefault(tag, []).append(data)


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("case", CASES)
def test_the_page_loads_nothing_and_is_one_document(case, make_report):
    elements = Elements(make_report(case).page.read_text("utf-8"))
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 2
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(tags)
    for _, attributes in elements.found:
        assert not {"src", "style", "onclick", "onerror", "onload"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    assert len([tag for tag in tags if tag == "details"]) >= 9


def test_the_policy_allows_this_script_and_this_style_alone(make_report):
    elements = Elements(make_report("hostile").page.read_text("utf-8"))
    policy = next(a["content"] for tag, a in elements.found if tag == "meta" and "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for name, text in (
        ("script-src", elements.texts["script"][-1]),
        ("style-src", elements.texts["style"][0]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"


def test_hostile_names_stay_text(make_report):
    page = make_report("hostile").page.read_text("utf-8")
    assert "window.pwned=1</script>" not in page.replace("&lt;", "")
    assert "<img" not in page
    assert "\u202e" not in page
    assert "\\\\u202e" in page or "\\u202e" in page
    names = json.loads(unpacked(data_of(page)["grid"]["rows"]))["names"]
    hostile = [name for name in names if "</script>" in name]
    assert hostile
    assert all("\\u202e" in name and "名前" in name and "مرحبا" in name for name in hostile)


@pytest.mark.parametrize(
    "value", ["</script>", "<!--", "&lt;", "\u2028", "ü", "\udc80", {"</script>": float("nan")}]
)
def test_embedded_data_cannot_end_their_element(value):
    text = embedded(value)
    assert not set("<>&") & set(text)
    assert text.isascii()
    json.loads(text, parse_constant=pytest.fail)


def test_hidden_characters_are_written_out():
    assert visible_text("a\u202eb\x00c\u200fd\ud800") == "a\\u202eb\\u0000c\\u200fd\\ud800"
    assert visible_text("层.ä.مرحبا 😀\n") == "层.ä.مرحبا 😀\n"


def test_packing_gives_back_what_it_took():
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    assert unpacked(packed(data)) == data
    assert json.loads(unpacked(packed_json({"a": [1, float("inf")]}))) == {"a": [1, "inf"]}


def test_cells_of_the_page_are_the_comparisons(make_report):
    report = make_report("diverged")
    plain = data_of(report.page.read_text("utf-8"))
    cells = np.frombuffer(unpacked(plain["grid"]["cells"]), np.uint8).reshape(plain["grid"]["size"])
    assert (cells == grid_of(report.diagnosis.comparisons).cells).all()
    rows = json.loads(unpacked(plain["grid"]["rows"]))
    row, column = plain["grid"]["origins"][0]["cell"]
    assert rows["names"][rows["name"][row]] == LINEAR
    assert plain["grid"]["columns"][column] == [1, 1]
    assert plain["grid"]["verdicts"][cells[row, column] & 7] == "diverged"
    details = [one for chunk in plain["details"]["chunks"] for one in json.loads(unpacked(chunk))]
    assert plain["details"]["taken"] == plain["details"]["cells"] == len(details)
    found = next(one for one in details if one[:2] == [row, column])
    pair = report.diagnosis.origins[0].comparison.pair
    assert [side[3] for side in found[5:]] == [
        f"{r.digest.fingerprint:016x}" for r in (pair.baseline, pair.candidate)
    ]


def test_details_that_do_not_fit_are_left_out_the_most_telling_kept(make_report, monkeypatch):
    report = make_report("diverged")
    monkeypatch.setattr(html, "MOST_BYTES", 200_000)
    page = report_html(report.facts)
    plain = data_of(page)
    assert 0 < plain["details"]["taken"] < plain["details"]["cells"]
    assert len(page) < 200_000
    details = [one for chunk in plain["details"]["chunks"] for one in json.loads(unpacked(chunk))]
    assert details[0][:2] == plain["grid"]["origins"][0]["cell"]


def test_the_answer_is_there_without_a_script(make_report):
    page = make_report("diverged").page.read_text("utf-8")
    before = page[: page.index("<noscript>")]
    for said in (
        "Diverged at step",
        "decoder.layers.1.mlp.linear_fc1",
        "wgrad.operand_layout",
        "Remedy",
        "Proof",
    ):
        assert said in before


def test_a_healthy_report_is_calm_and_green(make_report):
    page = make_report("healthy").page.read_text("utf-8")
    assert '<body class="calm">' in page
    assert '<section id="answer" class="answer identical"' in page
    assert page.count('<details class="part"') == 9
    assert len(re.findall(r'<details class="part" id="\w+" open>', page)) == 2
    other = make_report("diverged").page.read_text("utf-8")
    assert len(re.findall(r'<details class="part" id="\w+" open>', other)) == 9


def test_the_headline_does_not_shout():
    assert sentence_of("DIVERGED at step 0, microbatch 0.") == "Diverged at step 0, microbatch 0."
    assert sentence_of("IDENTICAL: 3 records.") == "Identical: 3 records."
    assert sentence_of("NOT CERTIFIED: nothing.") == "Not certified: nothing."
    assert sentence_of("WITHIN TOLERANCE: 3 records.") == "Within tolerance: 3 records."


def test_the_last_line_names_the_report(make_report, tmp_path):
    report = make_report("diverged")
    written = write_files(report.diagnosis, tmp_path, facts=report.facts)
    lines = render(report.diagnosis, written).splitlines()
    assert lines[-1].split() == ["report", str(tmp_path / "report.html")]
    assert any(line.strip().endswith("report.md") for line in lines)


def test_without_jinja2_all_else_is_written_and_one_line_says_so(make_report, tmp_path, monkeypatch):
    report = make_report("diverged")
    write_files(report.diagnosis, tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "jinja2" else find(name, *rest)
    )
    written = write_files(report.diagnosis, tmp_path)
    assert "report" not in written
    assert not (tmp_path / "report.html").exists()  # an older one would be of another comparison
    assert (tmp_path / "verdict.json").exists()
    assert (tmp_path / "report.md").exists()
    last = render(report.diagnosis, written, width=200).splitlines()[-1]
    assert "report.html was not written" in last
    assert "pip install" in last


def test_nothing_half_written_stays(make_report, tmp_path, monkeypatch):
    report = make_report("healthy")
    write_files(report.diagnosis, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in before if name.endswith(".part")]

    def broken(*_, **__):
        raise RuntimeError("no page")

    monkeypatch.setattr(files.html, "report_html", broken)
    with pytest.raises(RuntimeError):
        write_files(report.diagnosis, tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("*.part"))


def test_one_command_writes_it(make_report, tmp_path, capsys):
    from mindspeed_precision.cli import main

    diagnosis = make_report("diverged").diagnosis
    status = main(["compare", diagnosis.baseline, diagnosis.candidate, "--out", str(tmp_path), "--no-replay"])
    assert status == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["report", str(tmp_path / "report.html")]
    plain = data_of((tmp_path / "report.html").read_text("utf-8"))
    assert plain["training"]["parameters"] == 6  # the runs were at hand


COLOUR = re.compile(r"--([\w-]+): (#[0-9a-f]{6})")


def themes() -> dict[str, dict[str, str]]:
    style = html._asset("page.css")
    light = dict(COLOUR.findall(style.split(':root[data-theme="dark"]')[0]))
    dark = dict(COLOUR.findall(style.split(':root[data-theme="dark"]')[1].split("}")[0]))
    return {"light": light, "dark": {**light, **dark}}


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, two: str) -> float:
    """WCAG 2.1, definition of contrast ratio."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, two))
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "quiet", "accent", "good", "bad", "unsure", "baseline", "candidate"])
def test_text_can_be_read(theme, name):
    colours = themes()[theme]
    assert contrast(colours[name], colours["paper"]) >= 4.5


DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "eyes", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["all", "deuteranopia", "protanopia"]
)
def test_verdicts_can_be_told_apart_by_every_eye(theme, eyes):
    """Machado, Oliveira and Fernandes 2009, severity 1.0, in linear RGB."""
    colours = themes()[theme]
    seen = {name: eyes @ linear(colours[name]) for name in ("identical", "within-1", "diverged-1", "missing")}
    names = list(seen)
    for n, one in enumerate(names):
        for two in names[n + 1 :]:
            assert np.abs(seen[one] - seen[two]).max() > 0.1, (one, two)
