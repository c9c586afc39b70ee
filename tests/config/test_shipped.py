"""Files of the package are read quickly, and as others are; one that somebody changed is checked as those."""

from __future__ import annotations

import importlib

import pytest

from mindspeed_precision import config
from mindspeed_precision.shipped import read_shipped

CONFIGS = config.data_directory("configs")
SCHEMAS = {
    "checkpoints/*": "ckpt.naming",
    "mappings/*": "align.mapping",
    "meanings/aliases.yaml": "verify.aliases",
    "meanings/forwarded.yaml": "verify.forwarded",
    "meanings/environment.yaml": "meanings",
    "meanings/me*.yaml": "meanings",
    "meanings/mi*.yaml": "meanings",
    "policies/*": "compare.policy",
    "preflight/arguments.yaml": "launches.known",
    "preflight/versions.yaml": "preflight.versions",
    "preflight/[cdr]*.yaml": "preflight.rules",
}
FILES = [(path, module) for pattern, module in SCHEMAS.items() for path in sorted(CONFIGS.glob(pattern))]


@pytest.mark.parametrize(("path", "module"), FILES, ids=lambda value: getattr(value, "name", value))
def test_a_file_of_the_package_fits_its_schema_and_is_read_as_it_would_be_elsewhere(path, module):
    schema = importlib.import_module(f"mindspeed_precision.{module}")._Schema
    assert read_shipped(path, schema) == config.read_foreign(path, schema, kind="table", remedy="")


def test_every_file_of_the_package_is_asked():
    read_as_settings = {"default.yaml", "presets"}
    asked = {path for path, _ in FILES}
    others = {path for path in CONFIGS.rglob("*.yaml") if path not in asked}
    assert {path.relative_to(CONFIGS).parts[0] for path in others} == read_as_settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema: 1\ntitel: no such key\n", "titel"),
        ("schema: 2\n", "another version"),
        ("rules: 3\n", "not a List"),
    ],
)
def test_a_file_of_a_user_is_checked(tmp_path, text, said):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    schema = importlib.import_module("mindspeed_precision.compare.policy")._Schema
    with pytest.raises(config.ConfigError, match=said):
        config.read_document(file, schema, kind="policy", remedy="")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title:", "titel:", "titel"),
        ("schema: 1", "schema: 2", "another version"),
        ("rules:", "rules: 3\nrun:", "not a List"),
        ("title:", "title: [", "not readable as YAML"),
    ],
)
def test_a_file_of_the_package_that_somebody_changed_is_checked(tmp_path, monkeypatch, old, new, said):
    text = (CONFIGS / "policies" / "tolerance.yaml").read_text()
    file = tmp_path / "tolerance.yaml"
    file.write_text(text.replace(old, new, 1))
    assert file.read_text() != text
    monkeypatch.setattr(config, "data_directory", lambda _name: tmp_path)
    schema = importlib.import_module("mindspeed_precision.compare.policy")._Schema
    with pytest.raises(config.ConfigError, match=said):
        config.read_document(file, schema, kind="policy", remedy="")
