"""In which way two runs see other data."""

from __future__ import annotations

import numpy as np
import pytest
from run_building import RunBuilder

from mindspeed_precision.records import RankCoordinates, Severity
from mindspeed_precision.testing.fake_runs import plant
from mindspeed_precision.verify.verify import verify_runs


def batch(value, *, slot="tokens", **where):
    return plant(phase="batch", role="batch", slot=slot, value=value, **where)


def swapped(first, second):
    """Return plants that exchange the batches of two places, ``(step, microbatch)``."""
    seen = {}

    def keep(name):
        def value(array):
            return seen.setdefault(name, array)

        return value

    drawn = {}
    generator = np.random.default_rng(1001)  # the data of a fake run of seed 1
    for step in range(2):
        for microbatch in range(2):
            tokens = generator.integers(0, 11, 7)
            drawn[step, microbatch] = tokens[:-1], tokens[1:]
    plants = []
    for here, there in ((first, second), (second, first)):
        for index, slot in enumerate(("tokens", "labels")):
            other = drawn[there][index]
            plants.append(batch(lambda _, other=other: other, slot=slot, step=here[0], microbatch=here[1]))
    return plants


def test_equal_batches(verify):
    assert verify() == {}
    assert verify.outcome("data.batch_differs").exercised == 4


def test_a_swap_of_two_steps_is_another_order(verify):
    found = verify(candidate={"plants": swapped((0, 1), (1, 0))})
    (finding,) = found["data.batch_order"]
    assert finding.severity is Severity.ERROR
    assert (finding.where.step, finding.where.microbatch) == (0, 1)
    assert "step 0, microbatch 1 of the candidate is step 1, microbatch 0 of the baseline" in finding.evidence
    assert set(found) == {"data.batch_order"}


def test_a_swap_inside_a_step_is_no_error(verify):
    found = verify(candidate={"plants": swapped((0, 0), (0, 1))})
    (finding,) = found["data.batch_order"]
    assert finding.severity is Severity.WARNING
    assert "only the order of its sums differs" in finding.title


def test_samples_exchanged_inside_microbatches_are_another_order(verify):
    found = verify(candidate={"plants": [batch(lambda tokens: tokens[::-1].copy(), step=1)]})
    assert found["data.batch_order"][0].where.step == 1


def test_tokens_that_are_the_other_runs_labels_are_shifted_by_one(verify):
    shifted = batch(lambda tokens: np.append(tokens[1:], 0), step=0, microbatch=0)
    labels = batch(lambda labels: np.append(labels[:-1], 0), slot="labels", step=0, microbatch=0)
    found = verify({"plants": [labels]}, {"plants": [shifted, labels]})
    assert "shifted by one" in found["data.shifted"][0].title


def test_labels_that_are_the_tokens_are_not_shifted(verify):
    generator = np.random.default_rng(1001)
    tokens = generator.integers(0, 11, 7)[:-1]
    found = verify(candidate={"plants": [batch(lambda _: tokens, slot="labels", step=0, microbatch=0)]})
    assert found["data.shifted"][0].title.startswith("the labels of the candidate are its tokens")


def test_a_run_that_is_one_microbatch_ahead(verify):
    generator = np.random.default_rng(1001)
    drawn = [generator.integers(0, 11, 7) for _ in range(5)]
    plants = [
        batch(
            lambda _, d=drawn[number + 1], cut=cut: d[cut],
            slot=slot,
            step=number // 2,
            microbatch=number % 2,
        )
        for number in range(4)
        for slot, cut in (("tokens", slice(None, -1)), ("labels", slice(1, None)))
    ]
    found = verify(candidate={"plants": plants})
    assert found["data.shifted"][0].title == "the candidate is 1 microbatches ahead of the baseline"


def test_the_same_tokens_with_another_mask(verify):
    masked = plant(phase="batch", slot="labels", recorded=lambda labels: np.where(labels > 5, -100, labels))
    found = verify(candidate={"plants": [masked]})
    assert set(found) == {"data.other_mask"}
    assert found["data.other_mask"][0].title == "the same samples have another labels"


class TestPadding:
    @staticmethod
    def padded(number):
        def value(tokens):
            changed = tokens.copy()
            changed[-2:] = number
            return changed

        return batch(value)

    def test_with_elements(self, verify):
        both = {"payloads": "batch"}
        found = verify({"plants": [self.padded(0)]}, {"plants": [self.padded(10)]}, both=both)
        (finding,) = found["data.other_padding"]
        assert (
            finding.evidence[0] == "rows differ only at an end, where the baseline has 0 and the candidate 10"
        )

    def test_other_tokens_in_the_middle_are_no_padding(self, verify):
        def middle(tokens):
            changed = tokens.copy()
            changed[2] = (changed[2] + 1) % 11
            return changed

        found = verify(candidate={"plants": [batch(middle)]}, both={"payloads": "batch"})
        assert set(found) == {"data.batch_differs"}


class TestTokenizer:
    def test_vocabularies_of_other_sizes(self, verify):
        sizes = [{"config": {"vocabulary": {"size": size}}} for size in (11, 32000)]
        found = verify({"manifest": sizes[0]}, {"manifest": sizes[1], "seed": 2})
        assert "data.other_tokenizer" in found

    def test_other_data_of_one_vocabulary(self, verify):
        found = verify(candidate={"seed": 2})
        assert "data.batch_differs" in found
        assert "data.other_tokenizer" not in found


def test_other_normalisation(verify):
    images = np.random.default_rng(0).normal(0, 1, 6).astype(np.float32)

    def recorded(factor, offset):
        value = (images * np.float32(factor) + np.float32(offset)).astype(np.float32)
        return {"plants": [plant(phase="batch", slot="tokens", recorded=lambda _: value)]}

    found = verify(recorded(1, 0), recorded(2, 0.5))
    (finding,) = found["data.other_normalisation"]
    assert finding.evidence[0].startswith("the candidate's inputs are 2 times the baseline's plus 0.5")


def test_without_batches_it_says_so(verify):
    verify(candidate={"plants": [plant(phase="batch", role="batch", drop=True)]})
    assert verify.outcome("data.batch_differs").skipped == "no batch of the candidate was recorded"


def test_other_microbatches_of_the_same_steps(verify):
    """The runs cut steps otherwise: whole steps are compared."""
    found = verify({"microbatches": 2}, {"microbatches": 4, "plants": []})
    assert "data.batch_differs" in found
    assert any("whole steps are compared" in line for line in found["data.batch_differs"][0].evidence)


@pytest.mark.parametrize("healthy", [True, False])
def test_context_parallel_ranks_take_the_samples_of_one(healthy, tmp_path):
    """A batch is cut over these ranks after it was taken: both recorded all of it."""
    both = [RankCoordinates(rank=rank, world_size=2, cp_rank=rank, cp_size=2) for rank in (0, 1)]
    runs = []
    for name, coordinates in (("one", [RankCoordinates()]), ("two", both)):
        builder = RunBuilder(coordinates)
        for where in coordinates:
            tokens = np.arange(8, dtype=np.int64) + (0 if healthy or where.world_size == 1 else 3)
            builder.add("batch", "batch", "batch", tokens, slot="tokens", rank=where.rank, microbatch=0)
        runs.append(builder.write(tmp_path / name))
    ids = {finding.id for finding in verify_runs(*runs).findings}
    assert ("data.batch_differs" in ids) is not healthy
