"""The mask of a vocabulary-parallel embedding leaves out the last token of the first shard.

Nothing is seen until that token occurs: here in the second step.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, TP
from silentbench.plants import batches

LAST = 127
SELDOM = 0


def last_token_in_the_second_step(wrapped, instance, args, kwargs):
    for number, batch in enumerate(wrapped(*args, **kwargs)):
        batch["tokens"].clamp_(max=LAST - 1)
        if number == instance.settings.microbatches:
            batch["tokens"][0, 3] = LAST
        yield batch


def one_too_few(wrapped, instance, args, kwargs):
    if instance.vocab_start_index == 0:
        instance.vocab_end_index = LAST
    return wrapped(*args, **kwargs)


TOKEN = (batches(last_token_in_the_second_step, "the token occurs once"),)
CASE = case(
    "B023",
    "TTrace-type (arXiv 2506.09280)",
    healthy=TP.but(patches=TOKEN),
    reference=ONE.but(patches=TOKEN),
    patches=(
        plant(
            "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
            one_too_few,
            "(self, input_)",
            "the end of the shard's range was off by one",
        ),
    ),
    answers=(
        by_compare(1, "fprop", "embedding.word_embeddings embedding", "fprop.value", roles="output"),
        by_check(
            1, "fprop", "embedding.word_embeddings", "fprop.not_of_its_inputs fprop.zero_rows", roles="output"
        ),
    ),
)
