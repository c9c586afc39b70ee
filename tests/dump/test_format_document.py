"""The normative page and the code say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump import format as dump_format
from mindspeed_precision.dump.format import parse_line, payload_file, rank_directory, to_json
from mindspeed_precision.record import fingerprint, sketch
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import NO_MICROBATCH, Phase, Role

PAGE = (Path(__file__).parents[2] / "docs" / "dump-format.md").read_text(encoding="utf-8")


def section(title):
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found.group(1)


def table_keys(title):
    rows = re.findall(r"^\| (`[^|]*) \|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("kind", dump_format.KEYS)
def test_every_key_is_in_the_table_of_its_kind(kind):
    assert table_keys(kind) == set(dump_format.KEYS[kind])


@pytest.mark.parametrize("kind", dump_format.KEYS)
def test_the_example_line_parses_and_is_written_the_same(kind):
    (example,) = re.findall(r"```json\n(.*?)\n```", section(kind), re.DOTALL)
    line = parse_line(example, where="docs/dump-format.md")
    assert json.loads(example)["kind"] == kind
    assert to_json(line) == example


def test_nested_keys_are_named():
    assert table_keys("Statistics") == set(dump_format.STATISTICS_KEYS)
    assert table_keys("place") >= set(dump_format.PLACEMENT_KEYS)
    assert all(f'"{key}"' in section("place") for key in dump_format.SPLIT_KEYS)
    assert table_keys("Sketch") == set(dump_format.SKETCH_KEYS)
    for title, keys in (
        ("header", dump_format.COORDINATE_KEYS),
        ("parameters", dump_format.PARAMETER_KEYS),
        ("record", dump_format.LAYOUT_KEYS),
        ("COMPLETE", dump_format.COMPLETE_KEYS),
    ):
        for key in keys:
            assert f"`{key}`" in section(title), (title, key)


def test_versions_and_values():
    assert f"here **{dump_format.SCHEMA}**" in section("Versions")
    assert PAGE.startswith(f"# Files of a run, schema {dump_format.SCHEMA}\n")
    assert f"**`{dump_format.FINGERPRINT}`**" in section("Versions")
    assert f"**`{dump_format.SKETCH}`**" in section("Versions")
    assert f"`schema` must be {' or '.join(map(str, dump_format.READABLE))}." in section("run.json")
    assert f"`{dump_format.DIGEST_ALGORITHM}`" in section("COMPLETE")
    phases = re.search(r"^\| `phase` .*$", section("record"), re.MULTILINE).group()
    roles = re.search(r"^\| `role` .*$", section("record"), re.MULTILINE).group()
    assert set(re.findall(r"`(\w+)`", phases)) == {"phase", *(phase.value for phase in Phase)}
    assert set(re.findall(r"`(\w+)`", roles)) == {"role", *(role.value for role in Role)}


def test_file_names():
    for name in (
        rank_directory(3),
        payload_file(-1, NO_MICROBATCH),
        payload_file(10, NO_MICROBATCH),
        payload_file(10, 0),
        payload_file(10, 0, 1),
        dump_format.MANIFEST,
        dump_format.INDEX,
        dump_format.COMPLETE,
    ):
        assert f"{name}" in PAGE


def test_constants_of_the_fingerprint():
    text = section("Fingerprint")
    code = "".join(re.findall(r"```\n(.*?)\n```", text, re.DOTALL))
    seeds = (fingerprint.WORD_SEED, fingerprint.BLOCK_SEED, fingerprint.SECOND)
    constants = (*fingerprint.MULTIPLIERS, *seeds, *fingerprint.MULTIPLIERS)
    assert [int(found, 16) for found in re.findall(r"0x[0-9a-f]{16}", code)] == list(constants)
    assert {int(found, 16) for found in re.findall(r"0x[0-9a-f]{8}\b", code)} == {
        fingerprint.OFFSET,
        fingerprint.SPREAD,
    }
    assert [int(found, 16) for found in re.findall(r"0x[0-9a-f]{4}\b", code)] == [fingerprint.SPREAD16]
    assert f"y div {1 << fingerprint.SHIFT16}" in code
    assert [int(found) for found in re.findall(r">> (\d+)", code)] == list(fingerprint.SHIFTS)
    assert f"q mod {fingerprint.WORDS}" in code
    assert f"`{dump_format.FINGERPRINT_OF_OLDER}`" in text
    assert f"`{dump_format.SKETCH_OF_OLDER}`" in section("Sketch")


def test_the_worked_example_reproduces():
    text = section("Fingerprint")
    bits = np.array(
        [int(word, 16) for word in re.search(r"`((?:[0-9a-f]{4} ){5}[0-9a-f]{4})`", text).group(1).split()]
    )
    host = HostTensor(bits=bits.astype(np.uint16).reshape(2, 3), dtype="bfloat16")
    digest = digest_host(host, statistics=True)
    assert f"`fingerprint` is `{digest.fingerprint:016x}`" in text
    assert f"`unordered` is `{digest.unordered:016x}`" in text
    (example,) = re.findall(r"```json\n(.*?)\n```", section("record"), re.DOTALL)
    assert parse_line(example, where="docs/dump-format.md").digest == digest


def test_the_sketch_of_the_page_is_the_one_of_the_code():
    text = section("Sketch")
    assert f"({-(-sketch.BUCKETS * sketch.BYTES // 3) * 4} characters)" in text
    for roundoff, power in ((sketch.ROUNDOFF, "2^-28"), (sketch.SINGLE_ROUNDOFF, "2^-18")):
        assert f"{power} = {roundoff:.1e}".replace("e-0", "e-") in text
    values = sketch.sketch_values(np.array([1.0, -2.0, 0.5], np.float32))
    told = {int(b): float(v) for b, v in re.findall(r"`values\[(\d+)\]` = (-?[\d.]+\d)", text)}
    assert told == {int(bucket): float(values[bucket]) for bucket in np.flatnonzero(values)}

    signs, turns = (int(found, 16) for found in re.findall(r"0x[0-9a-f]{16}", text)[:2])  # as the page says
    numbers, expected = np.random.default_rng(0).normal(size=700), np.zeros(256)
    for g, value in enumerate(numbers):
        minus = fingerprint.mix64_int((g // 64 + signs) % 2**64) >> g % 64 & 1
        expected[(g + fingerprint.mix64_int((g // 256 + turns) % 2**64)) % 256] += -value if minus else value
    np.testing.assert_allclose(sketch.sketch_values(numbers), expected, atol=1e-12)


def test_the_page_can_fail():
    with pytest.raises(AssertionError):
        section("no such section")
    assert table_keys("step") != table_keys("problem")
