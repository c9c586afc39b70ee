"""Mapping files: names, records without a counterpart, conventions about biases; and files that are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_precision.align import align, load_mapping
from mindspeed_precision.cli import main
from mindspeed_precision.config import data_directory
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ConfigError, IncomparableError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.testing.fake_runs import LINEAR, plant, scaled, write_fake_run

NAMES = """
schema: 1
side: candidate
names:
  - {from: "net.blocks.{layer}.up", to: "decoder.layers.{layer}.mlp.linear_fc1"}
  - {from: "net.blocks.{layer}", to: "decoder.layers.{layer}"}
"""


def mapping(directory, text):
    path = directory / "mapping.yaml"
    path.write_text(text)
    return load_mapping(path)


def otherwise(fqn):
    """Name a module or parameter as the other implementation does."""
    return fqn.replace("decoder.layers.", "net.blocks.").replace(".mlp.linear_fc1", ".up")


def renamed(run, name=otherwise):
    ranks = {
        number: replace(
            rank,
            records=tuple(replace(r, key=replace(r.key, fqn=name(r.key.fqn))) for r in rank.records),
            parameters=tuple(replace(p, fqn=name(p.fqn)) for p in rank.parameters),
        )
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def runs(directory, *faults, **changes):
    one = load_run(write_fake_run(directory / "one", **changes))
    return one, load_run(write_fake_run(directory / "two", plants=faults, **changes))


def test_names_that_differ(tmp_path):
    one, two = runs(tmp_path)
    two = renamed(two)
    with pytest.raises(IncomparableError, match=r"--mapping"):
        compare_runs(one, two)
    diagnosis = compare_runs(one, two, mapping=[mapping(tmp_path, NAMES)])
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.findings == diagnosis.unmatched == ()
    assert diagnosis.coverage.parameters_with_wgrad == diagnosis.coverage.parameters


def test_a_fault_behind_other_names(tmp_path):
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=scaled(2))
    one, two = runs(tmp_path, fault)
    diagnosis = compare_runs(one, renamed(two), mapping=[mapping(tmp_path, NAMES)])
    assert diagnosis.first_divergence.key.fqn == LINEAR
    assert diagnosis.findings[0].id == "wgrad.scaled"


def test_elements_are_found_under_the_new_name(tmp_path):
    one, two = runs(tmp_path, plant(role="wgrad", fqn=LINEAR, value=scaled(2)), level=Level.TENSOR)
    diagnosis = compare_runs(one, renamed(two), mapping=[mapping(tmp_path, NAMES)])
    assert diagnosis.first_divergence.comparison.metrics["scale"] == pytest.approx(2)


def test_the_side_may_be_a_framework(tmp_path):
    one, two = runs(tmp_path)
    two = replace(renamed(two), manifest={**two.manifest, "framework": {"name": "mindspore"}})
    names = mapping(tmp_path, NAMES.replace("candidate", "mindspore"))
    assert len(align(one, two, [names]).pairs) == len(align(two, one, [names]).pairs) > 100
    with pytest.raises(ConfigError, match=r"found mindspore, .*numpy \(baseline\), numpy \(candidate\)"):
        align(one, replace(two, manifest=one.manifest), [names])


def test_files_are_applied_in_order(tmp_path):
    one, two = runs(tmp_path)
    (tmp_path / "a").mkdir()
    first = mapping(tmp_path / "a", "schema: 1\nside: candidate\nnames: [{from: model, to: net}]\n")
    two = renamed(two, lambda fqn: otherwise(fqn).replace("net.", "model."))
    assert align(one, two, [first, mapping(tmp_path, NAMES)]).unmatched == ()
    assert align(one, two, [first, mapping(tmp_path, NAMES)]).notes == ()


def test_two_names_that_become_one(tmp_path):
    one, two = runs(tmp_path)
    text = 'schema: 1\nside: candidate\nnames: [{from: "decoder.layers.0", to: "decoder.layers.1"}]\n'
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0.* and decoder\.layers\.1.*both as"):
        align(one, two, [mapping(tmp_path, text)])


def test_a_pattern_that_fits_nothing_is_named(tmp_path):
    one, two = runs(tmp_path)
    (note, *_) = align(one, two, [mapping(tmp_path, NAMES)]).notes
    assert "`net.blocks.{layer}.up` fits no name of the candidate" in note


DROP = """
schema: 1
side: baseline
drop:
  - {fqn: "decoder.layers.?", phase: fprop, role: output, reason: the twin has no such module}
"""


def test_records_without_a_counterpart(tmp_path):
    gone = plant(phase="fprop", role="output", fqn="decoder.layers.?", drop=True)
    one, two = runs(tmp_path, gone)
    assert compare_runs(one, two).status is Verdict.MISSING
    diagnosis = compare_runs(one, two, mapping=[mapping(tmp_path, DROP)])
    assert diagnosis.status is Verdict.IDENTICAL
    assert any("8 records of the baseline dropped" in n and "no such module" in n for n in diagnosis.notes)


def test_a_drop_hides_no_difference(tmp_path):
    fault = plant(phase="fprop", role="output", fqn="decoder.layers.1", value=scaled(1.5))
    diagnosis = compare_runs(*runs(tmp_path, fault), mapping=[mapping(tmp_path, DROP)])
    assert diagnosis.first_divergence.key.fqn == "decoder.layers.1"
    assert any("0 records of the baseline dropped" in note for note in diagnosis.notes)


def test_a_parameter_of_one_run_alone(tmp_path):
    one, two = runs(tmp_path, plant(fqn="output_layer.weight", drop=True))
    rank = two.ranks[0]
    fewer = tuple(p for p in rank.parameters if p.fqn != "output_layer.weight")
    two = replace(two, ranks={0: replace(rank, parameters=fewer)})
    text = "schema: 1\nside: baseline\ndrop: [{fqn: output_layer.weight, reason: kept elsewhere}]\n"
    with pytest.raises(IncomparableError):
        align(one, two)
    assert align(one, two, [mapping(tmp_path, text)]).unmatched == ()


# A module's output without its bias. The fake network's output has it; ``without_bias`` records it without.

BIAS = """
schema: 1
side: candidate
outputs_without_bias: [{fqn: "decoder.layers.*.mlp.linear_fc1"}]
"""


def without_bias(directory, **changes):
    """Return a pair of runs, the second of which records the outputs of its linear layers before the bias."""
    one = load_run(write_fake_run(directory / "one", **changes))
    kept = {}

    def keep(name):
        def value(array):
            kept[name] = array.copy()
            return array

        return value

    def raw(name):
        return lambda array: (array - kept[name]).astype(array.dtype)

    names = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(2)]
    watch = [plant(role="param", fqn=f"{name}.bias", value=keep(name)) for name in names]
    recorded = [plant(phase="fprop", role="output", fqn=name, recorded=raw(name)) for name in names]
    return one, load_run(write_fake_run(directory / "two", plants=[*watch, *recorded], **changes))


@pytest.mark.parametrize("swapped", [False, True])
def test_the_bias_is_added(swapped, tmp_path):
    one, two = without_bias(tmp_path, level=Level.TENSOR)
    assert compare_runs(one, two, policy="tolerance").status is Verdict.DIVERGED
    file = mapping(tmp_path, BIAS.replace("candidate", "baseline") if swapped else BIAS)
    both = (two, one) if swapped else (one, two)
    diagnosis = compare_runs(*both, policy="tolerance", mapping=[file])
    assert diagnosis.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE), render(diagnosis)
    assert Verdict.INCOMPARABLE not in diagnosis.decided


def test_a_wrong_output_without_bias_is_found(tmp_path):
    one, _ = without_bias(tmp_path, level=Level.TENSOR)
    fault = plant(phase="fprop", role="output", fqn=LINEAR, step=0, microbatch=0, value=scaled(1.01))
    bad = load_run(write_fake_run(tmp_path / "bad", plants=[fault], level=Level.TENSOR))
    diagnosis = compare_runs(one, bad, policy="tolerance", mapping=[mapping(tmp_path, BIAS)])
    assert diagnosis.first_divergence.key.fqn in (LINEAR, "decoder.layers.0.mlp.linear_fc1")


def test_without_elements_the_pair_is_incomparable_and_no_divergence(tmp_path):
    one, two = without_bias(tmp_path, level=Level.STATISTICS)
    diagnosis = compare_runs(one, two, policy="tolerance", mapping=[mapping(tmp_path, BIAS)])
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)  # not "have the same bits"
    assert diagnosis.decided[Verdict.INCOMPARABLE] == 8
    assert any("8 pairs incomparable by convention" in note for note in diagnosis.notes)
    apart = next(c for c in diagnosis.comparisons if c.verdict is Verdict.INCOMPARABLE)
    assert "output excludes" in apart.reason
    assert "no elements were kept" in apart.reason


# Files.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 2\nside: baseline\n", "another version of the mapping format"),
        ("schema: 1\n", "which run it speaks of"),
        ("schema: 1\nside: baseline\nnamse: []\n", "namse"),
        ("schema: 1\nside: baseline\nnames: [{from: a}]\n", "not a rename"),
        ("schema: 1\nside: baseline\nnames: [{from: a, to: 'b.{x}'}]\n", r"\{x\}"),
        ("schema: 1\nside: baseline\nnames: [{from: 'a.{1x}', to: b}]\n", "not a pattern"),
        ("schema: 1\nside: baseline\ndrop: [{fqn: a}]\n", "without a reason"),
        ("{", "not readable as YAML"),
        ("- 1\n", "mapping"),
    ],
)
def test_a_bad_file_is_one_clear_error(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        mapping(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such mapping file"):
        load_mapping(tmp_path / "none.yaml")


def test_the_shipped_example_loads():
    paths = sorted((data_directory("configs") / "mappings").glob("*.yaml"))
    assert paths
    for path in paths:
        found = load_mapping(path)
        assert found.rename("backbone.blocks.11.attn.qkv.bias")[0] == (
            "decoder.layers.11.self_attention.linear_qkv.bias"
        )


def test_the_command(tmp_path, capsys):
    one, two = (write_fake_run(tmp_path / name) for name in ("one", "two"))
    file = tmp_path / "mapping.yaml"
    file.write_text(DROP)
    assert main(["compare", str(one), str(two), "--mapping", str(file), "--mapping", str(file)]) == 0
    assert "0 records of the baseline dropped" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", str(one), str(two), "--mapping", str(tmp_path / "none.yaml")]) == 2
    assert "no such mapping file" in capsys.readouterr().err


words = st.text("abc_1", min_size=1, max_size=4)


@given(
    parts=st.lists(words, min_size=1, max_size=4), rest=st.lists(words, max_size=3), number=st.integers(0, 99)
)
def test_renaming_there_and_back(parts, rest, number, tmp_path_factory):
    source, target = ".".join(["x", *parts, "{n}"]), ".".join(["y", "{n}", *parts])
    directory = tmp_path_factory.mktemp("mapping")
    there = mapping(directory, f'schema: 1\nside: baseline\nnames: [{{from: "{source}", to: "{target}"}}]\n')
    back = mapping(directory, f'schema: 1\nside: baseline\nnames: [{{from: "{target}", to: "{source}"}}]\n')
    name = ".".join([source.replace("{n}", str(number)), *rest])
    moved, rename = there.rename(name)
    assert rename is not None
    assert moved == ".".join([target.replace("{n}", str(number)), *rest])
    assert back.rename(moved)[0] == name
    assert there.rename(f"z.{name}") == (f"z.{name}", None)
