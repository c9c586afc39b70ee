"""The worked cases of what shows while a training runs: non-determinism, drift, NaN.

docs/cases.md quotes what each says.
"""

from __future__ import annotations

from mindspeed_precision.testing.demo.acts import Ask, Logs, Say, Train, Training
from mindspeed_precision.testing.demo.case import Case
from mindspeed_precision.testing.demo.cases_at_start import IDENTICAL

NO_NAN_CHECK = "--no-check-for-nan-in-loss-and-grad"
"""Megatron would end with an error at the first NaN; many scripts turn that off."""

nondeterminism = Case(
    name="nondeterminism",
    title="Non-determinism: one training started twice, with an embedding whose backward adds in any order.",
    arguments={"dtype": "bf16", "iterations": 4},
    acts=(
        Say("The same script, arguments, seed and machine, twice."),
        Train(
            Training(name="first", kernels=(("scatter_kernels.py", "as-they-finish"),)),
            Training(name="second", kernels=(("scatter_kernels.py", "as-they-finish"),)),
        ),
        Logs(baseline="first", candidate="second"),
        Say(
            "A run that does not repeat itself can be compared with nothing. Which operation is it? "
            "The first one whose result differs while nothing that it consumed does:"
        ),
        Ask(
            command="certify @first @second",
            status=1,
            answer={"findings": [{"id": "determinism.operation"}]},
        ),
        Say("The remedy: a kernel that adds in a fixed order. Twice again:"),
        Train(
            Training(name="first-repaired", kernels=(("scatter_kernels.py", "in-order"),)),
            Training(name="second-repaired", kernels=(("scatter_kernels.py", "in-order"),)),
        ),
        Logs(baseline="first-repaired", candidate="second-repaired"),
        Ask(
            command="certify @first-repaired @second-repaired",
            name="certify-repaired",
            status=0,
            answer={"findings": []},
        ),
    ),
)

_RIGHT = (("gelu_kernels.py", "sigmoid"), ("scatter_kernels.py", "in-order"))
_WRONG = (("gelu_kernels.py", "exp"), ("scatter_kernels.py", "12-slots"))
_MENDED = (("gelu_kernels.py", "exp"), ("scatter_kernels.py", "in-order"))
_SEVEN_STEPS = "stop_after=6"
WITHIN = {"status": "within_tolerance", "findings": [], "coverage": {"unmatched": 0}}

drift = Case(
    name="drift",
    title="Long-run drift: curves that part after dozens of steps, by a fault of step 6 that no curve shows.",
    arguments={"seed": 286, "iterations": 80, "learning_rate": 5e-3},
    acts=(
        Say(
            "Two backends, whose activations round differently: that is healthy. The candidate's "
            "embedding has a fault, too: now and then its backward forgets a row. First, training "
            "as always, without this tool:"
        ),
        Train(
            Training(name="baseline-long", kernels=_RIGHT, recorded=False),
            Training(name="candidate-long", kernels=_WRONG, recorded=False),
        ),
        Logs(baseline="baseline-long", candidate="candidate-long", above=1e-4, every=5),
        Say(
            "Where they part is not where it began. The first seven steps are recorded; of the "
            "baseline also the state that each step begins with (preset `reference`)."
        ),
        Train(
            Training(
                name="baseline",
                kernels=_RIGHT,
                flags=("--precision-debug-config", "reference", "--precision-debug-set", _SEVEN_STEPS),
            ),
            Training(name="candidate", kernels=_WRONG, flags=("--precision-debug-set", _SEVEN_STEPS)),
        ),
        Say(
            "Bits differ everywhere, since the kernels do, so they are compared with a tolerance. "
            "It has to grow with the updates, as rounding does, and this fault is smaller than "
            "that:"
        ),
        Ask(command="compare @baseline @candidate --policy cross_layout", status=0, answer=WITHIN),
        Say(
            "So each step of the candidate begins with the baseline's weights and optimizer state "
            "(teacher forcing):"
        ),
        Train(
            Training(
                name="forced",
                kernels=_WRONG,
                flags=("--precision-debug-set", _SEVEN_STEPS, "reference=@baseline"),
            ),
        ),
        Ask(
            command="compare @baseline @forced --policy cross_layout",
            name="compare-forced",
            status=1,
            answer={
                "status": "diverged",
                "first_divergence": {"step": 6, "phase": "wgrad", "fqn": "embedding.word_embeddings.weight"},
                "findings": [{"id": "wgrad.value"}],
            },
        ),
        Say("Step 6, one gradient, one parameter. The remedy: a kernel that forgets nothing."),
        Train(
            Training(
                name="repaired",
                kernels=_MENDED,
                flags=("--precision-debug-set", _SEVEN_STEPS, "reference=@baseline"),
            ),
            Training(name="repaired-long", kernels=_MENDED, recorded=False),
        ),
        Logs(baseline="baseline-long", candidate="repaired-long", above=1e-4, every=10),
        Ask(
            command="compare @baseline @repaired --policy cross_layout",
            name="compare-repaired",
            status=0,
            answer=WITHIN,
        ),
    ),
)

nan = Case(
    name="nan",
    title="NaN: an activation that computes in float16 inside overflows when its input has grown enough.",
    arguments={"seed": 4, "iterations": 7, "learning_rate": 2e-2},
    extra=("--init-method-std", "0.26", NO_NAN_CHECK),
    acts=(
        Say(
            "Both train in float32. The candidate's kernel of one activation computes in float16 "
            "inside, for speed."
        ),
        Train(
            Training(name="baseline", kernels=(("gelu_kernels.py", "exp"),)),
            Training(name="candidate", kernels=(("gelu_kernels.py", "exp-fp16"),)),
        ),
        Logs(),
        Say(
            "The loss is NaN from step 5 on: then the weights are. A NaN in a weight comes from the "
            "step before. One run is enough to ask for the first one:"
        ),
        Ask(
            command="check @candidate",
            status=1,
            answer={
                "findings": [{"id": "nonfinite.first", "severity": "error"}],
            },
        ),
        Say("Between fc1 and fc2, in the backward pass. Does anything differ there before the NaN?"),
        Ask(
            command="compare @baseline @candidate",
            status=1,
            answer={
                "status": "diverged",
                "first_divergence": {"step": 0, "phase": "fprop", "fqn": "decoder.layers.0.mlp.linear_fc2"},
                "findings": [{"id": "fprop.value"}],
            },
        ),
        Say("The same place, four steps earlier. The remedy: compute it in float32."),
        Train(Training(name="repaired", kernels=(("gelu_kernels.py", "exp"),))),
        Logs(candidate="repaired"),
        Ask(command="compare @baseline @repaired", name="compare-repaired", status=0, answer=IDENTICAL),
    ),
)

__all__ = ["drift", "nan", "nondeterminism"]
