"""Pipeline stages of several chunks, by hand: what a whole module has, and the order of its parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.align import align
from mindspeed_precision.align.stages import Stages, chunks_by_name
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    NO_MICROBATCH,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
)

LAYERS = 8
MICROBATCHES = 4
FIRST, LAST = "embedding.weight", "output_layer.weight"


def weight(layer):
    return f"decoder.layers.{layer}.mlp.weight"


def declared(*names):
    return [ParameterDeclaration(fqn=name, shape=(2,), dtype="float32", trainable=True) for name in names]


class Rank:
    """One stage of a pipeline: its records as the schedule of Megatron makes them."""

    def __init__(self, stage, stages, chunks, start, factors, calls):
        self.stage, self.stages, self.chunks, self.calls = stage, stages, chunks, calls
        self.factors = factors
        self.start = start
        self.records, self.payloads, self.counted = [], {}, {}

    def layers(self, chunk):
        each = LAYERS // self.stages // self.chunks
        first = (chunk * self.stages + self.stage) * each
        return range(first, first + each)

    @property
    def parameters(self):
        names = [weight(layer) for chunk in range(self.chunks) for layer in self.layers(chunk)]
        first = [FIRST] if self.stage == 0 else []
        return declared(*first, *names, *([LAST] if self.stage == self.stages - 1 else []))

    def add(self, phase, role, fqn, value, microbatch, occurrence=0, slot="0"):
        held = np.float32(value) * self.start
        host = HostTensor(bits=held.view(np.uint32), dtype="float32")
        key = RecordKey(
            step=0,
            microbatch=microbatch,
            phase=phase,
            fqn=fqn,
            role=role,
            slot=slot,
            occurrence=occurrence,
        )
        seq = len(self.records)
        self.records.append(
            TensorRecord(
                seq=seq,
                key=key,
                shape=held.shape,
                dtype="float32",
                layout=None,
                digest=digest_host(host, statistics=True),
            )
        )
        self.payloads[seq] = host

    def value(self, layer, microbatch):
        """What reaches a layer: each multiplies by its factor."""
        return (1 + microbatch) * np.prod(self.factors[:layer], dtype=np.float64)

    def forward(self, chunk, microbatch):
        layers, call = self.layers(chunk), self.calls * chunk
        for number in range(call, call + self.calls):
            if not layers[0]:
                self.add(Phase.FPROP, Role.INPUT, "decoder", self.value(0, microbatch), microbatch, number)
            for layer in layers if number == call else ():
                name = f"decoder.layers.{layer}"
                self.add(Phase.FPROP, Role.INPUT, name, self.value(layer, microbatch), microbatch)
                self.add(Phase.FPROP, Role.OUTPUT, name, self.value(layer + 1, microbatch), microbatch)
            last = self.value(layers[-1] + 1, microbatch)
            self.add(Phase.FPROP, Role.OUTPUT, "decoder", last, microbatch, number)
        if layers[-1] == LAYERS - 1:
            self.add(Phase.LOSS, Role.LOSS, "loss", last, microbatch)

    def backward(self, chunk, microbatch):
        behind = 100 * self.value(LAYERS, microbatch)
        call = self.calls * chunk
        for layer in reversed(self.layers(chunk)):
            name = f"decoder.layers.{layer}"
            got, gave = (behind / np.prod(self.factors[:at], dtype=np.float64) for at in (layer + 1, layer))
            if layer == self.layers(chunk)[-1]:
                self.add(Phase.DGRAD, Role.GRAD_OUTPUT, "decoder", got, microbatch, call)
            self.add(Phase.DGRAD, Role.GRAD_OUTPUT, name, got, microbatch)
            self.add(Phase.DGRAD, Role.GRAD_INPUT, name, gave, microbatch)
        if not self.layers(chunk)[0]:
            self.add(Phase.DGRAD, Role.GRAD_INPUT, "decoder", gave, microbatch, call)

    def run(self):
        """Groups of as many microbatches as there are stages go through one chunk after the other."""
        groups = [
            range(at, min(at + self.stages, MICROBATCHES)) for at in range(0, MICROBATCHES, self.stages)
        ]
        for group in groups:
            for chunk in range(self.chunks):
                for microbatch in group:
                    self.forward(chunk, microbatch)
        for group in groups:
            for chunk in reversed(range(self.chunks)):
                for microbatch in group:
                    self.backward(chunk, microbatch)
        return self

    def write(self, path):
        where = RankCoordinates(
            rank=self.stage, world_size=self.stages, pp_rank=self.stage, pp_size=self.stages
        )
        writer = RankWriter(path, coordinates=where)
        writer.declare_parameters(self.parameters)
        writer.write_step(0, self.records, self.payloads, microbatches=MICROBATCHES)
        writer.close(complete=True)


def write(path, stages=1, chunks=1, *, fault=None, calls=1):
    """Write one step; ``fault``: a layer that multiplies by another number than in the other runs."""
    config = {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    create_run(path, {"parallel": {"world_size": stages}, "config": {"transformer_config": config}})
    start = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
    factors = [1.5 if layer == fault else 2.0 for layer in range(LAYERS)]
    for stage in range(stages):
        Rank(stage, stages, chunks, start, factors, calls).run().write(path)
    return load_run(path)


def keys(found):
    return {pair.key for pair in found.pairs}


@pytest.mark.parametrize("other", [(1, 1), (2, 1), (4, 2)], ids=["one process", "PP2", "PP4 VPP2"])
def test_interleaved_stages_have_what_the_whole_decoder_has(other, tmp_path):
    one, two = write(tmp_path / "one", *other), write(tmp_path / "two", stages=2, chunks=2)
    for found in (align(one, two), align(two, one)):
        assert (found.unruled, found.unmatched, found.replicas) == ({}, (), ())
        assert all(pair.baseline.digest.same_bits(pair.candidate.digest) for pair in found.pairs)
        decoder = {(k.role, k.microbatch, k.occurrence) for k in keys(found) if k.fqn == "decoder"}
        roles = (Role.INPUT, Role.OUTPUT, Role.GRAD_INPUT, Role.GRAD_OUTPUT)
        assert decoder == {(role, number, 0) for role in roles for number in range(MICROBATCHES)}
    assert any("are what a pipeline stage gives to another: not compared" in note for note in found.notes)


@pytest.mark.parametrize("fault", range(LAYERS))
@pytest.mark.parametrize("swapped", [False, True], ids=["in the candidate", "in the baseline"])
def test_the_first_divergence_is_the_layer_and_not_the_first_stage(fault, swapped, tmp_path):
    """The first stage's second chunk comes after the other stages' first one, whatever run says the order."""
    runs = [write(tmp_path / "one"), write(tmp_path / "two", stages=2, chunks=2, fault=fault)]
    diagnosis = compare_runs(*(reversed(runs) if swapped else runs), policy="exact", replay=False)
    first = diagnosis.first_divergence.key
    assert (first.fqn, first.role, first.microbatch) == (f"decoder.layers.{fault}", Role.OUTPUT, 0)
    assert {o.key.fqn for o in diagnosis.origins if o.key.phase is Phase.FPROP} == {first.fqn}


def test_a_module_that_a_chunk_calls_twice_is_said_and_not_compared(tmp_path):
    """The nth call is then not the nth chunk's."""
    one, two = write(tmp_path / "one"), write(tmp_path / "two", stages=2, chunks=2, calls=2)
    found = align(one, two)
    reason = "no layout rule for what has parts on several stages"
    assert {key.fqn for key, told in found.unruled.items() if told == reason} == {"decoder"}
    assert "decoder" not in {key.fqn for key in keys(found)}


def test_a_run_without_pipeline_has_one_part(tmp_path):
    run = write(tmp_path / "one")
    stages = Stages(run)
    assert {stages.part(0, record.key) for record in run.ranks[0].records} == {(0, 0)}
    assert stages.spanning() == frozenset()


def test_the_parts_of_interleaved_stages(tmp_path):
    run = write(tmp_path / "two", stages=2, chunks=2)
    stages = Stages(run)
    key = RecordKey(step=0, microbatch=0, phase=Phase.WGRAD, fqn=weight(5), role=Role.WGRAD)
    assert stages.part(0, key) == (1, 0)  # the first stage has layers 0, 1, 4, 5
    for fqn, rank, part in ((weight(1), 0, (0, 0)), (weight(2), 1, (0, 1)), (LAST, 1, (1, 1))):
        assert stages.part(rank, replace(key, fqn=fqn)) == part
    assert stages.part(0, replace(key, fqn="decoder.layers.4.mlp.activation")) == (1, 0)  # without parameters
    loss = RecordKey(step=0, microbatch=NO_MICROBATCH, phase=Phase.LOSS, fqn="loss", role=Role.LOSS)
    assert stages.part(1, loss) == (1, 1)
    assert stages.spanning() == {"decoder"}


def test_the_chunk_of_a_name():
    found = chunks_by_name(declared(FIRST, weight(0), weight(1), weight(4), weight(5), LAST))
    assert (found[FIRST], found["decoder.layers.1"], found["decoder.layers.4"], found[LAST]) == (0, 0, 1, 1)
    assert "decoder" not in found
    mtp = chunks_by_name(declared(weight(1), weight(3), "mtp.layers.0.weight"))
    assert mtp["mtp"] == 1  # another stack, counted from 0 again, is no other chunk
