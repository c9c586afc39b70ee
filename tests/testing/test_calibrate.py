"""Measuring healthy runs against the bounds: what is said is what was planted."""

from __future__ import annotations

import pytest

from mindspeed_precision.compare import load_policy
from mindspeed_precision.records import Level
from mindspeed_precision.testing.calibrate import main, samples
from mindspeed_precision.testing.fake_runs import LINEAR, plant, rounded, scaled, write_fake_run


def runs(directory, *faults):
    manifests = ({"framework": {"name": name, "version": "1"}} for name in ("torch", "mindspore"))
    plants = ((), faults)
    return [
        str(write_fake_run(directory / str(n), level=Level.TENSOR, plants=p, manifest=m))
        for n, (p, m) in enumerate(zip(plants, manifests, strict=True))
    ]


def test_what_was_planted_is_measured(tmp_path):
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=scaled(1 + 1e-5))
    one, two = runs(tmp_path, fault)
    found = list(samples(one, two, policy=load_policy("cross_framework")))
    kind, place = ("wgrad", "wgrad", "rel_frobenius"), f"{LINEAR} wgrad"
    (first,) = [s for s in found if s.kind == kind and place in s.place and not s.reach]
    assert first.value == pytest.approx(1e-5, rel=0.05)
    assert first.limit == first.start == pytest.approx(2e-5)
    assert first.used == pytest.approx(0.5, rel=0.05)
    assert sorted({s.reach for s in found}) == pytest.approx([0.0, 0.01])


def test_the_command(tmp_path, capsys):
    healthy = runs(tmp_path / "healthy", plant(phase="fprop", role="output", value=rounded()))
    assert main(healthy) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["phase", "role", "metric"]
    assert any(line.startswith("fprop") and "rel_frobenius" in line for line in lines)
    broken = runs(tmp_path / "broken", plant(phase="fprop", role="output", fqn=LINEAR, value=scaled(1.1)))
    assert main([*healthy, *broken]) == 1
    with pytest.raises(SystemExit):
        main(healthy[:1])
