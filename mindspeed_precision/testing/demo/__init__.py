"""What the demo trains: a user's ``pretrain_gpt.py``, a text, and how to launch them on this machine."""
