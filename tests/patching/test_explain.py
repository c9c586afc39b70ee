"""What the command line tells about patches."""

from __future__ import annotations

import pytest

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.patching.explain import check_rows, explain, list_rows
from mindspeed_precision.report.patches import check_text, list_text

TOY = """
schema: 1
name: toy
patches:
  - {name: fine, target: "textwrap:dedent", wrapper: "mindspeed_precision.patching.lookup:describe",
     signature: (text), effect: observe, why: test}
  - {name: gone, target: "textwrap:absent", wrapper: "mindspeed_precision.x:y",
     signature: (text), effect: observe, why: test, optional: true}
  - {name: drifted, target: "textwrap:dedent", wrapper: "mindspeed_precision.x:y",
     signature: (texts), effect: observe, why: test}
  - {name: stranger, target: "textwrap:dedent", wrapper: "textwrap:dedent",
     signature: (text), effect: observe, why: test}
  - {name: unloaded, target: "this:d", wrapper: "mindspeed_precision.patching.lookup:describe",
     signature: (text), effect: observe, why: test, if_loaded: true}
  - {name: unloadable, target: "no_such_module:d", wrapper: "mindspeed_precision.x:y",
     signature: (text), effect: observe, why: test, if_loaded: true}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy.yaml").write_text(TOY)
    monkeypatch.setattr("mindspeed_precision.patching.declare.data_directory", lambda name: tmp_path)


def test_check(toy):
    import textwrap

    before = textwrap.dedent
    rows = {row.name: row for row in check_rows()}
    assert textwrap.dedent is before
    assert {name: (row.outcome.value, row.refused) for name, row in rows.items()} == {
        "fine": ("ok", False),
        "gone": ("absent", False),
        "drifted": ("signature differs", True),
        "stranger": ("wrapper unusable", True),
        "unloaded": ("signature differs", True),  # imported for the check
        "unloadable": ("absent", False),
    }
    text = check_text(list(rows.values()))
    assert "! signature differs  toy/drifted     declared for (texts), found (text)" in text
    assert text.endswith("3 of 6 patches cannot be used here (!)")
    assert check_text([rows["fine"]]).endswith("every patch is fine here")


def test_explain(toy):
    text = explain("gone")
    assert "gone (patches/toy.yaml, effect observe)" in text
    assert "an absent target is fine" in text
    assert text.endswith("here      absent: textwrap has no absent")
    with pytest.raises(ConfigError, match=r"no such patch .*drifted"):
        explain("missing")


def test_list_names_every_patch_and_its_reason():
    rows = list_rows()
    text = list_text(rows)
    for row in rows:
        assert f"{row.group}/{row.name}  [{row.effect.value}]  {row.target}\n    {row.why.split()[0]}" in text
