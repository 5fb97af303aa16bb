"""The page in a real browser: drawing, phases, tooltips, at 1,000 ranks, offline."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aiockpt.tools.cli.main import app
from tests.monitor.synthetic_run import Fault, SyntheticRun
from tests.servers.chromium import Browser, open_browser, why_not
from tests.watch import until

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

RUN = SyntheticRun(
    saves=12,
    mesh={"pp": 5, "dp": 25, "tp": 8},
    faults=(
        Fault(ranks=frozenset({317}), stage="write", factor=4.0, since=4),
        Fault(ranks=frozenset({42}), stage="flush", factor=3.0, since=2),
    ),
    failing=frozenset({9}),
    retried=frozenset({2}),
    restart_after=5,
)
FIGURES = ("history", "places", "since", "rank", "timeline", "metrics", "pause", "bandwidth", "sizes")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("plotly")
    folder = tmp_path_factory.mktemp("run")
    RUN.write(folder)
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(folder / "page.html")])
    assert done.exit_code == 0, done.output
    return folder / "page.html"


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(started: Browser, page: Path) -> Iterator[Browser]:
    """The page, opened anew; whatever a test does to it, it complains of nothing and asks nobody."""
    started.open(page)
    yield started
    assert started.problems() == []
    assert started.requests() == []


def drawn(browser: Browser, figure: str) -> int:
    """Return how many shapes of a figure are in the page."""
    script = "return document.querySelectorAll(`#${arguments[0]} .main-svg :is(path, image, rect.bg)`).length"
    found: int = browser.run(script, figure)
    return found


def point(browser: Browser, figure: str, x: float, y: float) -> tuple[float, float]:
    """Return where a point of a figure, in the units of its axes, is in the window, and bring it into sight."""
    place = browser.run(
        """
        const figure = document.getElementById(arguments[0]);
        figure.scrollIntoView({ block: "center" });
        const { left, top } = figure.getBoundingClientRect();
        const { xaxis, yaxis } = figure._fullLayout;
        return [left + xaxis._offset + xaxis.d2p(arguments[1]), top + yaxis._offset + yaxis.d2p(arguments[2])];
        """,
        figure, x, y,
    )  # fmt: skip
    return float(place[0]), float(place[1])


def cell_of(browser: Browser, figure: str, rank: int) -> tuple[float, float]:
    """Return the column and the row of a rank in the map of ranks."""
    script = """
        const rows = document.getElementById(arguments[0]).data[0].customdata;
        const y = rows.findIndex((row) => row.includes(arguments[1]));
        return [rows[y].indexOf(arguments[1]), y];
    """
    x, y = browser.run(script, figure, rank)
    return x, y


def tooltip(browser: Browser) -> str:
    script = 'return [...document.querySelectorAll(".hoverlayer .hovertext")].map((one) => one.textContent).join(" ")'
    until(lambda: browser.run(script), "a tooltip is shown", timeout_s=20)
    return str(browser.run(script))


def test_every_figure_and_the_verdict_are_drawn(browser: Browser) -> None:
    assert browser.text(".finding.warning .what").startswith("Rank 317 (node-039) is slow: write takes")
    assert "Step 900 was not saved" in browser.text("#verdict")
    for figure in FIGURES[:-1]:
        assert drawn(browser, figure) > 3, figure
    assert "No checkpoint" in browser.text("#sizes")
    assert browser.text("#tiles").count("saves committed, 1 failed") == 1
    assert browser.run("return document.querySelectorAll('#stragglers tbody tr').length") == 2
    assert browser.run("return document.querySelectorAll('#stages tbody tr').length") > 10


def test_words_have_room_on_a_telephone(browser: Browser) -> None:
    narrow = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        widths = browser.run("return [...document.querySelectorAll('.finding .what')].map((one) => one.clientWidth)")
        assert min(widths) > 300
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_map_begins_with_what_is_wrong(browser: Browser) -> None:
    assert browser.run("return document.querySelector('#phases [aria-pressed=true]').dataset.key") == "save-write"
    assert browser.text("#rank-caption").startswith("write of rank 317")
    assert browser.run("return document.getElementById('places').layout.shapes.length") == 1


def test_phases_switch(browser: Browser) -> None:
    before = browser.run("return document.getElementById('places').data[0].z[0][0]")
    browser.click("#phases [data-key=save-flush]")
    assert browser.text("#place-caption").startswith("flush")
    assert browser.text("#since-caption").startswith("flush of every save")
    assert browser.run("return document.getElementById('places').data[0].z[0][0]") < before / 3
    browser.click("#phases [data-key=load-read]")
    assert browser.text("#since-caption").startswith("read of every load")


def test_groups_switch_to_dimensions_of_the_mesh(browser: Browser) -> None:
    shape = "const { z } = document.getElementById('places').data[0]; return [z.length, z[0].length]"
    assert browser.run(shape) == [8, 125]
    for name, expected in (("pp", [5, 200]), ("dp", [25, 40]), ("tp", [8, 125])):
        browser.click(f"#groups [data-key={name}]")
        assert browser.run(shape) == expected
        assert f"for each {name}" in browser.text("#place-caption")


def test_one_save_or_all_of_them_can_be_looked_at(browser: Browser) -> None:
    value = "return document.getElementById('places').data[0].z.flat().reduce((most, one) => Math.max(most, one))"
    assert browser.run(value) > 4
    browser.run(
        "const over = document.getElementById('over'); over.value = '0'; over.dispatchEvent(new Event('change'))"
    )
    assert browser.run(value) < 2, "in the first save nobody was slow"


def test_a_cell_tells_rank_host_place_and_time_and_chooses_it(browser: Browser) -> None:
    browser.run("document.querySelector('#groups [data-key=dp]').click()")
    x, y = point(browser, "places", *cell_of(browser, "places", 42))
    browser.move_to(x, y)
    told = tooltip(browser)
    assert "rank 42 · node-005 · pp 0 · dp 5 · tp 2" in told
    assert "write: " in told
    assert "× the median" in told
    browser.move_to(x, y, click=True)
    until(lambda: browser.text("#rank-caption").startswith("write of rank 42"), "the rank is followed", timeout_s=20)


def test_a_cell_of_the_map_over_time_opens_its_save(browser: Browser) -> None:
    x, y = point(browser, "since", 6, 10)
    browser.move_to(x, y, click=True)
    assert "step 600, write: " in tooltip(browser)
    shown = "return document.getElementById('operation').selectedOptions[0].textContent"
    until(lambda: browser.run(shown) == "save of step 600, start 2", "the save is shown", timeout_s=20)


def test_a_bar_of_the_timeline_tells_what_it_is(browser: Browser) -> None:
    script = """
        const figure = document.getElementById("timeline");
        const bars = figure.data.find((trace) => trace.name === "write");
        const at = bars.hovertext.findIndex((text) => text.includes("rank 317"));
        return [bars.base[at] + bars.x[at] / 3, bars.y[at]];
    """
    browser.move_to(*point(browser, "timeline", *browser.run(script)))
    told = tooltip(browser)
    for word in ("write", "rank 317", "MiB", "MiB/s", "after the beginning", "r00317-0000.safetensors"):
        assert word in told


def test_the_timeline_marks_where_save_returned(browser: Browser) -> None:
    marks = "return document.getElementById('timeline').data.find((trace) => trace.name === 'save() returned')"
    told = browser.run(marks)
    assert len(told["x"]) == 16
    assert all(0.05 < at < 0.2 for at in told["x"])
    browser.move_to(*point(browser, "timeline", told["x"][3], 3))
    assert "save() returned" in tooltip(browser)


def test_the_timeline_goes_from_save_to_save_and_shows_more_ranks(browser: Browser) -> None:
    browser.click("#before")
    assert browser.run("return document.getElementById('operation').selectedOptions[0].textContent").startswith(
        "save of step 1000"
    )
    rows = "const rows = document.getElementById('rows'); rows.value = '40'; rows.dispatchEvent(new Event('change'));"
    browser.run(rows)
    assert browser.run("return document.getElementById('timeline').layout.yaxis.tickvals.length") == 40


def test_a_finding_shows_where_it_is(browser: Browser) -> None:
    findings = browser.run("return [...document.querySelectorAll('.finding .what')].map((one) => one.textContent)")
    (at,) = [at for at, what in enumerate(findings) if "flush" in what]
    browser.run("document.querySelectorAll('.finding')[arguments[0]].querySelector('button').click()", at)
    assert browser.text("#rank-caption").startswith("flush of rank 42")


def test_figures_stay_in_their_boxes_when_the_window_is_resized(browser: Browser) -> None:
    lowest = """
        return [...document.querySelectorAll(".js-plotly-plot")].filter((one) =>
            one.querySelector(".main-svg").getBoundingClientRect().bottom > one.getBoundingClientRect().bottom + 1
        ).map((one) => one.id)
    """
    width = "return document.getElementById('history').querySelector('.main-svg').getBoundingClientRect().width"
    before = browser.run(width)
    browser.driver.set_window_size(1100, 1400)
    try:
        until(lambda: browser.run(width) < before, "figures are as wide as their boxes", timeout_s=20)
        assert browser.run(lowest) == []
    finally:
        browser.driver.set_window_size(1400, 1000)


def test_in_the_dark_it_is_dark(browser: Browser) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = browser.run(ground)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        ink = "return document.getElementById('pause').layout.font.color"
        until(lambda: browser.run(ink) == "#e7eaed", "figures are drawn again", timeout_s=20)
        assert browser.run(ground) != before
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
