"""The files of a comparison, and its page as a browser shows it."""

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from small_results import write_result

from training.errors import RunError
from training.laboratory.comparison import compare_results
from training.laboratory.comparison_charts import INTERVAL
from training.laboratory.comparison_page import PAGE, write_comparison
from training.laboratory.results import read_results

PICTURES = ("loss_steps", "loss_tokens", "loss_time", "gradient_norm", "learning_rate", "differences")
HOSTILE = "<script>document.title='taken'<%script>"
"""Of a folder, and so without the slash."""
FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
FLAGS += "disable-component-update disable-sync window-size=1400,2000"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two seeds each of a baseline, a better run, and one with a hostile name."""
    place = tmp_path_factory.mktemp("runs")
    folders = []
    for seed in (1, 2):
        folders.append(write_result(place / f"plain-{seed}", 4.0 + seed / 100, (seed, seed)))
        better = write_result(
            place / f"clipped-{seed}", 3.5 + seed / 10, (seed, seed), speed=2.0, optimizer={"clip_norm": 1.0}
        )
        hostile = write_result(place / f"h{seed}", 4.1 + seed / 98, (seed, seed), optimizer={"eps": 1e-7})
        folders += [better, hostile.rename(place / f"{HOSTILE}{seed}$x_1$")]
    results = read_results(folders)
    folder = tmp_path_factory.mktemp("written") / "comparison"
    paths = write_comparison(folder, compare_results(results, "plain-1"), results)
    assert {path.name for path in paths} == {path.name for path in folder.iterdir()}
    return folder


def test_all_files_are_written(written: Path) -> None:
    names = {f"comparison.{ending}" for ending in ("md", "csv", "json", "html")} | {f"{name}.png" for name in PICTURES}
    assert {path.name for path in written.iterdir()} == names
    for name in PICTURES:
        assert (written / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert f"]({name}.png)" in (written / "comparison.md").read_text()


def test_a_disk_that_is_full_is_told_and_leaves_the_old_files_whole(tmp_path: Path) -> None:
    """As of `compare`, so of a study; here a folder lies where a new file would be written first."""
    results = read_results([write_result(tmp_path / "plain", 4.0)])
    folder = tmp_path / "written"
    (folder / f".{PAGE}.{os.getpid()}.new").mkdir(parents=True)
    (folder / PAGE).write_text("old")
    with pytest.raises(RunError, match=r"written: cannot be written \(.*\); make room, or choose another --output"):
        write_comparison(folder, compare_results(results, "plain"), results)
    assert (folder / PAGE).read_text() == "old"


def test_tables_are_those_of_the_comparison(written: Path) -> None:
    values = json.loads((written / "comparison.json").read_text())
    assert values["baseline"] == "plain-1"
    with (written / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == [row["mean"] for row in values["rows"]]
    assert rows[0]["group"] == "clipped-1"


def test_page_and_markdown_say_what_they_are(tmp_path: Path) -> None:
    results = read_results([write_result(tmp_path / f"plain-{seed}", 4.0, (seed, seed)) for seed in (1, 2)])
    write_comparison(tmp_path / "written", compare_results(results, "plain-1"), results, title="<mine>")
    page, text = (tmp_path / "written" / PAGE).read_text(), (tmp_path / "written" / "comparison.md").read_text()
    assert "<title>&lt;mine&gt;: comparison with plain-1</title>" in page
    assert text.startswith("# &lt;mine&gt;: comparison with plain-1\n\n- Runs: 2 in 1 row, seeds of each: 2\n")
    for line in ("Dataset: data", "Training: 20,480 tokens in 20 steps per run"):
        assert f"<li>{line}</li>" in page
        assert f"- {line}\n" in text


def test_page_is_whole_and_escapes_names(written: Path) -> None:
    page = (written / PAGE).read_text()
    assert page.count("plotly.js v") == 1
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page)
    assert "<script>document" not in page
    assert "&lt;script&gt;document" in page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with a new profile, which keeps what it logs and what it asks the network for."""
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if binary is None or driver is None:
        missing = "the page cannot be looked at without a browser: apt-get install chromium chromium-driver"
        # On CI it must be there, unless .ci/run has said that it could not be installed.
        if os.environ.get("CI") and not os.environ.get("WITHOUT_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS.split(), f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, written: Path) -> webdriver.Chrome:
    """The page, opened from the disk; nothing of it may come from elsewhere, or complain."""
    browser.get_log("performance")  # type: ignore[no-untyped-call]
    browser.get((written / PAGE).as_uri())
    WebDriverWait(browser, 60).until(lambda shown: shown.find_elements(By.CSS_SELECTOR, "#curves .legendtoggle"))
    return browser


def curves(page: webdriver.Chrome, expression: str) -> Any:
    """A value of the chart of curves, `chart` in the expression."""
    return page.execute_script(f"const chart = document.getElementById('curves'); return {expression}")


@pytest.mark.slow
def test_page_opens_from_the_disk_and_asks_for_nothing(page: webdriver.Chrome, written: Path) -> None:
    asked = []
    for entry in page.get_log("performance"):  # type: ignore[no-untyped-call]
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert [url for url in asked if not url.startswith(("data:", "blob:", "chrome:"))] == [(written / PAGE).as_uri()]
    assert page.get_log("browser") == []  # type: ignore[no-untyped-call]
    assert page.title == "Comparison with plain-1"
    assert curves(page, "chart.data.length") == 6 * 4
    buttons = page.find_elements(By.CSS_SELECTOR, ".modebar-btn")
    assert {button.get_attribute("data-title") for button in buttons} == {
        *("Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Autoscale", "Reset axes")
    }


@pytest.mark.slow
def test_table_and_names_are_shown_as_they_are(page: webdriver.Chrome) -> None:
    rows = page.find_elements(By.CSS_SELECTOR, "#comparison tbody tr")
    names = [row.find_elements(By.TAG_NAME, "td")[0].text for row in rows]
    assert names == ["clipped-1", "plain-1", f"{HOSTILE}1$x_1$"]
    assert len(page.find_elements(By.CSS_SELECTOR, "#runs tbody tr")) == 6
    legend = [text.text for text in page.find_elements(By.CSS_SELECTOR, "#curves .legendtext")]
    assert legend == ["clipped-1", "clipped-2", "plain-1", "plain-2", f"{HOSTILE}1$x_1$", f"{HOSTILE}2$x_1$"]
    assert page.title == "Comparison with plain-1"


@pytest.mark.slow
def test_verdicts_are_seen_and_explained_in_a_narrow_window(page: webdriver.Chrome) -> None:
    page.set_window_size(1000, 2000)
    try:
        verdict = page.find_element(By.CSS_SELECTOR, "#comparison td.verdict")
        assert verdict.location["x"] + verdict.size["width"] < 1000  # also behind a long name
    finally:
        page.set_window_size(1400, 2000)
    legend = [text.text for text in page.find_elements(By.CSS_SELECTOR, "#differences .legendtext")]
    assert legend == ["worse", "inside the noise", INTERVAL, "± one standard deviation of the baseline's 2 seeds"]


@pytest.mark.slow
def test_click_in_the_legend_hides_a_run_in_every_chart(page: webdriver.Chrome) -> None:
    toggles = page.find_elements(By.CSS_SELECTOR, "#curves .legendtoggle")
    ActionChains(page).move_to_element(toggles[1]).click().perform()
    hidden = "chart._fullData.filter(trace => trace.visible === 'legendonly').map(trace => trace.name)"
    WebDriverWait(page, 20).until(lambda shown: curves(shown, hidden) == ["clipped-2"] * 4)


# Where in its chart the last validation of clipped-1 is drawn, from the chart's middle.
POINT = """(() => {
    const trace = chart._fullData.find(trace => trace.name === 'clipped-1' && trace.yaxis === 'y2');
    const x = chart._fullLayout.xaxis2, y = chart._fullLayout.yaxis2, last = trace.y.length - 1;
    return [x.d2p(trace.x[last]) - x._length / 2, y.d2p(trace.y[last]) - y._length / 2].map(Math.round);
})()"""


@pytest.mark.slow
def test_pointer_over_a_curve_reads_it_off(page: webdriver.Chrome) -> None:
    chart = page.find_element(By.CSS_SELECTOR, "#curves .nsewdrag[data-subplot='x2y2']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(page).move_to_element_with_offset(chart, *curves(page, POINT)).perform()
    labels = WebDriverWait(page, 20).until(
        lambda shown: shown.find_elements(By.CSS_SELECTOR, "#curves .hoverlayer .hovertext")
    )
    text = " ".join(label.text for label in labels).replace("\n", " ")
    assert "clipped-1" in text
    assert "validation loss 3.6" in text
    assert "step 20, 20,480 tokens, 5 s" in text


@pytest.mark.slow
def test_dragging_zooms_all_charts_along(page: webdriver.Chrome) -> None:
    first, last = curves(page, "chart._fullLayout.xaxis.range")
    chart = page.find_element(By.CSS_SELECTOR, "#curves .nsewdrag[data-subplot='xy']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    chain = ActionChains(page).move_to_element_with_offset(chart, -150, 0).click_and_hold()
    chain.move_by_offset(100, 3).move_by_offset(150, 0).release().perform()

    def zoomed(shown: webdriver.Chrome) -> bool:
        upper, lower = curves(shown, "[chart._fullLayout.xaxis.range, chart._fullLayout.xaxis4.range]")
        return bool(upper == lower and upper[1] - upper[0] < 0.5 * (last - first))

    WebDriverWait(page, 20).until(zoomed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("button", "title", "last"), [("tokens", "tokens", 20480), ("time", "training time (seconds)", 5)]
)
def test_buttons_switch_the_axis(page: webdriver.Chrome, button: str, title: str, last: float) -> None:
    buttons = page.find_elements(By.CSS_SELECTOR, "#curves .updatemenu-button")
    next(element for element in buttons if element.text == button).click()
    WebDriverWait(page, 20).until(lambda shown: curves(shown, "chart.layout.xaxis4.title.text") == title)
    assert curves(page, "chart.data[0].x.at(-1)") == last
    low, high = curves(page, "chart._fullLayout.xaxis4.range")
    assert low <= 0
    assert last <= high <= 2.5 * last
