"""Report: the diagnosis as text for a person, as JSON for machines, as a table for a spreadsheet."""

from __future__ import annotations
