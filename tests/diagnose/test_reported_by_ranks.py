"""What another rank than the first found while it ran reaches the verdict, once."""

from __future__ import annotations

from mindspeed_precision import compare_runs, load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.records import RankCoordinates
from mindspeed_precision.testing.fake_runs import write_fake_run

FINDING = {
    "id": "coverage.wgrad_operands_unseen",
    "severity": "warning",
    "confidence": 1.0,
    "title": "the GEMM of layer on rank 1",
    "evidence": [],
    "remedy": "declare a patch",
}


def test_findings_of_a_rank_are_read_back(tmp_path):
    create_run(tmp_path / "run", {"parallel": {"world_size": 2}, "settings": {"ranks": "1"}})
    writer = RankWriter(tmp_path / "run", coordinates=RankCoordinates(rank=1, world_size=2))
    writer.write_step(0, [], {}, microbatches=0)
    writer.write_findings([FINDING])
    writer.close(complete=True)
    run = load_run(tmp_path / "run")
    assert run.ranks[1].findings == (FINDING,)
    assert run.notes == ()


def test_findings_of_several_ranks_of_one_run_are_not_those_of_both(tmp_path):
    baseline, candidate = (write_fake_run(tmp_path / name) for name in ("baseline", "candidate"))
    run = load_run(candidate)
    (rank,) = run.ranks.values()
    writer = object.__new__(RankWriter)
    writer.directory = rank.directory
    writer.write_findings([FINDING, FINDING])
    (finding,) = compare_runs(baseline, candidate).findings
    assert finding.id == FINDING["id"]
    assert finding.evidence == ("reported by the candidate while running",)
