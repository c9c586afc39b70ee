"""Readers of what others write, given spoilt files; ``make fuzz`` gives them a hundred times as many."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does"),
]

HERE = Path(__file__).parent
INPUTS = 1200

PLANTED = """
import sys
sys.path.insert(0, {here!r})
import readers

def planted(directory):
    data = (directory / "file.yaml").read_bytes()
    if data != healthy[0]:
        {body}

healthy = []
readers.READERS.clear()
readers.READERS["planted"] = readers.Reader(
    file="file.yaml",
    seeds=lambda d: healthy.append((d / "file.yaml").write_bytes(b"a: 1") and b"a: 1"),
    read=planted,
)
import fuzz
fuzz.PATIENCE = 2
sys.argv = ["fuzz.py", "20"]
sys.exit(fuzz.main())
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], capture_output=True, text=True, check=False, timeout=900
    )


def test_every_reader_refuses_or_reads():
    ended = run(str(HERE / "fuzz.py"), str(INPUTS), "--seed", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    last = re.fullmatch(
        r"(\d+) inputs, seed 1, peak \d+ MiB: 0 readers failed", ended.stdout.splitlines()[-1]
    )
    assert last
    assert int(last.group(1)) >= 1000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('theirs')", "KeyError"),
        ("__import__('os').system('true')", "os.system"),
        ("__import__('subprocess').run(['true'])", "subprocess.Popen"),
        ("open('/etc/hostname').read()", "opened /etc/hostname"),
        ("open(directory.parent.parent / 'x', 'w')", "opened"),
        ("bytearray(1 << 40)", "MemoryError"),
        ("all(True for _ in __import__('itertools').count())", "still reading after 2 s"),
        ("from mindspeed_precision.errors import DumpError; raise DumpError('')", "no message for a person"),
    ],
)
def test_what_no_reader_may_do_is_seen(body, said):
    """The fuzzer can fail: each kind of breach, planted in a reader."""
    ended = run("-c", PLANTED.format(here=str(HERE), body=body))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED planted" in ended.stdout
    assert said in ended.stdout
