"""What a recorded training says: a line at its start, one per kind of fault, a summary; nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_precision.config import load_settings
from mindspeed_precision.live import (
    Expectation,
    Shape,
    Told,
    expect,
    finding_lines,
    start_line,
    summary_lines,
)
from mindspeed_precision.records import Finding, Severity

MODEL = Shape(
    parameters=[
        ("decoder.layers.0.mlp.linear_fc1.weight", (256, 64), "bfloat16"),
        ("norm.weight", (64,), "float32"),
    ],
    modules=["", "decoder", "decoder.layers.0.mlp.linear_fc1"],
    microbatches=4,
    tokens=64,
    hidden=64,
)
TOLD = Told(
    steps=[0, 1, 2],
    records=4899,
    bytes=3_344_782,
    payload_bytes=0,
    seconds=0.13,
    parameters=27,
    gaps=0,
    wgrad=True,
    rank=0,
    ranks=1,
)


def finding(id_, severity=Severity.WARNING, title="something"):
    return Finding(id=id_, severity=severity, confidence=1.0, title=title)


def settings(*overrides):
    return load_settings(None, overrides, "runs/a")


def test_the_start_line_says_what_and_about_how_much():
    expected = Expectation(records=1495, index_bytes=909_000, seconds=0.7)
    line = start_line(settings(), expected, MODEL, world_size=1, known=True)
    assert line == (
        "recording to runs/a: every step, rank 0, level statistics; about 1 495 records and 909 kB a step "
        "and rank; overhead at most about 0.7 s a step; counted from 2 trainable parameters (16 448 "
        "elements), 4 microbatches"
    )


def test_the_start_line_of_a_narrow_recording():
    asked = settings("steps=0-2,7", "ranks=0,4-5", "capture.rules=[{phase: wgrad}]")
    expected = Expectation(records=10, index_bytes=4096, payload_bytes=2_600_000, unsized=3)
    line = start_line(asked, expected, MODEL, world_size=8, known=False)
    assert "steps 0-2,7, 3 of 8 ranks, level statistics and 1 rule;" in line
    assert "elements of about 2.6 MB in the first one and 3 tensors of unknown size;" in line
    assert line.endswith("one microbatch a step assumed")


def test_elements_are_counted_exactly_where_the_model_says_their_size():
    captured = replace(settings().capture, **vars_of("phase: wgrad"))
    found = expect(MODEL, captured, step=0, bytes_per_record=100)
    linear = 2 * (256 * 64 * 2) + 64 * 256 * 2 + 64 * 64 * 2  # dW at parameter and GEMM, grad_output, input
    assert found.payload_bytes == 4 * (linear + 64 * 4)
    assert found.unsized == 0
    unknown = expect(replace(MODEL, tokens=0, hidden=0), captured, step=0, bytes_per_record=100)
    assert unknown.unsized == 4 * 2


def test_what_a_rule_drops_or_leaves_for_other_steps_is_not_expected():
    every = expect(MODEL, settings().capture, step=0, bytes_per_record=100)
    dropped = expect(
        MODEL,
        settings("capture.rules=[{role: hyperparameter, level: drop}]").capture,
        step=0,
        bytes_per_record=100,
    )
    assert every.records - dropped.records == 2 * 8
    later = settings("capture.rules=[{phase: wgrad, steps: '3'}]").capture
    assert expect(MODEL, later, step=0, bytes_per_record=100).payload_bytes == 0
    assert expect(MODEL, later, step=3, bytes_per_record=100).payload_bytes > 0
    nothing = settings(
        "capture.modules=false", "capture.wgrad=false", "capture.optimizer=false", "capture.batch=false"
    )
    assert expect(MODEL, nothing.capture, step=0, bytes_per_record=100).records == 0


def vars_of(rule):
    return {"rules": settings(f"capture.rules=[{{{rule}}}]").capture.rules}


def test_megatrons_arguments_give_the_microbatches_and_tokens():
    given = {
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "data_parallel_size": 4,
        "seq_length": 128,
        "hidden_size": 64,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 1,
    }
    shape = Shape.of([], [], given)
    assert (shape.microbatches, shape.tokens, shape.hidden) == (4, 128, 64)
    assert Shape.of([], [], {}).microbatches == 1


def test_each_kind_of_fault_is_one_line_once():
    told: set[str] = set()
    gaps = [finding("coverage.parameter_without_wgrad", title=f"no dW of p{n}") for n in range(3)]
    lines = finding_lines([*gaps, finding("env.note", Severity.INFO)], told, where="step 0, rank 0")
    assert lines == ["warning: step 0, rank 0: no dW of p0 (and 2 more) [coverage.parameter_without_wgrad]"]
    assert finding_lines(gaps, told, where="step 1, rank 0") == []


def test_the_summary_of_a_healthy_run_is_calm():
    lines = summary_lines(settings(), TOLD, [], warnings=0)
    assert lines == [
        "recorded 3 steps (0 to 2) to runs/a; rank 0: 4 899 records, 3.3 MB, 0.13 s at the ends of steps; "
        "dW of 27 of 27 trainable parameters seen in every microbatch",
        "next: mindspeed-precision check runs/a; mindspeed-precision compare BASELINE runs/a",
    ]


def test_the_summary_names_gaps_warnings_and_what_ended_it():
    told = replace(TOLD, gaps=2, steps=[0, 4], ranks=8, payload_bytes=1_000_000)
    found = [finding("coverage.parameter_without_wgrad")] * 2
    lines = summary_lines(settings("reference=runs/ref"), told, found, warnings=1, error="ValueError")
    assert lines[0] == "stopped by ValueError; what was whole before is kept"
    assert "recorded 2 steps (0 … 4) to runs/a; rank 0 (of 8 that recorded): " in lines[1]
    assert "(1 MB of them elements)" in lines[1]
    assert lines[1].endswith("dW of 25 of 27 trainable parameters seen in every microbatch")
    assert lines[2] == "1 warning while it ran; findings: coverage.parameter_without_wgrad (2)"
    assert lines[3].endswith("compare runs/ref runs/a")


def test_nothing_recorded_is_not_called_coverage():
    lines = summary_lines(settings(), replace(TOLD, steps=[], wgrad=False), [], warnings=0)
    assert lines[0].startswith("recorded no step to")
    assert lines[0].endswith("dW was not recorded (capture.wgrad=false)")


@pytest.mark.torch
def test_a_recorded_training_tells_and_what_it_tells_is_what_is_on_the_disk(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from mindspeed_precision import load_run
    from mindspeed_precision.session import Session
    from mindspeed_precision.testing.recorded import UNPINNED

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    unused = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("unused", unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    out = tmp_path / "run"
    with Session(model=model, optimizer=optimizer, out=out, overrides=UNPINNED) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            session.step()
    lines = [line.removeprefix("mindspeed-precision: ") for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 5
    assert lines[0].startswith(f"recording to {out}: every step, rank 0, level statistics; about ")
    assert lines[1] == (
        "warning: step 0, rank 0: no dW of unused was seen in any microbatch of step 0 on rank 0 "
        "[coverage.parameter_without_wgrad]"
    )
    run = load_run(out)
    index = Path(out / "rank00000" / "index.jsonl").stat().st_size
    recorded = re.search(
        r"rank 0: ([\d ]+) records, (\S+ \S+), \S+ s at the ends of steps; dW of 4 of 5", lines[2]
    )
    assert recorded is not None, lines[2]
    assert int(recorded[1].replace(" ", "")) == len(run.ranks[0].records)
    assert recorded[2] == f"{index / 1e3:.0f} kB"
    assert lines[3] == "1 warning while it ran; findings: coverage.parameter_without_wgrad (1)"
    said = int(re.search(r"about ([\d ]+) records", lines[0])[1].replace(" ", ""))
    really = sum(record.key.step == 1 for record in run.ranks[0].records)
    assert 0.5 < said / really < 2


@pytest.mark.torch
def test_a_training_that_fails_says_so_and_keeps_what_was_whole(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from mindspeed_precision.session import Session
    from mindspeed_precision.testing.recorded import UNPINNED

    model = torch.nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        with Session(model=model, optimizer=optimizer, out=tmp_path / "run", overrides=UNPINNED) as session:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            session.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    err = capsys.readouterr().err
    assert "mindspeed-precision: stopped by ZeroDivisionError; what was whole before is kept\n" in err
    assert "recorded step 0 to" in err
