"""Results as Markdown tables."""

from __future__ import annotations

from typing import Any


def markdown(report: dict[str, Any]) -> str:
    """One table for time and one for memory, networks down and contenders across."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    results = report["results"]
    contenders = [c for c in _contenders(results) if c != "plain"]
    lines = [
        "# What measuring costs",
        "",
        f"`{report['command']}`, {report['date']}, {report['processor']}, {report['threads']} threads, "
        f"Python {report['python']}, {versions}.",
        "",
        "Medians of ratios to the plain SGD step of the same round; n is the number of rounds. A dash: not run.",
        "",
        "## Step time",
        "",
        *_table(results, contenders, "time", "plain_ms", "plain, ms"),
        "",
        "## Peak tensor memory",
        "",
        *_table(results, contenders, "memory", "plain_mib", "plain, MiB"),
    ]
    refused = {
        (result["network"], contender): why for result in results for contender, why in result["refused"].items()
    }
    if refused:
        lines += ["", "## Refused", ""]
        lines += [f"- {contender} on {network}: {why}" for (network, contender), why in refused.items()]
    return "\n".join(lines) + "\n"


def _contenders(results: list[dict[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for result in results:
        names.update(dict.fromkeys([*result["memory"], *result["time"], *result["refused"]]))
    return list(names)


def _table(results: list[dict[str, Any]], contenders: list[str], kind: str, base: str, title: str) -> list[str]:
    lines = [
        f"| network | m | n | {title} | " + " | ".join(contenders) + " |",
        "| --- | ---: | ---: | ---: |" + " ---: |" * len(contenders),
    ]
    for result in results:
        cells = [f"{result[kind][c]:.2f}" if c in result[kind] else "–" for c in contenders]
        lines.append(
            f"| {result['network']} | {result['examples']} | {result['rounds']} | {result[base]:.1f} | "
            + " | ".join(cells)
            + " |"
        )
    return lines
