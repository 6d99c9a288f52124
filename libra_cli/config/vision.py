"""Models that see, and that libra knows how to show images to."""

from __future__ import annotations

SEEING = {"qwen3_vl": "Qwen3-VL"}
"""Families whose images are known, by the ``model_type`` of config.json: they are served and loaded
with their vision tower, which stays as it is (``model.images``)."""
