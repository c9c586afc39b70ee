"""Kernels and conversions of a user, right and wrong: scripts that run another script with them in place.

``KERNELS.py VARIANT SCRIPT ARGS…`` puts a variant in place and runs SCRIPT. They are what a migration to
another backend exchanges, so they come before this tool's patches, as its user's own code would.
"""
