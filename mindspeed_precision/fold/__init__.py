"""Fold: of thousands of ranks that did alike, one stands for all, so that runs can be larger than memory.

Every byte of both runs is read once, one rank at a time, by as many workers as there are. What a rank's
comparison can show (which records differ, which have the same bits, what is zero, what did not move) is put
into one pattern. Ranks of one pattern are one class, whose first rank is loaded, aligned, compared and
diagnosed as always, with the number of ranks that it stands for::

    paths → scan (workers) → RankOutcome per rank → classes → Folded → align … diagnose

``rank_lines`` reads one index, ``templates`` knows what its lines are, ``patterns`` puts two sides together,
``classes`` chooses, ``keeping`` loads, ``folding`` leads. ``divided`` parts what a distributed optimizer
divides, ``ranges`` compares each range. The workers are those of ``mindspeed_precision.engines``.
"""
