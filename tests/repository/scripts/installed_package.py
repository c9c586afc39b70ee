"""What an installed package must do, away from any checkout: its data are there, and each command runs.

Takes the name of the wheel or sdist, for messages.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import mindspeed_precision
from mindspeed_precision.compare import policy_names
from mindspeed_precision.config import data_directory, load_settings
from mindspeed_precision.patching.declare import load_declarations
from mindspeed_precision.testing.fake_runs import plant, scaled, write_fake_run

DISTRIBUTION = "mindspeed-precision"


def command(*arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "mindspeed_precision", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, (arguments, done.returncode, done.stderr)
    return done.stdout


def main(made: str) -> None:
    home = Path(mindspeed_precision.__file__).parent
    assert home.is_relative_to(sys.prefix), f"{home} is not what was installed"
    version = importlib.metadata.version(DISTRIBUTION)
    assert version == mindspeed_precision.__version__
    assert f"-{version}" in made, (made, version)
    assert len(load_declarations()) > 30
    assert {"exact", "cross_layout"} <= set(policy_names())
    for preset in (data_directory("configs") / "presets").glob("*.yaml"):
        load_settings(preset.stem)
    with tempfile.TemporaryDirectory() as temporary:
        one, two, three = (Path(temporary) / name for name in ("one", "two", "three"))
        write_fake_run(one)
        write_fake_run(two)
        write_fake_run(three, plants=[plant(phase="wgrad", role="wgrad", value=scaled(2.0))])
        command("compare", str(one), str(two), "--json")
        assert '"status": "diverged"' in command("compare", str(one), str(three), "--json", status=1)
        command("check", str(one), "--json")
        command("verify", str(one), str(two), "--json")
        command("show", str(one))
    assert "linear_backward" in command("patches", "list")
    sys.stdout.write(f"{made}: installed, its data are there, commands run\n")


if __name__ == "__main__":
    main(sys.argv[1])
