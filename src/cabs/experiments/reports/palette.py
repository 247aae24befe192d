"""Names and colours of curves, for pictures and for the page alike."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from cabs.experiments.reports.comparison import Section
from cabs.experiments.reports.selection import Method, Setting


def colours(methods: Sequence[Method]) -> dict[str, str]:
    """A colour for each method: CABS red, the Competitor gold, constant sizes from green to violet.

    With and without a decay of the learning rate a method has the same one; curves of the former are dashed.
    """
    result = {}
    for method in methods:
        kin = list(dict.fromkeys(other.undecayed for other in methods if other.kind is method.kind))
        ramp, position = method.kind.colours, kin.index(method.undecayed)
        if method.kind.role == "baseline":
            position = round(position / max(1, len(kin) - 1) * (len(ramp) - 1))
        result[method.name] = ramp[min(position, len(ramp) - 1)]
    return result


def on_dark(colour: str) -> str:
    """The same hue where the page is dark: what is dark elsewhere is light there, so that shades stay apart."""
    hue, lightness, saturation = _hls(colour)
    return _hex(hue, min(max(1 - 0.75 * lightness, 0.55), 0.85), saturation)


def _hls(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return colorsys.rgb_to_hls(red, green, blue)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(part * 255):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


def label(method: Method) -> str:
    """A method with its best learning rate, for a legend."""
    return f"{method.name}, α = {method.best.lr:g}"


def sensitivity_families(section: Section) -> list[Method]:
    """The methods to show learning rates of: CABS, the Competitor, and the best constant size."""
    return [
        method
        for method in section.methods
        if len(method.settings) > 1
        and method.best.finished
        and (method.kind.role != "baseline" or method.name == section.reference)
    ]


def shades(method: Method, colour: str, lightest: float = 0.75, darkest: float = 0.35) -> list[tuple[Setting, str]]:
    """The settings of a method, from the smallest to the largest learning rate in shades of its colour."""
    hue, _, saturation = _hls(colour)
    result = []
    for position, setting in enumerate(method.settings):
        lightness = lightest + (darkest - lightest) * position / max(1, len(method.settings) - 1)
        result.append((setting, _hex(hue, lightness, saturation)))
    return result


def setting_label(setting: Setting) -> str:
    """A learning rate for a legend, with what became of it."""
    failed = sum(not run.finished for run in setting.runs)
    share = f" ({failed} of {len(setting.runs)})" if failed < len(setting.runs) else ""
    return f"α = {setting.lr:g}" + (f", diverged{share}" if failed else "")
