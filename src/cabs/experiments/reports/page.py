"""A report as one HTML file: interactive, in need of no network, light or dark, and fit for a phone."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cabs._version import __version__
from cabs.experiments.reports.comparison import Curve, Section, curve, diverged, far_apart, tracks_of
from cabs.experiments.reports.palette import colours, label, on_dark, sensitivity_families, setting_label, shades
from cabs.experiments.reports.rates import below_and_above, rate_cells, rate_explanation, rate_headings, rates
from cabs.experiments.reports.selection import Method, Setting
from cabs.experiments.reports.tables import NONE, SPEED_UP, caption, cells, explanation, headings
from cabs.experiments.runs.ranges import interesting_range
from cabs.experiments.runs.rules import RULES
from cabs.experiments.wording import counted

# More points than a screen has pixels would only make the file larger.
_MOST_POINTS = 800


def render(sections: Sequence[Section], title: str, damaged: Mapping[Path, str] | None = None) -> str:
    """The whole page.

    Args:
        sections: What to show.
        title: The page's title.
        damaged: Runs that could not be read, and what is wrong with each.
    """
    from plotly.offline import get_plotlyjs

    data = json.dumps([_data(section) for section in sections], allow_nan=False)
    parts = {
        "title": html.escape(title),
        "subtitle": "Coupled adaptive batch sizes against constant sizes and the norm test. "
        "Press a name below a figure to hide or show its curves; press it twice to see it alone.",
        "css": _resource("report.css"),
        "contents": _contents(sections),
        "methods": _methods(sections),
        "sections": "\n".join(_section(index, section) for index, section in enumerate(sections))
        + _damaged(damaged or {}),
        "footer": f"Made by cabs {html.escape(__version__)}.",
        # Nothing that a name contains can end the element it is in.
        "data": data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "plotly": get_plotlyjs(),
        "js": _resource("report.js"),
    }
    # One pass, so that what is filled in is never searched for more places to fill.
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], _resource("report.html"))


def _resource(name: str) -> str:
    return (files("cabs.experiments.reports") / "assets" / name).read_text(encoding="utf-8")


def _plotly_text(text: str) -> str:
    """Text for plotly, which reads some HTML."""
    return html.escape(text, quote=False)


def _contents(sections: Sequence[Section]) -> str:
    """What is on the page, with the best method of each section."""
    if len(sections) < 2:
        return ""
    items = []
    for index, section in enumerate(sections):
        best = max((method for method in section.methods if method.best.finished), key=lambda method: method.best.rank)
        outcome = f"best {section.metric.name}: {label(best)}, {section.metric.show(best.best.score)}"
        items.append(
            f'<li><a href="#section-{index}">{html.escape(section.title)}</a> '
            f'<span class="quiet">{html.escape(outcome)}</span></li>'
        )
    return f"<nav><ul>{''.join(items)}</ul></nav>"


def _methods(sections: Sequence[Section]) -> str:
    """What the methods are, a sentence for each rule that there is."""
    kinds = {method.kind.name: method.kind for section in sections for method in section.methods}
    items = "".join(
        f"<dt>{html.escape(kind.label)}</dt><dd>{html.escape(kind.meaning)}</dd>"
        for kind in RULES.values()
        if kind.name in kinds
    )
    return f"<details><summary>What the methods are</summary><dl>{items}</dl></details>"


def _key(method: Method, colour: str) -> str:
    """A dot in a method's colour, hollow where its curves are dashed."""
    kind = "key decays" if method.decays else "key"
    return f'<span class="{kind}" style="--light:{colour};--dark:{on_dark(colour)}"></span>'


def _section(index: int, section: Section) -> str:
    families = "".join(
        f'<div class="plot family" id="family-{index}-{position}"></div>'
        for position in range(len(sensitivity_families(section)))
    )
    sensitivity = (
        "<h3>Sensitivity to the learning rate: training loss against examples</h3>"
        f'<div class="families">{families}</div>'
        if families
        else ""
    )
    return f"""<section id="section-{index}">
<h2>{html.escape(section.title)}</h2>
<div class="plot results" id="results-{index}"></div>
<p class="quiet">{html.escape(caption(section))}</p>
{_table(section)}
<p class="quiet">{html.escape(explanation(section))}</p>
{_rates(index, section)}
{sensitivity}
{_runs(section)}
</section>"""


def _damaged(damaged: Mapping[Path, str]) -> str:
    if not damaged:
        return ""
    items = "".join(f"<li>{html.escape(reason)}</li>" for reason in damaged.values())
    return f"<section><h2>{counted(len(damaged), 'damaged run')} left out</h2><ul>{items}</ul></section>"


def _keys(section: Section) -> dict[str, str]:
    palette = colours(section.methods)
    return {method.name: _key(method, palette[method.name]) for method in section.methods}


def _table(section: Section) -> str:
    keys = _keys(section)
    scores = [row.score for row in section.rows if row.score is not None]
    best = max(scores, key=section.metric.goodness, default=None)
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings(section) if text != SPEED_UP)
    body = []
    for row, (name, *values) in zip(section.rows, cells(section), strict=True):
        mark = ' class="best"' if row.score is not None and row.score == best else ""
        first = f"<td>{keys[row.name]}{html.escape(name)}</td>"
        alpha, loss, score, size, to_loss, loss_gain, to_score, score_gain = map(html.escape, values)
        rest = [alpha, loss, score, size, _two_lines(to_loss, loss_gain), _two_lines(to_score, score_gain)]
        body.append(f"<tr{mark}>{first}{''.join(f'<td>{value}</td>' for value in rest)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _rates(index: int, section: Section) -> str:
    """The loss at the end over learning rates, where there are several: a plot and a table."""
    if len(rates(section)) < 2:
        return ""
    keys = _keys(section)
    head = "".join(f"<th>{html.escape(text)}</th>" for text in rate_headings(section))
    body = "".join(
        f"<tr><td>{keys[name]}{html.escape(name)}</td>"
        f"{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rate_cells(section)
    )
    return (
        "<h3>Training loss at the end over the learning rate</h3>"
        f'<div class="plot rates" id="rates-{index}"></div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="quiet">{html.escape(rate_explanation(section))}</p>'
    )


def _two_lines(reached: str, speed_up: str) -> str:
    return reached if speed_up == NONE else f"{reached}<br><small>{speed_up}</small>"


def _runs(section: Section) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(run.path.name)}</td><td>{html.escape(run.config.method)}</td>"
        f"<td>{run.config.lr:g}</td><td>{run.config.seed}</td><td>{html.escape(run.status)}</td>"
        f"<td>{f'{run.final_loss:.3g}' if run.finished else NONE}</td>"
        f"<td>{run.metric.show(run.final_score) if run.finished else NONE}</td></tr>"
        for run in section.runs
    )
    left_out = f", {len(section.unfinished)} of them not finished and left out" if section.unfinished else ""
    return (
        f"<details><summary>{counted(len(section.runs), 'run')}{left_out}</summary>"
        "<div class='scroll'><table><thead><tr>"
        "<th>run</th><th>method</th><th>α</th><th>seed</th><th>status</th><th>training loss</th>"
        f"<th>test {section.metric.name}</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _data(section: Section) -> dict[str, Any]:
    """The numbers of a section for the page's script."""
    palette = colours(section.methods)
    finished = [method for method in section.methods if method.best.finished]
    methods: list[dict[str, Any]] = [
        {
            "name": _plotly_text(method.name),
            "label": _plotly_text(label(method)),
            "colour": palette[method.name],
            "dark": on_dark(palette[method.name]),
            "decays": method.decays,
            "main": method in section.main,
            "constant": method.kind.role == "baseline",
            "loss": _curve(curve(method.best, "train_loss")),
            "score": _curve(curve(method.best, section.metric.key)),
            "size": _curve(curve(method.best, "batch_size")),
            "share": _curve(curve(method.best, "noise_share")),
        }
        for method in finished
    ]
    families: list[dict[str, Any]] = [
        {
            "name": _plotly_text(method.name),
            "curves": [
                {"label": setting_label(setting), "colour": shade, "dark": dark, **_fate(setting)}
                for (setting, shade), (_, dark) in zip(
                    shades(method, palette[method.name]),
                    shades(method, palette[method.name], lightest=0.40, darkest=0.82),
                    strict=True,
                )
            ],
        }
        for method in sensitivity_families(section)
    ]
    losses = [
        value
        for family in families
        for line in family["curves"]
        if "end" not in line
        for value in line["y"]
        if value > 0
    ]
    chosen = [method for method in methods if not method["constant"]]
    several = len(rates(section)) > 1
    return {
        "budget": section.budget,
        "methods": methods,
        "families": families,
        "rates": [_over_rates(method, palette[method.name], method in section.main) for method in finished]
        if several
        else [],
        # Of sizes that are far apart a logarithmic axis shows all.
        "largestSize": None
        if far_apart([method for method in section.main if method in finished])
        else 1.15 * max(max(m["size"]["y"]) for m in (chosen or methods)),
        "metric": {"title": section.metric.title, "format": section.metric.tick},
        "scoreRange": interesting_range(
            [track for method in finished for track in tracks_of(method.best, section.metric.key)], section.metric
        ),
        "lossRange": [math.log10(min(losses)) - 0.1, math.log10(max(losses)) + 0.1] if losses else None,
    }


def _over_rates(method: Method, colour: str, main: bool) -> dict[str, Any]:
    """The loss at the end against the learning rate."""
    settings = [setting for setting in method.settings if setting.finished]
    return {
        "name": _plotly_text(method.name),
        "colour": colour,
        "dark": on_dark(colour),
        "main": main,
        "ours": method.kind.role == "ours",
        "decays": method.decays,
        "x": [setting.lr for setting in settings],
        "y": [setting.loss for setting in settings],
        "below": [below_and_above(setting)[0] for setting in settings],
        "above": [below_and_above(setting)[1] for setting in settings],
    }


def _fate(setting: Setting) -> dict[str, Any]:
    """The training loss of a setting; of one that diverged as far as it was measured, and where it ended."""
    if (fate := diverged(setting)) is None:
        return _curve(curve(setting, "train_loss"))
    data, end = fate
    return {**_curve(data), "end": end}


def _curve(data: Curve) -> dict[str, Any]:
    stride = max(1, math.ceil(len(data.examples) / _MOST_POINTS))
    keep = sorted({*range(0, len(data.examples), stride), len(data.examples) - 1} - {-1})

    def thinned(values: list[float]) -> list[float]:
        return [float(f"{values[position]:.6g}") for position in keep]

    result: dict[str, Any] = {"x": thinned(data.examples), "y": thinned(data.mean)}
    if data.low is not None and data.high is not None:
        result |= {"low": thinned(data.low), "high": thinned(data.high)}
    return result
