"""What is read rank by rank keeps what is asked for and answers the same; what holds all says so before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from changing import rewritten

from mindspeed_precision import cli_resources
from mindspeed_precision.cli import main
from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.engines import Resources
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.report.show import Asked
from mindspeed_precision.testing.fake_runs import LINEAR, permuted, plant, scaled, write_fake_run
from mindspeed_precision.testing.folded import folded, smallest, told
from mindspeed_precision.testing.scale_runs import Fault, ScaleRun, write_scale_run
from mindspeed_precision.verify.verify import verify_runs

SMALL = ScaleRun(tp=2, pp=2, dp=3)
PLANTS = {
    "healthy": [],
    "data": [plant(role="batch", slot="tokens", rank=1, value=permuted())],
    "weights": [plant(role="param", phase="init", fqn=f"{LINEAR}.weight", value=scaled(2))],
    "learning rate": [plant(role="hyperparameter", slot="lr", value=scaled(2))],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    write_scale_run(folder / "baseline", SMALL)
    write_scale_run(folder / "candidate", ScaleRun(tp=2, pp=2, dp=3, fault=Fault(step=1, dp=1)))
    return folder / "baseline", folder / "candidate"


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("restarted", [False, True])
def test_verify_answers_as_of_runs_that_are_held_whole(tmp_path, name, restarted):
    one, two = (
        write_fake_run(tmp_path / side, ranks=2, plants=plants)
        for side, plants in (("baseline", []), ("candidate", PLANTS[name]))
    )
    if restarted:
        shutil.copytree(two, tmp_path / "again")
        shutil.move(tmp_path / "again", two / "restart01")
    assert verify_runs(one, two) == verify_runs(load_run(one), load_run(two))
    assert bool(verify_runs(one, two).findings) == (name != "healthy")


def test_what_is_not_asked_for_is_not_kept(runs):
    asked = Asked(role="wgrad", step=1)
    run = load_run(runs[0], wanted=asked)
    records = asked.shown(run)
    assert sum(len(rank.records) for rank in run.ranks.values()) == len(records) > 0
    every = [(n, r) for n, rank in load_run(runs[0]).ranks.items() for r in rank.records]
    assert records == [(n, r) for n, r in every if r.key.role.value == "wgrad" and r.key.step == 1]


def test_nothing_that_fits_is_told_with_how_many_there_are(runs, capsys):
    total = sum(len(rank.records) for rank in load_run(runs[0]).ranks.values())
    assert main(["show", str(runs[0]), "--fqn", "nothing"]) == 2
    assert f"none of the run's {count(total, 'record')} fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["show"],
            "every record is shown (fewer: --fqn, --role, --step): about 0.0 million records, 0.0 GiB",
        ),
        (["certify"], "every record is compared in memory"),
        (["verify", "--mapping"], "a mapping may rename any record"),
        (["show", "--role", "loss"], ""),
        (["verify"], ""),
    ],
    ids=" ".join,
)
def test_what_holds_every_record_of_large_runs_says_so_before(
    runs, tmp_path, capsys, monkeypatch, words, said
):
    monkeypatch.setattr(cli_resources, "DEFAULT_MEMORY", "1KiB")
    paths = [str(runs[0])] if words[0] == "show" else [*map(str, runs)]
    if words[-1] == "--mapping":
        (tmp_path / "names.yaml").write_text("framework: numpy\nrename: []\n")
        words = [*words, str(tmp_path / "names.yaml")]
    if words[0] == "certify":
        words = [*words, "--out", str(tmp_path / "certificate")]
    main([words[0], *paths, *words[1:]])
    told_first = capsys.readouterr().err
    assert (said in told_first) if said else ("million records" not in told_first)


def test_runs_behind_a_url_are_folded(runs, tmp_path, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec reads URLs")
    monkeypatch.setenv("MSP_CACHE", str(tmp_path / "cache"))
    urls = [f"file://{run}" for run in runs]
    small = Resources(memory=smallest(*runs), jobs=1)
    found = compare_in_full(*urls, resources=small)
    assert found.folded is not None
    assert found.folded.stand_ins == folded(*runs).folded.stand_ins
    copies = [str(run.path) for run in found.runs.values()]
    text = told(found)
    for copy, run in zip(copies, runs, strict=True):
        assert copy.startswith(str(tmp_path / "cache"))
        text = text.replace(copy, str(run))
    assert text == told(folded(*runs))


def test_a_setting_that_places_tensors_is_seen_before_anything_is_read(runs, tmp_path):
    other = Path(shutil.copytree(runs[0], tmp_path / "other"))
    manifest = json.loads((other / "run.json").read_text())
    manifest["config"]["ddp_config"]["use_distributed_optimizer"] = True
    (other / "run.json").write_text(json.dumps(manifest))
    found = compare_in_full(runs[0], other, resources=Resources(memory=smallest(runs[0], other), jobs=1))
    assert found.folded is None
    assert found.note.endswith("every rank was loaded: their parallel layouts differ")


def test_layouts_that_turn_out_to_differ_are_named(tmp_path):
    """Of a padded vocabulary the declared parameters tell alone."""
    runs = [write_scale_run(tmp_path / name, ScaleRun(dp=3)) for name in ("baseline", "candidate")]
    for run, rows in zip(runs, (64, 96), strict=True):
        for rank in run.glob("rank*"):
            assert rewritten(rank, lambda line, rows=rows: with_vocabulary(line, rows))
    found = compare_in_full(*runs, resources=Resources(memory=smallest(*runs), jobs=1))
    assert found.folded is None
    assert "every rank was loaded: their parallel layouts differ (" in found.note
    assert told(found) == told(compare_in_full(*runs))


def with_vocabulary(line: bytes, rows: int) -> bytes:
    """Call a parameter the embedding, and let it have so many rows."""
    line = line.replace(b"decoder.layers.0.input_layernorm.weight", b"embedding.word_embeddings.weight")
    if b"embedding.word_embeddings.weight" not in line:
        return line
    if line.startswith(b'{"kind":"parameters"'):
        plain = json.loads(line)
        for parameter in plain["parameters"]:
            if parameter["fqn"] == "embedding.word_embeddings.weight":
                parameter["shape"] = parameter["placement"]["shape"] = [rows]
        return json.dumps(plain, separators=(",", ":")).encode()
    return line.replace(b'"shape":[64]', b'"shape":[%d]' % rows)
