"""The worked cases: how precision problems of migrated trainings show themselves, and what answers them.

docs/cases.md quotes what each says.
"""

from __future__ import annotations

from mindspeed_precision.testing.demo.case import Ask, Case, Logs, Say, Train, Training

NO_NAN_CHECK = "--no-check-for-nan-in-loss-and-grad"
"""Megatron would end with an error at the first NaN; many scripts turn that off."""

IDENTICAL = {"status": "identical", "findings": [], "coverage": {"unmatched": 0}}

config = Case(
    name="config",
    title="Configuration mismatch: the candidate's script gives --adam-beta2 twice, and the last one counts.",
    acts=(
        Say(
            "Two teams start what they believe to be one training. The candidate's script ends with arguments of "
            "its own;\none of them was given further up already."
        ),
        Train(
            Training(name="baseline", arguments=("--adam-beta2", "0.95")),
            Training(name="candidate", arguments=("--adam-beta2", "0.95", "--adam-beta2", "0.999")),
        ),
        Logs(),
        Say(
            "Two steps agree to the last digit, so weights, data and model do. Before looking into tensors: what does "
            "the\nlaunch itself say? This costs nothing and needs no device."
        ),
        Ask(
            command="preflight --backend cpu -- @launch:candidate",
            status=0,
            answer={"findings": [{"id": "config.repeated_argument"}]},
        ),
        Say("And were the two runs given the same training?"),
        Ask(
            command="verify @baseline @candidate",
            status=1,
            answer={"findings": [{"id": "optimizer.beta"}, {"id": "config.differs", "severity": "error"}]},
        ),
        Say("The tensors say the same, two steps before the loss does:"),
        Ask(
            command="compare @baseline @candidate",
            status=1,
            answer={
                "status": "diverged",
                "first_divergence": {"step": 0, "phase": "optimizer"},
                "findings": [{"id": "optimizer.beta"}],
            },
        ),
        Say("The remedy: leave the second --adam-beta2 out."),
        Train(Training(name="repaired", arguments=("--adam-beta2", "0.95"))),
        Logs(candidate="repaired"),
        Ask(command="compare @baseline @repaired", name="compare-repaired", status=0, answer=IDENTICAL),
    ),
)

data_order = Case(
    name="data-order",
    title="Data order: the same samples, shuffled in one run alone.",
    acts=(
        Say("The candidate's script shuffles (--dataloader-type cyclic), the baseline's reads in order."),
        Train(
            Training(name="baseline"), Training(name="candidate", arguments=("--dataloader-type", "cyclic"))
        ),
        Logs(),
        Say(
            "The loss differs from the first step on. Weights or data? `verify` looks at what entered both runs."
        ),
        Ask(
            command="verify @baseline @candidate",
            status=1,
            answer={"findings": [{"id": "data.batch_order", "severity": "error"}]},
        ),
        Say("`compare` agrees: the first thing that differs is a batch, before anything was computed."),
        Ask(
            command="compare @baseline @candidate",
            status=1,
            answer={
                "status": "diverged",
                "first_divergence": {"step": 0, "microbatch": 0, "phase": "batch", "role": "batch"},
                "findings": [{"id": "data.batch_order"}],
            },
        ),
        Say("The remedy: the same order in both."),
        Train(Training(name="repaired", arguments=("--dataloader-type", "single"))),
        Logs(candidate="repaired"),
        Ask(command="compare @baseline @repaired", name="compare-repaired", status=0, answer=IDENTICAL),
    ),
)

_EPS = ("--norm-epsilon", "1e-6")

structure = Case(
    name="structure",
    title="Model structure: a norm of one's own that does not hand its epsilon on.",
    extra=_EPS,
    acts=(
        Say(
            "Both scripts say --norm-epsilon 1e-6. The candidate's norm takes an epsilon and forgets to hand it on, so "
            "that\nthe default of its library counts, 1e-5. No argument shows it."
        ),
        Train(
            Training(name="baseline", kernels=(("norm_modules.py", "handed-on"),)),
            Training(name="candidate", kernels=(("norm_modules.py", "default-eps"),)),
        ),
        Logs(),
        Say("The loss differs from the first step on, in the fifth digit. Where does it begin?"),
        Ask(
            command="compare @baseline @candidate",
            status=1,
            answer={
                "status": "diverged",
                "first_divergence": {
                    "step": 0,
                    "phase": "fprop",
                    "fqn": "decoder.layers.0.input_layernorm",
                    "role": "output",
                },
                "findings": [{"id": "fprop.value"}],
            },
        ),
        Say(
            "A norm gives other numbers from equal inputs and weights. What do the modules of both runs hold?"
        ),
        Ask(
            command="verify @baseline @candidate",
            status=1,
            answer={"findings": [{"id": "model.module_differs", "severity": "error"}]},
        ),
        Say("Which of the two is wrong needs no second run: was what was asked for in effect?"),
        Ask(
            command="check @candidate",
            status=1,
            answer={"findings": [{"id": "config.not_in_effect", "severity": "error"}]},
        ),
        Say("The remedy: hand it on."),
        Train(Training(name="repaired", kernels=(("norm_modules.py", "handed-on"),))),
        Logs(candidate="repaired"),
        Ask(command="compare @baseline @repaired", name="compare-repaired", status=0, answer=IDENTICAL),
    ),
)

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
            "A run that does not repeat itself can be compared with nothing. Which operation is it? The first one whose "
            "result\ndiffers while nothing that it consumed does:"
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

first_loss = Case(
    name="first-loss",
    title="First-step loss: a converted checkpoint whose QKV rows are in another order.",
    acts=(
        Say(
            "Both runs load the same checkpoint, each through its own converter. The candidate's puts q, k and v under "
            "each\nother; Megatron keeps them head by head. Shapes, norms and sums are the same."
        ),
        Train(
            Training(name="baseline", kernels=(("weight_conversion.py", "by-head"),)),
            Training(name="candidate", kernels=(("weight_conversion.py", "in-blocks"),)),
        ),
        Logs(),
        Say("The very first loss differs, so nothing was trained yet: weights, data or model."),
        Ask(
            command="compare @baseline @candidate",
            status=1,
            answer={
                "status": "diverged",
                "first_divergence": {"step": -1, "phase": "init", "role": "param"},
                "findings": [{"id": "weights.initial_differs"}],
            },
        ),
        Say("It differs before the first step, in the weights. How?"),
        Ask(
            command="verify @baseline @candidate",
            status=1,
            answer={"findings": [{"id": "weights.permuted", "severity": "error"}]},
        ),
        Say("The same elements in another order. The remedy: a conversion head by head."),
        Train(Training(name="repaired", kernels=(("weight_conversion.py", "by-head"),))),
        Logs(candidate="repaired"),
        Ask(command="compare @baseline @repaired", name="compare-repaired", status=0, answer=IDENTICAL),
    ),
)

_RIGHT = (("gelu_kernels.py", "sigmoid"), ("scatter_kernels.py", "in-order"))
_WRONG = (("gelu_kernels.py", "exp"), ("scatter_kernels.py", "12-slots"))
_MENDED = (("gelu_kernels.py", "exp"), ("scatter_kernels.py", "in-order"))
_EIGHT_STEPS = "stop_after=7"
WITHIN = {"status": "within_tolerance", "findings": [], "coverage": {"unmatched": 0}}

drift = Case(
    name="drift",
    title="Long-run drift: curves that part after dozens of steps, by a fault of step 6 that no curve shows.",
    arguments={"seed": 286, "iterations": 64, "learning_rate": 5e-3},
    acts=(
        Say(
            "Two backends, whose activations round differently: that is healthy. The candidate's embedding has a fault, "
            "too:\nnow and then its backward forgets a row. First, training as always, without this tool:"
        ),
        Train(
            Training(name="baseline-long", kernels=_RIGHT, recorded=False),
            Training(name="candidate-long", kernels=_WRONG, recorded=False),
        ),
        Logs(baseline="baseline-long", candidate="candidate-long", above=1e-4, every=4),
        Say(
            "Where they part is not where it began. The first eight steps are recorded; of the baseline also the state "
            "that\neach step begins with (preset `reference`)."
        ),
        Train(
            Training(
                name="baseline",
                kernels=_RIGHT,
                flags=("--precision-debug-config", "reference", "--precision-debug-set", _EIGHT_STEPS),
            ),
            Training(name="candidate", kernels=_WRONG, flags=("--precision-debug-set", _EIGHT_STEPS)),
        ),
        Say(
            "Bits differ everywhere, since the kernels do, so they are compared with a tolerance. It has to grow with "
            "the\nupdates, as rounding does, and this fault is smaller than that:"
        ),
        Ask(command="compare @baseline @candidate --policy cross_layout", status=0, answer=WITHIN),
        Say(
            "So each step of the candidate begins with the baseline's weights and optimizer state (teacher forcing):"
        ),
        Train(
            Training(
                name="forced",
                kernels=_WRONG,
                flags=("--precision-debug-set", _EIGHT_STEPS, "reference=@baseline"),
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
                flags=("--precision-debug-set", _EIGHT_STEPS, "reference=@baseline"),
            ),
            Training(name="repaired-long", kernels=_MENDED, recorded=False),
        ),
        Logs(baseline="baseline-long", candidate="repaired-long", above=1e-4, every=8),
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
            "Both train in float32. The candidate's kernel of one activation computes in float16 inside, for speed."
        ),
        Train(
            Training(name="baseline", kernels=(("gelu_kernels.py", "exp"),)),
            Training(name="candidate", kernels=(("gelu_kernels.py", "exp-fp16"),)),
        ),
        Logs(),
        Say(
            "The loss is NaN from step 5 on: then the weights are. A NaN in a weight comes from the step before. One "
            "run is\nenough to ask for the first one:"
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

__all__ = ["config", "data_order", "drift", "first_loss", "nan", "nondeterminism", "structure"]
