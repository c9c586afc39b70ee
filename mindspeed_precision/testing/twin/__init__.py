"""The native twin: Megatron's GPT written with MindSpore's own cells, trained on MindSpore's CPU backend.

It is a second implementation of the model that Megatron trains elsewhere: the same parameter names, module
paths, initial weights, batches, loss, clipping and optimizer, so that a run of it can be compared with a run
of Megatron on torch, record by record. ``python -m mindspeed_precision.testing.twin --help`` trains it.

=====================  ==============================================================================
``settings``           what is trained, and which of the twin's variants
``model``              GPTModel and what it is made of: ``linear``, ``attention``, ``cross_entropy``
``gradients``          the two ways in which MindSpore differentiates: ``value_and_grad`` and the tape
``optimizer``          AdamW that works on a CPU; MindSpore's own, those that work and those that do not
``trainer``            TwinTrainer, which puts them together
``defects``            what the installed MindSpore computes wrongly, measured, not assumed
=====================  ==============================================================================

MindSpore 2.7.1 to 2.10.0, PyNative mode, CPU, float32. Nothing here says anything about Ascend.
"""
