"""Settings: the shipped files fit the schema, later layers win, and a mistake gives one clear line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mindspeed_precision.config import NumberSet, data_directory, load_settings, setting_names
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import NO_MICROBATCH, Level, Phase, RecordKey, Role

DEFAULT = data_directory("configs") / "default.yaml"
PRESETS = sorted((data_directory("configs") / "presets").glob("*.yaml"))


def key(
    *, step: int = 0, phase: Phase = Phase.FPROP, role: Role = Role.OUTPUT, fqn: str = "decoder"
) -> RecordKey:
    return RecordKey(step=step, microbatch=NO_MICROBATCH, phase=phase, fqn=fqn, role=role)


def dotted(tree: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of a tree of settings by dotted name; a list is a leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, object] = {}
    for name, value in tree.items():
        leaves |= dotted(value, f"{prefix}.{name}" if prefix else str(name))
    return leaves


def test_default_file_has_exactly_the_settings_of_the_schema():
    found = dotted(OmegaConf.to_container(OmegaConf.load(DEFAULT)))
    assert sorted(found) == sorted(setting_names())


def test_default_file_has_the_values_of_the_schema():
    assert dotted(OmegaConf.to_container(OmegaConf.load(DEFAULT))) == dotted(load_settings().source)


def test_every_default_is_explained_or_obvious():
    bare = [line for line in DEFAULT.read_text().splitlines() if line.strip() and "#" not in line]
    assert {line.split(":")[0].strip() for line in bare} <= {
        "capture",
        "determinism",
        "patches",
        "fill_uninitialized_memory",
    }


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_by_name_and_by_path(preset):
    by_name, by_path = load_settings(preset.stem), load_settings(preset)
    assert by_name == by_path
    assert by_name != load_settings(), "a preset that changes nothing is no preset"
    assert preset.read_text().startswith("# "), "says what it is for"


def test_the_presets():
    names = ["across-frameworks", "check", "first-divergence", "full-dump", "full-size", "quick", "reference"]
    assert [path.stem for path in PRESETS] == names
    quick = load_settings("quick").capture
    assert quick.level_of(key()) is Level.FINGERPRINT
    assert quick.level_of(key(phase=Phase.LOSS, role=Role.LOSS)) is Level.STATISTICS
    assert quick.level_of(key(phase=Phase.OPTIMIZER, role=Role.HYPERPARAMETER)) is Level.STATISTICS
    first = load_settings("first-divergence").capture
    assert first.level_of(key(phase=Phase.WGRAD, role=Role.INPUT, step=1)) is Level.TENSOR
    assert first.level_of(key(phase=Phase.WGRAD, role=Role.INPUT, step=2)) is Level.STATISTICS
    assert load_settings("full-dump").capture.level_of(key()) is Level.TENSOR
    full_size = load_settings("full-size")
    assert full_size.capture.level_of(key()) is Level.STATISTICS
    assert 2 in full_size.steps
    assert 3 not in full_size.steps
    reference = load_settings("reference").capture
    assert reference.level_of(key(phase=Phase.INIT, role=Role.PARAM, step=-1)) is Level.TENSOR
    for role in (Role.PARAM, Role.MASTER_PARAM, Role.EXP_AVG, Role.EXP_AVG_SQ):
        assert reference.level_of(key(phase=Phase.OPTIMIZER, role=role, step=3)) is Level.TENSOR
    assert reference.level_of(key(phase=Phase.WGRAD, role=Role.WGRAD)) is Level.STATISTICS
    check = load_settings("check").capture
    for phase, role in (
        (Phase.WGRAD, Role.INPUT),
        (Phase.ACCUMULATE, Role.MAIN_GRAD),
        (Phase.CLIP, Role.MAIN_GRAD),
    ):
        assert check.level_of(key(phase=phase, role=role)) is Level.TENSOR
    assert check.level_of(key(phase=Phase.FPROP, role=Role.OUTPUT)) is Level.STATISTICS
    across = load_settings("across-frameworks")
    assert across.determinism.zero_dropout
    assert across.capture.level_of(key(phase=Phase.FPROP, role=Role.OUTPUT, step=0)) is Level.TENSOR
    assert across.capture.level_of(key(phase=Phase.INIT, role=Role.PARAM, step=-1)) is Level.TENSOR
    assert across.capture.level_of(key(phase=Phase.FPROP, role=Role.OUTPUT, step=1)) is Level.SKETCH


def test_later_layers_win(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("out: from_file\nsteps: '3'\ncapture: {level: tensor}\n")
    settings = load_settings(file, ["steps=4", "steps=5", "out=from_dot_list"], out=tmp_path / "given")
    assert settings.out == tmp_path / "given"
    assert settings.steps.text == "5"
    assert settings.capture.level is Level.TENSOR
    assert load_settings(file, ["out=from_dot_list"]).out == Path("from_dot_list")
    assert load_settings(file).out == Path("from_file")


def test_later_rules_win(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text(
        "capture:\n  rules:\n"
        "    - {fqn: 'decoder.*', level: fingerprint}\n"
        "    - {fqn: 'decoder.layers.0.*', role: wgrad, phase: wgrad, steps: '0,2-3', level: tensor}\n"
        "    - {fqn: '*.secret', level: drop}\n"
    )
    level_of = load_settings(file).capture.level_of
    assert level_of(key(fqn="embedding")) is Level.STATISTICS
    assert level_of(key(fqn="decoder.layers.0.mlp")) is Level.FINGERPRINT
    wgrad = {"phase": Phase.WGRAD, "role": Role.WGRAD, "fqn": "decoder.layers.0.mlp"}
    assert [level_of(key(step=step, **wgrad)) for step in range(4)] == [
        Level.TENSOR,
        Level.FINGERPRINT,
        Level.TENSOR,
        Level.TENSOR,
    ]
    assert level_of(key(fqn="decoder.layers.0.secret")) is None


@pytest.mark.parametrize("text", ["0", "0-3,10", " 1 , 2 "])
def test_number_sets(text):
    numbers = NumberSet.parse(text, where="steps")
    assert {n for n in range(12) if n in numbers} == {"0": {0}, "0-3,10": {0, 1, 2, 3, 10}}.get(text, {1, 2})


def test_an_empty_number_set_is_every_number():
    assert 10**6 in NumberSet.parse("", where="steps")


BAD_FILES = {
    "unknown key": ("captur: {}\n", "captur"),
    "unknown nested key": ("capture: {levle: tensor}\n", "levle"),
    "wrong type": ("determinism: {seed: many}\n", "determinism.seed"),
    "level": ("capture: {level: everything}\n", "capture.level"),
    "level of a rule": ("capture: {rules: [{level: all}]}\n", "capture.rules[0].level"),
    "steps": ("steps: a-b\n", "steps"),
    "steps of a rule": ("capture: {rules: [{}, {steps: 3-x}]}\n", "capture.rules[1].steps"),
    "a list": ("- steps\n", "not a mapping"),
    "no YAML": ("a: [1\n", "not readable"),
    "interpolation": ("out: ${no_such_setting}\n", "no_such_setting"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_gives_one_line_that_names_the_key(tmp_path, what):
    text, named = BAD_FILES[what]
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "named"),
    [("capture.levle=tensor", "levle"), ("determinism.strict=perhaps", "strict"), ("steps", "steps")],
)
def test_a_bad_override_gives_one_line_that_names_the_key(item, named):
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides=[item])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_lists_the_presets():
    with pytest.raises(ConfigError) as caught:
        load_settings("no-such-preset")
    assert "no-such-preset" in str(caught.value)
    assert "across-frameworks, check, first-divergence, full-dump, full-size, quick" in caught.value.remedy


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("steps=3-1", "ends before it begins"),
        ("capture.rules=[{role: wgrd}]", "capture.rules[0].role"),
        ("capture.rules=[{phase: backward}]", "capture.rules[0].phase"),
    ],
)
def test_what_can_select_nothing_is_refused(override, named):
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides=[override])
    assert named in str(caught.value)


def test_a_rule_may_speak_of_some_microbatches_and_ranks(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("capture: {rules: [{role: wgrad, microbatches: '1-2', ranks: '0,4', level: tensor}]}")
    capture = load_settings(file).capture

    def level(rank, microbatch):
        key = RecordKey(step=0, microbatch=microbatch, phase=Phase.WGRAD, fqn="a", role=Role.WGRAD)
        return capture.on_rank(rank).level_of(key)

    kept = {(rank, mb) for rank in range(6) for mb in range(-1, 4) if level(rank, mb) is Level.TENSOR}
    assert kept == {(0, 1), (0, 2), (4, 1), (4, 2)}
    assert capture.rules[0].describe().endswith("steps=all microbatches=1-2 ranks=0,4 level=tensor")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stop_after: -1", "no step"),
        ("refines: {baseline: {run: a, records: [[0, 0]]}}", "refines.baseline.records[0]"),
        ("refines: {baseline: {records: [[0, 0, 0, wgrad, a, wgrad, '', 0, false, xyz]]}}", "no record"),
        ("capture: {rules: [{ranks: all}]}", "capture.rules[0].ranks"),
    ],
)
def test_settings_of_a_second_pass_that_are_none(text, words, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(file)


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("1e-3", 1e-3), ("6.0e-8", 6e-8)])
def test_noise_has_a_size(text, size):
    settings = load_settings(overrides=[f"perturb.epsilon={text}", "perturb.fqn=embedding.*"]).perturb
    assert settings.enabled
    assert settings.size == size
    assert settings.applies("embedding.word_embeddings.weight")
    assert not settings.applies("decoder.layers.0.mlp.linear_fc1.weight")
    assert not load_settings().perturb.enabled


@pytest.mark.parametrize("text", ["0", "-1e-3", "1", "much", "nan", "inf"])
def test_noise_of_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a relative size of noise"):
        load_settings(overrides=[f"perturb.epsilon={text}"])
