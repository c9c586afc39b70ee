"""The worked cases of what two runs are given: configuration, data, model, weights.

docs/cases.md quotes what each says.
"""

from __future__ import annotations

from mindspeed_precision.testing.demo.acts import Ask, Logs, Say, Train, Training
from mindspeed_precision.testing.demo.case import Case

IDENTICAL = {"status": "identical", "findings": [], "coverage": {"unmatched": 0}}

config = Case(
    name="config",
    title="Configuration mismatch: the candidate's script gives --adam-beta2 twice, and the last one counts.",
    acts=(
        Say(
            "Two teams start what they believe to be one training. The candidate's script ends with "
            "arguments of its own; one of them was given further up already."
        ),
        Train(
            Training(name="baseline", arguments=("--adam-beta2", "0.95")),
            Training(name="candidate", arguments=("--adam-beta2", "0.95", "--adam-beta2", "0.999")),
        ),
        Logs(),
        Say(
            "Two steps agree to the last digit, so weights, data and model do. Before looking into "
            "tensors: what does the launch itself say? This costs nothing and needs no device."
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
            "The loss differs from the first step on. Weights or data? `verify` looks at what "
            "entered both runs."
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
            "Both scripts say --norm-epsilon 1e-6. The candidate's norm takes an epsilon and "
            "forgets to hand it on, so that the default of its library counts, 1e-5. No argument "
            "shows it."
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

first_loss = Case(
    name="first-loss",
    title="First-step loss: a converted checkpoint whose QKV rows are in another order.",
    acts=(
        Say(
            "Both runs load the same checkpoint, each through its own converter. The candidate's "
            "puts q, k and v under each other; Megatron keeps them head by head. Shapes, norms and "
            "sums are the same."
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

__all__ = ["IDENTICAL", "config", "data_order", "first_loss", "structure"]
