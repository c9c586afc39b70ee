"""Dumps of msprobe (MindStudio-Probe): read as runs, written from runs; its configurations, translated.

A team that has only msprobe can so be compared with; ``docs/msprobe.md``.
"""
