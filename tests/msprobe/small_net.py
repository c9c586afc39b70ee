"""A small network with a residual branch, on torch and on MindSpore: what the golden dumps are of.

``python small_net.py torch|mindspore OUT LEVEL TASK SUMMARY`` dumps one step of it under real msprobe.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

WIDTH, INNER, TOKENS = 6, 8, 4
LR = 0.01


def weights():
    draw = np.random.RandomState(7)
    return {
        "fc1.weight": (draw.randn(INNER, WIDTH) * 0.3).astype(np.float32),
        "fc2.weight": (draw.randn(WIDTH, INNER) * 0.3).astype(np.float32),
        "norm.weight": np.ones(WIDTH, np.float32),
        "norm.bias": np.zeros(WIDTH, np.float32),
        "head.weight": (draw.randn(3, WIDTH) * 0.3).astype(np.float32),
    }


def batches(count):
    draw = np.random.RandomState(11)
    return [draw.randn(TOKENS, WIDTH).astype(np.float32) for _ in range(count)]


def torch_net(scale_fc2=1.0):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.fc1 = torch.nn.Linear(WIDTH, INNER, bias=False)
            self.fc2 = torch.nn.Linear(INNER, WIDTH, bias=False)
            self.head = torch.nn.Linear(WIDTH, 3, bias=False)

        def forward(self, x):
            hidden = x + self.fc2(torch.relu(self.fc1(x)))
            return self.head(hidden + self.norm(hidden))  # hidden has two readers

    net = Net()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(torch.from_numpy(weights()[name]))
    if scale_fc2 != 1.0:
        net.fc2.weight.register_hook(lambda grad: grad * scale_fc2)
    return net, torch.optim.AdamW(net.parameters(), lr=LR, foreach=False)


def torch_steps(net, optimizer, count, before=lambda: None, after=lambda loss: None):
    """Train ``count`` steps of one microbatch each; return the losses."""
    import torch

    losses = []
    for batch in batches(count):
        before()
        optimizer.zero_grad()
        loss = net(torch.from_numpy(batch)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        after(losses[-1])
    return losses


def debugger(kind, out, level, task, summary):
    kept = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    plain = {"task": task, "dump_path": str(out), "rank": [], "step": [], "level": level, task: kept}
    out.mkdir(parents=True, mode=0o750)
    config = out.with_name(out.name + ".config.json")
    config.write_text(json.dumps(plain))
    if kind == "torch":
        from msprobe.pytorch import PrecisionDebugger
    else:
        from msprobe.mindspore import PrecisionDebugger
    return PrecisionDebugger(config_path=str(config))


def dump_torch(out, level, task, summary, steps=1, scale_fc2=1.0):
    probe = debugger("torch", out, level, task, summary)
    net, optimizer = torch_net(scale_fc2)

    def after(loss):
        probe.stop()
        probe.step()

    torch_steps(net, optimizer, steps, before=lambda: probe.start(model=net), after=after)


def dump_mindspore(out, level, task, summary, steps=1):
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, nn, ops

    def norm(x, *_, **__):  # mint.norm has no kernel on a CPU
        return ops.sqrt((x.astype(ms.float32) * x.astype(ms.float32)).sum())

    mint.norm = norm
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    probe = debugger("mindspore", out, level, task, summary)

    class Linear(nn.Cell):
        def __init__(self, weight):
            super().__init__()
            self.weight = Parameter(Tensor(weight), name="weight")

        def construct(self, x):
            return ops.matmul(x, self.weight.T)

    class Norm(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(weights()["norm.weight"]), name="weight")
            self.bias = Parameter(Tensor(weights()["norm.bias"]), name="bias")

        def construct(self, x):
            centred = x - x.mean(-1, keep_dims=True)
            variance = (centred * centred).mean(-1, keep_dims=True)
            return centred / ops.sqrt(variance + 1e-5) * self.weight + self.bias

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm = Norm()
            self.fc1 = Linear(weights()["fc1.weight"])
            self.fc2 = Linear(weights()["fc2.weight"])
            self.head = Linear(weights()["head.weight"])

        def construct(self, x):
            hidden = x + self.fc2(ops.relu(self.fc1(x)))
            return self.head(hidden + self.norm(hidden))

    net = Net()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=LR)
    step = ms.value_and_grad(lambda x: net(x).square().mean(), None, net.trainable_params())
    for batch in batches(steps):
        probe.start(net)
        _, gradients = step(Tensor(batch))
        probe.stop()
        probe.step()
        optimizer(gradients)


def main():
    kind, out, level, task, summary = sys.argv[1:6]
    dump = dump_torch if kind == "torch" else dump_mindspore
    dump(Path(out), level, task, summary, steps=int(sys.argv[6]) if len(sys.argv) > 6 else 1)


if __name__ == "__main__":
    main()
