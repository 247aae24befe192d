"""The report's page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import browser
import made_up
import pytest
from browser import Browser

from cabs.experiments.problems import CIFAR10
from cabs.experiments.reports.report import write_report
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.reader import find_runs

pytestmark = pytest.mark.skipif(
    browser.CHROMIUM is None or browser.DRIVER is None,
    reason="needs the programs chromium and chromedriver, which are not installed",
)

READY = "document.documentElement.dataset.ready"
VISIBLE = """
    const plot = document.getElementById("results-0");
    return plot.data.filter((trace) => trace.legendgroup === NAME).map((trace) => trace.visible === true);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    made_up.write_sweep(path / "grid", examples=400_000, seeds=(0, 1), lrs=(0.1, 0.06, 0.03))
    hostile = "imagefolder:/<img src=x onerror=alert(1)><b>bold"
    config = replace(RunConfig.make(CIFAR10, {"examples": 1000}), problem=hostile)
    made_up.write_run(path / "<img src=x onerror=alert(2)>", config)
    made_up.write_run(path / "<script>alert(3)<script>", config)
    write_report([path], path / "report")
    return path / "report" / "report.html"


@pytest.fixture(scope="module")
def wide(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), (1280, 1000)) as chromium:
        chromium.open(page)
        chromium.wait_for(READY)
        yield chromium


def toggle(chromium: Browser, name: str) -> None:
    """Press a name in the legend of the first figure, as a reader would."""
    place = chromium.run(f"""
        const names = [...document.querySelectorAll("#results-0 .legend .traces")];
        const entry = names.find((group) => group.textContent.trim().startsWith({name!r}));
        entry.scrollIntoView({{ block: "center" }});
        const box = entry.querySelector(".legendtoggle").getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    """)
    chromium.click(*place)


def test_the_plots_are_there_and_the_console_is_empty(wide: Browser) -> None:
    counts = wide.run("""
        const plots = [...document.querySelectorAll(".plot")];
        return plots.map((plot) => plot.querySelectorAll(".scatterlayer .trace").length);
    """)
    assert len(counts) == 6  # results, rates and three families of the grid, results of the other problem
    assert all(count > 0 for count in counts)
    assert wide.run("return document.querySelectorAll('#results-0 .legend .traces').length;") == 8
    heights = wide.run("return [...document.querySelectorAll('.plot')].map((p) => p.getBoundingClientRect().height);")
    assert min(heights) > 200
    assert wide.messages() == []


def test_curves_can_be_switched_off_and_on(wide: Browser) -> None:
    state = VISIBLE.replace("NAME", "'CABS'")
    assert wide.run(state)
    assert all(wide.run(state))
    toggle(wide, "CABS")
    wide.wait_for(f"(() => {{ {state} }})().every((visible) => !visible)")
    toggle(wide, "CABS")
    wide.wait_for(f"(() => {{ {state} }})().every((visible) => visible)")
    assert wide.messages() == []


def test_sizes_of_the_supplement_are_off_at_first(wide: Browser) -> None:
    assert not any(wide.run(VISIBLE.replace("NAME", "'Constant 16'")))
    assert all(wide.run(VISIBLE.replace("NAME", "'Constant 128'")))


def test_light_and_dark(wide: Browser) -> None:
    look = """
        const plot = document.getElementById("results-0");
        return [getComputedStyle(document.body).backgroundColor, plot.layout.font.color];
    """
    toggle(wide, "Constant 512")
    off = VISIBLE.replace("NAME", "'Constant 512'")
    wide.wait_for(f"(() => {{ {off} }})().every((visible) => !visible)")
    before = wide.run(look)
    wide.run("document.getElementById('theme').click();")
    wide.wait_for(f"(() => {{ {look} }})()[1] !== {before[1]!r}")
    after = wide.run(look)
    assert before[0] != after[0]
    assert not any(wide.run(off))  # what the reader switched off stays off
    wide.run("document.getElementById('theme').click();")
    wide.wait_for(f"(() => {{ {look} }})()[1] === {before[1]!r}")
    assert wide.run(look) == before
    assert wide.messages() == []


def test_names_are_shown_as_they_are(wide: Browser) -> None:
    assert wide.run("return document.querySelectorAll('img, b').length;") == 0
    assert "<b>bold" in wide.run("return document.querySelectorAll('h2')[1].textContent;")
    legend = wide.run("return document.querySelector('#results-1 .legend').textContent;")
    assert "<img src=x onerror=alert(2)>" in legend
    assert "<script>alert(3)<script>" in legend


def test_every_run_is_listed_with_its_outcome(wide: Browser, page: Path) -> None:
    rows = wide.run("""
        const runs = [...document.querySelectorAll("details")].find((part) => part.querySelector("table"));
        const rows = [...runs.querySelectorAll("tbody tr")];
        return rows.map((row) => [...row.cells].map((cell) => cell.textContent));
    """)
    runs = {run.path.name: run for run in find_runs([page.parent.parent / "grid"]).runs}
    assert {row[0] for row in rows} == set(runs)
    for name, *_, loss, accuracy in rows:
        run = runs[name]
        expected = (f"{run.final_loss:.3g}", f"{run.final_score:.2%}") if run.finished else ("–", "–")
        assert (loss, accuracy) == expected


def test_nothing_is_loaded_from_anywhere(wide: Browser) -> None:
    assert wide.run("return performance.getEntriesByType('resource').map((entry) => entry.name);") == []


def test_on_a_phone_nothing_sticks_out(page: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile", (500, 900)) as chromium:
        chromium.open(page)
        chromium.wait_for(READY)
        width, content = chromium.run("return [innerWidth, document.documentElement.scrollWidth];")
        assert content <= width
        sides = chromium.run("""
            return [...document.querySelectorAll(".plot")].map((plot) => plot.getBoundingClientRect().right);
        """)
        assert max(sides) <= width
        table = chromium.run("""
            const box = document.querySelector(".scroll");
            return [box.scrollWidth > box.clientWidth, box.getBoundingClientRect().right <= innerWidth];
        """)
        assert table == [True, True]  # the table scrolls within the page
        assert chromium.messages() == []
        assert chromium.screenshot().startswith(b"\x89PNG")
