"""From live tensors to records: fingerprint and statistics, computed when a tensor is seen.

``recorder.Recorder`` is the verb. ``fingerprint`` and ``statistics`` are the definitions, in numpy alone;
backends compute the same on the device.
"""
