"""A run that memory does not hold, checked in parts: each law of the ranks that it links (``verify.spans``).

    plan → check_cell (replicas; workers) → Survey → again where it was another → check_stage (workers)
         → laws of the whole run, of the records that they need → put together

``plan`` chooses the parts by the memory alone, never by who works, so that the answer does not depend on it.
"""
