"""``report.md``: the same facts, and no name that breaks out of its place (read by a CommonMark parser)."""

from __future__ import annotations

import pytest

from mindspeed_precision.report.markdown import code, plain, prose, report_markdown
from mindspeed_precision.testing.fake_runs import LINEAR

MarkdownIt = pytest.importorskip(
    "markdown_it", reason="rich brings markdown-it-py: pip install rich"
).MarkdownIt
TEXT = (
    "https://example.org @all #1 </script> ![x](y) [a](b) `c` ``d`` *e* _f_ | ~~g~~ &amp; <!-- \\ $h$ 名 "
    "\u202e"
)


def tokens(text: str) -> list:
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    return [inner for token in parsed for inner in (token, *(token.children or ()))]


def read(text: str) -> str:
    """Return what a reader of the rendered text sees."""
    return "".join(
        token.content for token in tokens(text) if token.type in ("text", "code_inline", "text_special")
    )


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "- x",
        "1. x",
        "12) y",
        "# x",
        "> x",
        "=== ",
        "+ a",
        ": b",
        "a|b",
        "~~~",
        "    code",
        "a\nb",
        "`",
        "``|`",
    ],
)
@pytest.mark.parametrize("written", [plain, code])
def test_a_text_stays_one_paragraph_of_itself(text, written):
    found = tokens(f"x {written(text)}") + tokens(written(text))
    allowed = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "code_inline"}
    assert {token.type for token in found} <= allowed
    wanted = " ".join(text.replace("\u202e", "\\u202e").split())
    assert read(written(text)).strip() == (wanted if written is plain else wanted.replace("|", "\\|")).strip()


REMEDIES = {
    "candidate: --precision-debug-set remedies=[wgrad_contiguous_operands]": [
        "--precision-debug-set remedies=[wgrad_contiguous_operands]"
    ],
    "to prove it, rerun both with --precision-debug-config 'a b/refine.yaml' and compare": [
        "--precision-debug-config 'a b/refine.yaml'"
    ],
    "look at `patches check`, then at capture.wgrad": ["patches check"],
    "both alike: --seed, --foo 1.5e-7, a checkpoint": ["--seed", "--foo 1.5e-7"],
    "pad alike (--make-vocab-size-divisible-by times the size)": ["--make-vocab-size-divisible-by"],
    "(--precision-debug-set capture.rules=[{phase: wgrad, level: tensor}])": [
        "--precision-debug-set capture.rules=[{phase: wgrad, level: tensor}]"
    ],
    "make the dtypes of both runs equal": [],
}


@pytest.mark.parametrize("text", REMEDIES)
def test_of_a_remedy_only_what_is_copied_is_code(text):
    found = tokens(prose(text))
    assert [token.content for token in found if token.type == "code_inline"] == REMEDIES[text]
    assert read(prose(text)) == text.replace("`", "")


def test_a_hostile_remedy_stays_one_paragraph():
    allowed = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "code_inline"}
    assert {token.type for token in tokens(prose(f"x {TEXT}"))} <= allowed
    seen = read(prose(TEXT)).replace("`", "").replace("\\|", "|")
    assert seen == " ".join(TEXT.replace("\u202e", "\\u202e").replace("`", "").split())


def test_no_fact_is_said_twice(make_report):
    report = make_report("diverged")
    answer = report.facts.answer
    assert answer.first.inputs in answer.cause.evidence
    assert report_markdown(report.facts).count(plain(answer.first.inputs)) == 1


def test_mentions_and_links_are_code():
    found = [token.content for token in tokens(plain(TEXT)) if token.type == "code_inline"]
    assert found == ["https://example.org", "@all", "#1"]


@pytest.mark.parametrize("text", ["a|b", "`a|b`", "x\\", "|"])
def test_cells_hold_what_they_are_given(text):
    for written in (plain(text), code(text)):
        (row,) = table(f"| {written} | end |")
        assert row[1] == "end"
        assert row[0].strip() == text


def table(line: str) -> list[list[str]]:
    rows: list[list[str]] = []
    inside = False
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(f"| a | b |\n| --- | --- |\n{line}"):
        inside = (inside or token.type == "tbody_open") and token.type != "tbody_close"
        if inside and token.type == "tr_open":
            rows.append([])
        if inside and token.type == "inline":
            rows[-1].append(
                "".join(
                    t.content for t in token.children if t.type in ("text", "text_special", "code_inline")
                )
            )
    return rows


def test_it_says_what_the_verdict_says(make_report):
    text = report_markdown(make_report("diverged").facts)
    assert text.startswith("## DIVERGED at step 1, microbatch 0, in the backward pass.")
    for said in (
        LINEAR,
        "wgrad.operand_layout",
        "remedies=[wgrad_contiguous_operands]",
        "lr_warmup_iters",
        "6 of 6 parameters have dW",
    ):
        assert said in text
    assert (make_report("diverged").directory / "report.md").read_text("utf-8") == text


def test_a_healthy_one_is_short(make_report):
    text = report_markdown(make_report("healthy").facts)
    assert text.startswith("## IDENTICAL")
    assert len(text.splitlines()) < 40
    assert "Other findings" not in text
    assert "not checked, or not wholly" in text  # but what had no data is named


def test_hostile_names_stay_names(make_report):
    found = tokens(report_markdown(make_report("hostile").facts))
    kinds = {token.type for token in found}
    assert not {"html_inline", "html_block", "link_open", "image", "fence", "code_block"} & kinds
    for row in (t for t in found if t.type == "inline"):
        assert "\u202e" not in row.content


@pytest.mark.parametrize(
    "case", ["nan", "one_step", "no_loss", "layouts", "longer", "frozen", "not_certified", "tolerated"]
)
def test_every_kind_of_pair_has_one(case, make_report):
    text = report_markdown(make_report(case).facts)
    assert "### Coverage" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
