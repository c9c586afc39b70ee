"""The code of docs/extending.md runs and does what the page says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.testing.fake_runs import LINEAR, constant, plant, scaled, write_fake_run

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)
RULE, LAW = BLOCKS
ASK = {
    RULE: "from mindspeed_precision import compare_runs as ask",
    LAW: "from mindspeed_precision import check_run as ask",
}
TELL = "import json, sys; print(json.dumps([finding.id for finding in ask(*sys.argv[1:]).findings]))"


def asked(block: str, *runs: Path) -> list[str]:
    """Return the findings, in a process of its own: what is registered stays so."""
    words = [sys.executable, "-c", "\n".join((block, ASK[block], TELL)), *map(str, runs)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("factor", "there"), [(0.0, True), (1.5, False)])
def test_a_rule_of_ones_own_explains_an_origin(tmp_path, factor, there):
    wrong = plant(fqn=LINEAR, phase="fprop", role="output", value=scaled(factor))
    one, two = write_fake_run(tmp_path / "one"), write_fake_run(tmp_path / "two", plants=[wrong])
    assert ("mine.all_zero" in asked(RULE, one, two)) is there


@pytest.mark.parametrize(("loss", "there"), [(1e4, True), (5.0, False)])
def test_a_law_of_ones_own_is_asked(tmp_path, loss, there):
    run = write_fake_run(tmp_path / "run", plants=[plant(phase="loss", role="loss", value=constant(loss))])
    assert ("mine.huge_loss" in asked(LAW, run)) is there
