"""From records to the files of a run and back (``docs/dump-format.md``).

``writer`` is used while training; ``reader.load_run`` is where everything after the run begins, and from here
on no framework is imported.
"""
