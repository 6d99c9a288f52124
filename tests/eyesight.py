"""How a colour looks to people who see colours differently, as a point whose distances are theirs.

The three matrices are those of Machado, Oliveira and Fernandes (2009) for full dichromacy, on
linear sRGB; the point is CIE 1976 L*a*b* under D65. A distance of 2 can just be seen side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Matrix = Sequence[Sequence[float]]
EYES: Mapping[str, Matrix] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
_XYZ: Matrix = (
    (0.4124, 0.3576, 0.1805),
    (0.2126, 0.7152, 0.0722),
    (0.0193, 0.1192, 0.9505),
)
_WHITE = (0.9505, 1.0, 1.089)


def seen(colour: str, eyes: str) -> tuple[float, float, float]:
    """L*, a* and b* of ``#rrggbb`` to eyes of that kind."""
    linear = [_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5)]
    perceived = [min(1.0, max(0.0, value)) for value in _times(EYES[eyes], linear)]
    scaled = zip(_times(_XYZ, perceived), _WHITE, strict=True)
    x, y, z = (_root(value / white) for value, white in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _times(matrix: Matrix, values: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, values, strict=True)) for row in matrix]


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _root(value: float) -> float:
    return value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
