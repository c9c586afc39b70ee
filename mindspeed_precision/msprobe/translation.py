"""A configuration of msprobe, translated: settings, and for each key what it became."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf


@dataclass(kw_only=True)
class Translation:
    """A configuration of msprobe, translated.

    Attributes:
        settings: of ours, as plain data: what differs from the defaults.
        became: by key of msprobe's, what it became.
        without: by key, why it has no counterpart.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    became: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def capture(self) -> dict[str, Any]:
        """Return the settings of capture, to be changed."""
        found = self.settings.setdefault("capture", {})
        assert isinstance(found, dict)
        return found

    def rule(self, **rule: str) -> None:
        """Add a rule of capture; later ones win."""
        self.capture().setdefault("rules", []).append(rule)

    def lines(self) -> list[str]:
        """Return a line per key of msprobe's, what it became or why nothing."""
        became = [f"{key}: became {text}" for key, text in self.became.items()]
        return became + [f"{key}: no counterpart: {text}" for key, text in self.without.items()]

    def yaml(self, source: str) -> str:
        """Return the settings as a file, with what became of each key as comments."""
        head = [f"# from {source}, a configuration of msprobe", *(f"# {line}" for line in self.lines())]
        body = OmegaConf.to_yaml(OmegaConf.create(self.settings)) if self.settings else ""
        return "\n".join(head) + "\n" + body
