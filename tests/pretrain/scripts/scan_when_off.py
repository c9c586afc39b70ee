"""Import megatron and the drop-in without the flag, call it, look for foreign attributes that changed."""

from __future__ import annotations

import json
import sys
import types

from mindspeed_precision.testing import cpu

cpu.install()
import megatron.training  # noqa: E402
import megatron.training.initialize  # noqa: E402

FOREIGN = ("megatron", "torch")


def attributes() -> dict[str, int]:
    """Return ``id`` of every attribute of every foreign module, and of every class in them."""
    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in FOREIGN or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            found[f"{name}.{attribute}"] = id(value)
            if isinstance(value, type) and value.__module__.partition(".")[0] in FOREIGN:
                found.update({f"{name}.{attribute}.{key}": id(item) for key, item in vars(value).items()})
    return found


def main() -> None:
    if "--break-it" in sys.argv:  # the guard can fail: a drop-in that patches when it is imported
        before = attributes()
        megatron.training.training.train_step = lambda: None
        sys.stdout.write(json.dumps({"changed": changed(before)}))
        return
    calls = []
    result = object()

    def real(*args, **kwargs):
        calls.append((args, kwargs))
        return result

    megatron.training.pretrain = real
    before = attributes()
    meta_path = list(sys.meta_path)
    from mindspeed_precision import pretrain

    one, two = object(), object()
    returned = pretrain(one, two, model_type=one)
    answer = {
        "same_object": returned is result,
        "same_arguments": calls == [((one, two), {"model_type": one})],
        "changed": changed(before),
        "import_hooks": sys.meta_path != meta_path,
        "heavy": sorted({"pandas", "mindspeed_precision.session"} & set(sys.modules)),
    }
    sys.stdout.write(json.dumps(answer))


def changed(before: dict[str, int]) -> list[str]:
    after = attributes()
    return sorted(name for name in before if after.get(name) != before[name])


if __name__ == "__main__":
    main()
