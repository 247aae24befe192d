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
        "Medians of ratios to the plain SGD step of the same round; n is the number of rounds. A dash: did not run.",
        "",
        "## Step time",
        "",
        *_table(results, contenders, "time", "plain_ms", "plain, ms"),
        "",
        "## Peak tensor memory",
        "",
        *_table(results, contenders, "memory", "plain_mib", "plain, MiB"),
    ]
    if any("in 4 microbatches" in c for c in contenders):
        lines[6:6] = [
            "What runs in 4 microbatches accumulates its gradient over four backward passes, as `microbatch` needs: "
            "its cost is the quotient of *microbatch, in 4 microbatches* and *plain, in 4 microbatches*.",
            "",
        ]
    if refused := _refused(results):
        lines += ["", "## Did not run", "", *refused]
    return "\n".join(lines) + "\n"


def _refused(results: list[dict[str, Any]]) -> list[str]:
    """One line for each contender and reason, with the networks and sizes it is about."""
    about: dict[tuple[str, str], dict[str, list[str]]] = {}
    for result in results:
        for refusal in result["refused"].items():
            about.setdefault(refusal, {}).setdefault(result["network"], []).append(str(result["examples"]))
    lines = []
    for (contender, why), where in about.items():
        places = "; ".join(f"{network}, m = {', '.join(sizes)}" for network, sizes in where.items())
        lines.append(f"- {contender} on {places}: {why}")
    return lines


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
