"""The framework's switches: each is pinned, each change is noticed, and its author named."""

from __future__ import annotations

import sys

import pytest

from mindspeed_precision.config import DeterminismSettings
from mindspeed_precision.determinism import algorithms, change_findings, dropout, witness

torch = pytest.importorskip("torch")
wrapt = pytest.importorskip("wrapt")
pytestmark = pytest.mark.torch

SETTINGS = DeterminismSettings(
    enabled=True, seed=1, reseed=False, zero_dropout=False, fill_uninitialized_memory=True, strict=True
)

BREAKERS = {
    "deterministic_algorithms": lambda: torch.use_deterministic_algorithms(False),
    "deterministic_warn_only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "cudnn_deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", False),
    "cudnn_benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn_allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.fixture(autouse=True)
def pinned():
    before = algorithms.snapshot()
    yield algorithms.pin_algorithms(SETTINGS)
    algorithms.reassert(before)


def test_every_switch_has_a_breaker():
    assert {switch.name for switch in algorithms.TORCH_SWITCHES} == set(BREAKERS)


def test_pinned_values(pinned):
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert pinned == algorithms.snapshot()


def test_tf32_is_left_to_the_user():
    torch.set_float32_matmul_precision("high")
    assert algorithms.pin_algorithms(SETTINGS)["float32_matmul_precision"] == "high"


def test_an_operation_that_does_not_repeat_is_refused():
    place, value = torch.tensor([0]), torch.tensor([1.0])
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(2).put_(place, value)
    torch.use_deterministic_algorithms(False)
    assert torch.zeros(2).put_(place, value)[0] == 1


def test_filled_memory_is_nan():
    assert torch.empty(1024).isnan().all()


@pytest.mark.parametrize("name", BREAKERS)
def test_reassert_notices_and_puts_back(pinned, name):
    assert algorithms.reassert(pinned) == []
    BREAKERS[name]()
    (change,) = algorithms.reassert(pinned)
    assert change.name == name
    assert change.expected == pinned[name] != change.found
    assert algorithms.snapshot() == pinned
    assert algorithms.reassert(pinned) == []
    assert "nobody" not in change.describe()
    (finding,) = change_findings([change])
    assert finding.severity.value == "error"
    assert change_findings([change], strict=False)[0].severity.value == "warning"
    assert finding.id == "determinism.switch_changed"
    assert name in finding.title


def test_two_switches_of_one_call_are_both_put_back(pinned):
    torch.use_deterministic_algorithms(False, warn_only=True)
    assert {change.name for change in algorithms.reassert(pinned)} == {
        "deterministic_algorithms",
        "deterministic_warn_only",
    }
    assert algorithms.snapshot() == pinned


@pytest.fixture
def watched(monkeypatch):
    """What the patch engine does with the declarations, by hand."""
    for owner, name in (
        (torch, "use_deterministic_algorithms"),
        (torch, "set_deterministic_debug_mode"),
        (torch, "set_float32_matmul_precision"),
        (torch.backends.ContextProp, "__set__"),
    ):
        monkeypatch.setattr(owner, name, wrapt.FunctionWrapper(getattr(owner, name), witness.observe_switch))
    witness.forget()


def culprit(name):
    BREAKERS[name]()


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", [name for name in BREAKERS if name != "fill_uninitialized_memory"])
def test_culprit_is_named(pinned, name):
    culprit(name)
    (change,) = algorithms.reassert(pinned)
    assert change.culprit.startswith(__file__)
    assert change.culprit.endswith("in <lambda>")
    assert change.culprit in change.describe()
    BREAKERS[name]()
    assert algorithms.reassert(pinned)[0].culprit, "seen again after it was forgotten"


@pytest.mark.usefixtures("watched")
def test_culprit_line_is_the_line_of_the_call(pinned):
    line = sys._getframe().f_lineno + 1
    torch.set_deterministic_debug_mode("warn")
    (change,) = algorithms.reassert(pinned)
    assert change.name == "deterministic_warn_only"
    assert change.culprit == f"{__file__}:{line} in test_culprit_line_is_the_line_of_the_call"


@pytest.mark.usefixtures("watched")
def test_our_own_changes_and_calls_without_effect_have_no_culprit(pinned):
    torch.use_deterministic_algorithms(True)
    assert witness.culprit_of("deterministic_algorithms") == ""
    torch.backends.cudnn.benchmark = True
    algorithms.reassert(pinned)
    assert witness.culprit_of("cudnn_benchmark") == ""


@pytest.mark.usefixtures("watched")
def test_watching_passes_errors_and_results_through():
    with pytest.raises(RuntimeError, match="debug_mode"):
        torch.set_deterministic_debug_mode("no such mode")
    assert torch.use_deterministic_algorithms(True) is None


def test_an_unseen_change_is_said_to_be_unseen(pinned):
    torch.backends.cudnn.benchmark = True
    (change,) = algorithms.reassert(pinned)
    assert change.culprit == ""
    assert "somebody" in change.describe()


class Layer(torch.nn.Module):
    """Keeps its probability as Megatron's TransformerLayer does."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_dropout = config.hidden_dropout
        self.drop = torch.nn.Dropout(0.3)
        self.attention = torch.nn.MultiheadAttention(4, 1, dropout=0.25)
        self.bias_dropout_fusion = True
        self.p = 0.7  # not a dropout


class Config:
    def __init__(self):
        self.hidden_dropout = 0.1
        self.attention_dropout = 0.0
        self.bias_dropout_fusion = True
        self.hidden_size = 4


def test_zero_dropout_zeroes_every_probability_and_names_it():
    config = Config()
    model = torch.nn.Sequential(Layer(config), Layer(config))
    changed = dropout.zero_dropout(model)
    assert changed == [
        "0.hidden_dropout 0.1",
        "0.drop.p 0.3",
        "0.attention.dropout 0.25",
        "1.hidden_dropout 0.1",
        "1.drop.p 0.3",
        "1.attention.dropout 0.25",
        "config.hidden_dropout 0.1",
    ]
    layer = model[0]
    assert (layer.hidden_dropout, layer.drop.p, layer.attention.dropout, config.hidden_dropout) == (
        0,
        0,
        0,
        0,
    )
    assert (layer.p, layer.bias_dropout_fusion, config.bias_dropout_fusion) == (0.7, True, True)
    assert dropout.zero_dropout(model) == []
    x = torch.ones(64)
    assert torch.equal(layer.drop(x), x)


def test_zero_dropout_takes_the_chunks_of_a_virtual_pipeline():
    chunks = [torch.nn.Sequential(torch.nn.Dropout(0.1)), torch.nn.Sequential(torch.nn.Dropout(0.2))]
    assert dropout.zero_dropout(chunks) == ["0.0.p 0.1", "1.0.p 0.2"]


def test_zero_dropout_of_arguments():
    class Arguments:
        pass

    args = Arguments()
    vars(args).update(hidden_dropout=0.1, attention_dropout=0.0, lora_dropout=None, bias_dropout_fusion=True)
    assert dropout.zero_dropout_arguments(args) == ["args.hidden_dropout 0.1"]
    assert vars(args) == {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "lora_dropout": None,
        "bias_dropout_fusion": True,
    }
