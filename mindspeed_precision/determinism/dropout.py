"""Dropout to zero: the one source of randomness that two backends can never draw alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_precision.backends.detect import capture_backend


def zero_dropout_arguments(args: Any) -> list[str]:
    """Set every dropout probability of a Megatron argument namespace to 0, before the model is built.

    Args:
        args: what ``parse_args`` returned (``hidden_dropout``, ``attention_dropout``, ``lora_dropout`` …).

    Returns:
        What was changed, like ``args.hidden_dropout 0.1``.
    """
    return _zero(args, "args")


def zero_dropout(model: Any) -> list[str]:
    """Set every dropout probability of a built model to 0.

    Goes through ``nn.Dropout`` and its relatives, probabilities that modules keep as attributes (Megatron's
    ``TransformerLayer.hidden_dropout`` is a copy of the configuration's) and the modules' ``config``.

    Args:
        model: a module of the framework that is loaded (a ``torch.nn.Module``, an ``nn.Cell``), or a list of
            them (virtual pipeline stages).

    Returns:
        What was changed, like ``decoder.layers.0.hidden_dropout 0.1``; empty when there was no dropout.
    """
    changed = []
    configs: dict[int, Any] = {}
    for prefix, module in _modules(model):
        where = prefix or type(module).__name__
        if "dropout" in type(module).__name__.lower() and _is_probability(getattr(module, "p", None)):
            changed.append(f"{where}.p {module.p}")
            module.p = 0.0
        elif isinstance(getattr(module, "keep_prob", None), float) and getattr(module, "p", 0.0) is None:
            changed.append(f"{where}.keep_prob {module.keep_prob}")  # the older spelling of an nn.Cell
            module.keep_prob = 1.0
        changed += _zero(module, where)
        config = vars(module).get("config")
        if config is not None:
            configs.setdefault(id(config), config)
    for config in configs.values():
        changed += _zero(config, "config")
    return changed


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    chunks = model if isinstance(model, (list, tuple)) else [model]
    backend = capture_backend()
    for index, chunk in enumerate(chunks):
        waiting, seen = [(str(index) if len(chunks) > 1 else "", chunk)], set()
        while waiting:
            name, module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            inner = [
                (f"{name}.{local}" if name else local, child) for local, child in backend.children(module)
            ]
            waiting += reversed(inner)


def _zero(owner: Any, where: str) -> list[str]:
    """Set the numbers in ``owner`` whose names speak of dropout; flags (``bias_dropout_fusion``) stay."""
    found = {
        name: value
        for name, value in getattr(owner, "__dict__", {}).items()
        if "dropout" in name and _is_probability(value)
    }
    for name in found:
        object.__setattr__(owner, name, 0.0)  # configurations may be frozen dataclasses
    return [f"{where}.{name} {value}" for name, value in found.items()]


def _is_probability(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
