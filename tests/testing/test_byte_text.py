"""The text that is trained on, and how it becomes samples."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_samples_are_windows_of_the_text():
    from mindspeed_precision.testing.byte_text import TEXT, ByteWindows

    text = TEXT.read_bytes()
    assert len(text) > 25_000
    data = ByteWindows(seq_length=64, samples=8, seed=1)
    assert len(data) == 8
    for index in range(8):
        sample = data[index]
        window = bytes([*sample["tokens"].tolist(), int(sample["labels"][-1])])
        assert window in text
        assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
        assert sample["loss_mask"].sum() == 64
        assert sample["position_ids"].tolist() == list(range(64))


def test_the_seed_alone_decides_the_order():
    from mindspeed_precision.testing.byte_text import ByteWindows

    def order(seed):
        data = ByteWindows(seq_length=64, samples=20, seed=seed)
        return [data[index]["tokens"].tolist() for index in range(20)]

    assert order(1) == order(1) != order(2)


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order():
    from mindspeed_precision.testing.byte_text import ByteWindows

    data = ByteWindows(seq_length=1280, samples=1000, seed=1)
    count = len(data.starts)
    assert count > 60
    epochs = [
        [bytes(data[start + index]["tokens"].tolist()) for index in range(count)] for start in (0, count)
    ]
    assert set(epochs[0]) == set(epochs[1])
    assert len(set(epochs[0])) == count
    assert epochs[0] != epochs[1]


def test_the_framework_free_samples_are_the_same_bytes():
    from mindspeed_precision.testing.byte_samples import ByteSamples
    from mindspeed_precision.testing.byte_text import ByteWindows

    tensors = ByteWindows(seq_length=32, samples=8, seed=3)
    arrays = ByteSamples(seq_length=32, samples=8, seed=3)
    second = arrays.microbatch(1, 4)
    for position, index in enumerate(range(4, 8)):
        for key, tensor in tensors[index].items():
            assert str(tensor.dtype) == f"torch.{second[key].dtype}"
            assert tensor.tolist() == second[key][position].tolist()
