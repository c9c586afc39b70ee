"""Data, random states, recomputation, layouts and collectives of one run: faults and healthy twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from run_building import RunBuilder, dense, findings_of, outcome_of, ranks

from mindspeed_precision.records import Severity


def tokens(number):
    return np.arange(8, dtype=np.int64) * 3 + number


def reading(directory, numbers, *, coordinates=None, ids=None, keep=False):
    """Return a run whose ranks read what ``numbers[step][microbatch][data-parallel rank]`` says."""
    builder = RunBuilder(coordinates, microbatches=len(numbers[0]), keep=keep)
    for step, of_step in enumerate(numbers):
        for microbatch, of_ranks in enumerate(of_step):
            for where in builder.coordinates:
                at = {"rank": where.rank, "step": step, "microbatch": microbatch}
                number = of_ranks[where.dp_rank]
                builder.add("batch", "batch", "batch", tokens(number), slot="tokens", **at)
                builder.add("batch", "batch", "batch", np.arange(8), slot="position_ids", **at)
                if ids is not None:
                    handed = np.array(ids[step][microbatch][where.dp_rank], np.int64)
                    builder.add("batch", "batch", "batch", handed, slot="sample_ids", **at)
    return builder.write(directory)


IDS = ("data.repeated_in_step", "data.repeated", "data.sample_ids", "data.lane_reads_other_batches")


@pytest.mark.parametrize(
    "numbers",
    [
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]],  # an epoch of one step
        [[[0, 1], [2, 3]], [[1, 0], [3, 2]]],  # and another order in the next
        [[[0, 1], [2, 3]], [[4, 5], [4, 1]], [[0, 2], [3, 5]]],  # the next one begins inside a step
    ],
    ids=["one epoch", "three epochs", "shuffled epochs", "an epoch that ends inside a step"],
)
def test_healthy_data(tmp_path, numbers):
    run = reading(tmp_path / "run", numbers, coordinates=ranks(2))
    assert not findings_of(run, *IDS)
    assert outcome_of(run, "data.repeated_in_step").exercised == sum(4 for _ in numbers)


def test_two_ranks_that_read_the_same(tmp_path):
    run = reading(tmp_path / "run", [[[0, 0], [1, 1]], [[2, 2], [3, 3]]], coordinates=ranks(2))
    finding = findings_of(run, *IDS)["data.repeated_in_step"]
    assert (finding.where.step, finding.where.microbatch) == (0, 0)
    assert "data-parallel" in finding.remedy


def test_two_microbatches_that_are_the_same(tmp_path):
    run = reading(tmp_path / "run", [[[0], [1]], [[2], [2]], [[3], [4]]])
    finding = findings_of(run, *IDS)["data.repeated_in_step"]
    assert (finding.where.step, finding.where.microbatch) == (1, 1)
    assert "iterator" in finding.remedy


def test_a_batch_that_comes_back_before_its_epoch_is_over(tmp_path):
    run = reading(tmp_path / "run", [[[0]], [[1]], [[1]], [[2]]])
    found = findings_of(run, *IDS)
    assert set(found) == {"data.repeated"}
    assert found["data.repeated"].where.step == 2


def test_one_batch_for_ever(tmp_path):
    assert "data.repeated" in findings_of(reading(tmp_path / "three", [[[0]], [[0]], [[0]]]), *IDS)
    assert not findings_of(reading(tmp_path / "two", [[[0]], [[1]], [[2]]]), *IDS)


def test_sample_ids_in_order(tmp_path):
    numbers = [[[0], [1]], [[2], [3]], [[4], [5]]]
    healthy = reading(
        tmp_path / "healthy",
        numbers,
        ids=[[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]], [[[8, 9]], [[10, 11]]]],
    )
    assert not findings_of(healthy, *IDS)
    assert outcome_of(healthy, "data.sample_ids").exercised == 6


def test_sample_ids_that_are_skipped(tmp_path):
    numbers = [[[0]], [[1]], [[2]], [[3]]]
    ids = [[[[0, 1]]], [[[2, 3]]], [[[8, 9]]], [[[10, 11]]]]
    finding = findings_of(reading(tmp_path / "run", numbers, ids=ids), *IDS)["data.sample_ids"]
    assert finding.where.step == 2
    assert "step 1 ends with sample 3, step 2 begins with 8" in finding.evidence[0]


def test_sample_ids_that_are_repeated(tmp_path):
    numbers = [[[0]], [[1]], [[2]], [[3]]]
    ids = [[[[0, 5]]], [[[7, 3]]], [[[3, 9]]], [[[10, 2]]]]
    finding = findings_of(reading(tmp_path / "run", numbers, ids=ids, keep=True), *IDS)["data.sample_ids"]
    assert finding.where.step == 2
    assert "sample 3" in finding.evidence[0]


def test_sample_ids_in_random_order_and_a_new_epoch(tmp_path):
    numbers = [[[0]], [[1]], [[2]], [[3]]]
    ids = [[[[0, 5]]], [[[7, 3]]], [[[3, 0]]], [[[5, 7]]]]
    assert not findings_of(reading(tmp_path / "run", numbers, ids=ids, keep=True), *IDS)


def test_ranks_of_one_lane_read_one_batch(tmp_path):
    lane = ranks(2, tp_size=2)
    run = reading(tmp_path / "healthy", [[[0]], [[1]]], coordinates=lane)
    assert not findings_of(run, *IDS)
    assert outcome_of(run, "data.lane_reads_other_batches").exercised == 4
    apart = [replace(where, dp_rank=where.tp_rank) for where in lane]  # what their loaders take them for
    builder = RunBuilder(lane)
    for where in apart:
        at = {"rank": where.rank, "microbatch": 0}
        builder.add("batch", "batch", "batch", tokens(where.dp_rank), slot="tokens", **at)
    finding = findings_of(builder.write(tmp_path / "faulty"), *IDS)["data.lane_reads_other_batches"]
    assert "ranks 0 and ranks 1 differ" in finding.evidence[0]


def drawing(directory, states, *, slot="model-parallel-rng", coordinates=None):
    """Return a run in which the state of a generator at step s of rank r is ``states[r][s]``."""
    builder = RunBuilder(coordinates or ranks(len(states), tp_size=len(states)))
    for rank, of_rank in enumerate(states):
        for step, state in enumerate(of_rank):
            at = {"rank": rank, "step": step, "slot": slot}
            builder.add("rng", "batch", "rng", np.full(16, state, np.uint8), **at)
    return builder.write(directory)


RNG = ("rng.differs_in_tensor_group", "rng.equal_in_tensor_group", "rng.dropout_stopped")


@pytest.mark.parametrize(
    ("slot", "states", "expected"),
    [
        ("model-parallel-rng", [[1, 2, 3], [4, 5, 6]], set()),
        ("model-parallel-rng", [[1, 2, 3], [1, 2, 3]], {"rng.equal_in_tensor_group"}),
        ("model-parallel-rng", [[1, 1, 1], [1, 1, 1]], set()),  # nobody draws from it
        ("data-parallel-rng", [[1, 2, 3], [1, 2, 3]], set()),
        ("data-parallel-rng", [[1, 2, 3], [1, 2, 4]], set()),  # the last state may never be drawn from
        ("data-parallel-rng", [[1, 2, 3], [1, 4, 5]], {"rng.differs_in_tensor_group"}),
        ("python", [[1, 2, 3], [4, 5, 6]], set()),
        ("model-parallel-rng", [[1, 2, 2], [3, 4, 4]], {"rng.dropout_stopped"}),
    ],
)
def test_states_over_the_tensor_parallel_group(tmp_path, slot, states, expected):
    found = findings_of(drawing(tmp_path / "run", states, slot=slot), *RNG)
    assert set(found) == expected
    if expected == {"rng.differs_in_tensor_group"}:
        assert found["rng.differs_in_tensor_group"].where.step == 1


def dropping(directory, masks):
    """Return a run with a dropout module; ``masks`` says by step what it multiplies by."""
    builder, given = RunBuilder(), np.arange(1, 9, dtype=np.float32)
    for step, mask in enumerate(masks):
        at = {"step": step, "microbatch": 0, "slot": "0"}
        builder.add("input", "fprop", "layers.0.attention_dropout", given + step, **at)
        builder.add("output", "fprop", "layers.0.attention_dropout", (given + step) * np.float32(mask), **at)
    return builder.write(directory)


ON, OFF = [0, 2, 0, 2, 2, 0, 2, 0], [1] * 8


@pytest.mark.parametrize("masks", [[ON, ON, ON], [OFF, OFF, OFF], [ON, OFF, ON]], ids=["on", "off", "small"])
def test_healthy_dropout(tmp_path, masks):
    assert not findings_of(dropping(tmp_path / "run", masks), *RNG)


def test_dropout_that_an_evaluation_switched_off(tmp_path):
    finding = findings_of(dropping(tmp_path / "run", [ON, OFF, OFF]), *RNG)["rng.dropout_stopped"]
    assert finding.where.step == 1
    assert finding.where.fqn == "layers.0.attention_dropout"


def recomputing(directory, changed=""):
    builder = RunBuilder()
    hidden = np.arange(8, dtype=np.float32)
    at = {"microbatch": 0, "slot": "0"}
    for again in (False, True):
        for name in ("attention", "mlp"):
            builder.add("input", "fprop", name, hidden, recomputed=again, **at)
            builder.add("output", "fprop", name, hidden + again * (name == changed), recomputed=again, **at)
    return builder.write(directory)


def test_recomputation(tmp_path):
    healthy = recomputing(tmp_path / "healthy")
    assert not findings_of(healthy, "fprop.recomputed_differs")
    assert outcome_of(healthy, "fprop.recomputed_differs").exercised == 4
    finding = findings_of(recomputing(tmp_path / "faulty", "mlp"))["fprop.recomputed_differs"]
    assert finding.where.fqn == "mlp"
    assert finding.where.recomputed
    assert "same bits both times" in finding.evidence[1]


def reducing(directory, *, layout=None, summed=False, discarded=False, phase="dgrad", dtype="float32"):
    """Return two tensor-parallel ranks that all-reduce in a module, or in its backward pass."""
    builder = RunBuilder(ranks(2, tp_size=2))
    given_role, got_role = ("grad_output", "grad_input") if phase == "dgrad" else ("input", "output")
    parts = [np.arange(8, dtype=dtype).reshape(2, 4) + 1 + (0 if summed else rank) for rank in (0, 1)]
    total = parts[0] + parts[1]
    for rank, part in enumerate(parts):
        at = {"rank": rank, "microbatch": 0}
        builder.add(given_role, phase, "linear", part, slot="all_reduce", layout=layout, **at)
        builder.add(got_role, phase, "linear", total, slot="all_reduce", **at)
        builder.add(got_role, phase, "norm", part if discarded else total, slot="0", **at)
    return builder.write(directory)


REDUCE = ("reduce.result_discarded", "reduce.copies_summed", "layout.collective_operand")


@pytest.mark.parametrize("phase", ["fprop", "dgrad"])
def test_the_result_of_an_all_reduce_flows_on(tmp_path, phase):
    healthy = reducing(tmp_path / "healthy", phase=phase)
    assert not findings_of(healthy, *REDUCE)
    assert outcome_of(healthy, "reduce.result_discarded").exercised == 2
    finding = findings_of(reducing(tmp_path / "faulty", phase=phase, discarded=True), *REDUCE)
    assert finding["reduce.result_discarded"].where.fqn == "norm"


def test_copies_are_not_summed(tmp_path):
    found = findings_of(reducing(tmp_path / "run", phase="fprop", summed=True), *REDUCE)
    assert set(found) == {"reduce.copies_summed"}
    assert "equal on ranks 0, 1" in found["reduce.copies_summed"].evidence[0]


def test_counts_that_are_equal_by_chance_are_no_copies(tmp_path):
    run = reducing(
        tmp_path / "run", phase="fprop", summed=True, dtype="int64"
    )  # tokens per expert of a router
    assert not findings_of(run, *REDUCE)


@pytest.mark.parametrize(
    ("stride", "contiguous", "text"),
    [((1, 2), False, "strides [1, 2]"), ((0, 1), False, "share memory")],
    ids=["transposed", "expanded"],
)
def test_operands_of_collectives_are_dense(tmp_path, stride, contiguous, text):
    layout = replace(dense((2, 4)), stride=stride, contiguous=contiguous)
    finding = findings_of(reducing(tmp_path / "run", layout=layout), *REDUCE)["layout.collective_operand"]
    assert text in finding.evidence[0]
    assert finding.severity.value == "warning"


def multiplying(directory, strides):
    builder = RunBuilder(ranks(2))
    for rank, stride in enumerate(strides):
        layout = replace(dense((2, 4)), stride=stride, contiguous=stride == (4, 1))
        operand = np.arange(8, dtype=np.float32).reshape(2, 4)
        builder.add("input", "wgrad", "linear", operand, rank=rank, microbatch=0, layout=layout)
    return builder.write(directory)


def test_operands_lie_alike_on_all_ranks(tmp_path):
    healthy = multiplying(tmp_path / "healthy", [(1, 2), (1, 2)])
    assert not findings_of(healthy, "layout.differs_between_ranks")
    assert outcome_of(healthy, "layout.differs_between_ranks").exercised == 1
    finding = findings_of(multiplying(tmp_path / "faulty", [(4, 1), (1, 2)]))["layout.differs_between_ranks"]
    assert "rank 0: strides [4, 1]; rank 1: strides [1, 2]" in finding.evidence[0]


def staged(directory, *, lost=()):
    """Return two pipeline stages that send activations forward, gradients back; ``lost``: not all of it."""
    builder = RunBuilder(ranks(2, pp_size=2))
    hidden = np.arange(8, dtype=np.float32).reshape(2, 4) + 1
    at = {"microbatch": 0, "slot": "0"}
    builder.add("output", "fprop", "", hidden, rank=0, **at)
    received = np.where(np.arange(8).reshape(2, 4) == 3, 0, hidden) if "forward" in lost else hidden
    builder.add("input", "fprop", "decoder", received.astype(np.float32), rank=1, **at)
    builder.add("output", "fprop", "", np.float32([[1, 2, 3, 4]]), rank=1, **at)
    builder.add("grad_input", "dgrad", "decoder", hidden / 7, rank=1, **at)
    back = hidden / 7 * (2 if "backward" in lost else 1)
    builder.add("grad_output", "dgrad", "", back.astype(np.float32), rank=0, **at)
    return builder.write(directory)


def test_a_stage_works_on_what_the_one_before_sent(tmp_path):
    healthy = staged(tmp_path / "healthy")
    assert not findings_of(healthy, "parallel.stage_received_other")
    assert outcome_of(healthy, "parallel.stage_received_other").exercised == 2


@pytest.mark.parametrize(
    ("way", "name", "phase"), [("forward", "decoder", "fprop"), ("backward", "", "dgrad")]
)
def test_a_transfer_that_loses_something(tmp_path, way, name, phase):
    finding = findings_of(staged(tmp_path / "run", lost=(way,)))["parallel.stage_received_other"]
    assert (finding.where.fqn, finding.where.phase.value) == (name, phase)


def normed(directory, *, given=None, got=None, weight=None, name="layers.0.input_layernorm"):
    builder, rows = RunBuilder(), np.arange(24, dtype=np.float32).reshape(3, 8) + 1
    at = {"microbatch": 0, "slot": "0"}
    builder.add(
        "param", "init", f"{name}.weight", np.ones(8, np.float32) if weight is None else weight, step=-1
    )
    builder.add("input", "fprop", name, rows if given is None else given, **at)
    builder.add("output", "fprop", name, rows if got is None else got, **at)
    return builder.write(directory)


LAST_ROW_ZERO = np.concatenate([np.ones((2, 8)), np.zeros((1, 8))]).astype(np.float32)
TWO_WEIGHTS = np.array([0, 1, 1, 1, 0, 1, 1, 1], np.float32)


def test_no_row_of_zeros(tmp_path):
    name = "fprop.zero_rows"
    assert not findings_of(normed(tmp_path / "healthy"), name)
    assert not findings_of(normed(tmp_path / "padded", given=LAST_ROW_ZERO, got=LAST_ROW_ZERO), name)
    assert not findings_of(normed(tmp_path / "weights", got=LAST_ROW_ZERO, weight=TWO_WEIGHTS), name)
    finding = findings_of(normed(tmp_path / "faulty", got=LAST_ROW_ZERO))[name]
    assert "8 zeros in [3, 8]; 0 come from what it has and is given" in finding.evidence[0]


def test_no_row_of_zeros_in_an_embedding(tmp_path):
    given, name = np.arange(3), "embedding.word_embeddings"
    assert not findings_of(normed(tmp_path / "healthy", given=given, name=name), "fprop.zero_rows")
    assert "fprop.zero_rows" in findings_of(
        normed(tmp_path / "faulty", given=given, got=LAST_ROW_ZERO, name=name)
    )


def test_one_batch_over_and_over_is_meant_or_not_and_no_error(tmp_path):
    run = reading(tmp_path / "run", [[[0, 0], [0, 0]]] * 3, coordinates=ranks(2))
    found = findings_of(run, *IDS)
    assert set(found) == {"data.repeated"}
    assert found["data.repeated"].severity is Severity.WARNING


def test_steps_that_were_not_recorded_may_have_ended_an_epoch(tmp_path):
    builder = RunBuilder()
    for step in (0, 10, 11):  # an epoch of ten steps
        builder.add("batch", "batch", "batch", tokens(step % 10), slot="tokens", step=step, microbatch=0)
    assert not findings_of(builder.write(tmp_path / "run"), *IDS)
