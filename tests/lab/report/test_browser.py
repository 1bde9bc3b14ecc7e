"""The report in a real browser."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.report.browser import Tab, browser, executable
from tests.lab.report.folders import NAN, write_run

from ocnopt.lab.report import write_report
from ocnopt.lab.report.palette import PAPER

SIZES = """[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect())
    .filter(box => !(box.width > 0 && box.height > 0)).length"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at once: names without a place to break them, divergence, many learning rates, feedback."""
    folder = tmp_path_factory.mktemp("runs")
    noise = random.Random(0)
    labels = ("OCNOpt", "OCNOpt curvature=kronecker", "SGDm", "Adam", "x" * 120, "<i>&amp;")
    for i, label in enumerate(labels):
        for lr in (0.001, 0.01, 0.1, 1.0):
            for seed in range(2):
                losses = [2.3 * math.exp(-0.02 * step * (1 + i)) + 0.01 + 0.05 * noise.random() for step in range(40)]
                lost = label == "SGDm" and lr == 1
                write_run(
                    folder / f"{i}-{lr}-{seed}-{'run' * 30}",
                    label=label,
                    lr=lr,
                    seed=seed,
                    data={"name": "DIGITS" * 20},
                    accuracy=None if lost else 0.9 + 0.01 * i - 0.03 * abs(math.log10(lr) + 2) + 0.01 * noise.random(),
                    losses=[*losses[:10], *[NAN] * 10] if lost else losses,
                    diverged=lost,
                    layers=label.startswith("OCNOpt"),
                    environment={"torch": "2.13.0", "command": "ocnopt compare --out " + "very-long-path/" * 30},
                )
    return write_report(sorted(folder.iterdir()), folder.parent / "report.html", title="Everything" * 30)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    program = executable()
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with browser(program) as tab:
        yield tab


@pytest.mark.parametrize("width", [320, 375, 800, 1280])
def test_fits_the_screen_and_shows_every_chart(tab: Tab, page: Path, width: int) -> None:
    tab.resize(width, 800)
    tab.emulate("light")
    tab.open(page)
    tab.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert tab.evaluate(OVERFLOW) == 0
    assert tab.evaluate("document.querySelectorAll('.chart svg').length") == 5
    hidden = "document.querySelectorAll('.whisker svg').length" if width < 640 else "0"  # phones do without them
    assert tab.evaluate(SIZES) == tab.evaluate(hidden)
    assert tab.problems() == []
    assert tab.requests() == [page.as_uri()]


def test_text_in_charts_is_large_enough_on_a_phone(tab: Tab, page: Path) -> None:
    tab.resize(375, 800)
    tab.open(page)
    heights = tab.evaluate("[...document.querySelectorAll('.chart text')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 10


def test_labels_stay_within_their_charts(tab: Tab, page: Path) -> None:
    tab.resize(1280, 800)
    tab.open(page)
    beyond = """[...document.querySelectorAll('.chart text')].filter(e => {
        const box = e.getBoundingClientRect(), frame = e.ownerSVGElement.getBoundingClientRect();
        return box.right > frame.right + 1 || box.left < frame.left - 1 || box.bottom > frame.bottom + 1;
    }).map(e => e.textContent)"""
    assert tab.evaluate(beyond) == []


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize(
    ("scheme", "media", "expected"),
    [("light", "", "light"), ("dark", "", "dark"), ("dark", "print", "light")],
)
def test_follows_the_colour_scheme_and_prints_light(
    tab: Tab, page: Path, scheme: str, media: str, expected: str
) -> None:
    tab.emulate(scheme, media)
    tab.open(page)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == rgb(PAPER[expected])
    lines = "new Set([...document.querySelectorAll('.series path')].map(e => getComputedStyle(e).stroke)).size"
    assert tab.evaluate(lines) == 6


def test_muted_text_can_be_read(tab: Tab, page: Path) -> None:
    """All text, whatever its class, has a contrast of at least 4.5 with the page."""
    contrast = """(() => {
        const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], .05);
        const paper = light(getComputedStyle(document.body).backgroundColor);
        return Math.min(...[...document.querySelectorAll('body *')].map(e => {
            const style = getComputedStyle(e), ink = light(e.tagName === 'text' ? style.fill : style.color);
            return Math.max(ink, paper) / Math.min(ink, paper);
        }));
    })()"""
    for scheme in ("light", "dark"):
        tab.emulate(scheme)
        tab.open(page)
        assert tab.evaluate(contrast) >= 4.5


def test_markup_in_names_is_shown_as_written(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.evaluate("document.querySelectorAll('i').length") == 0
    names = "[...document.querySelectorAll('.summary tbody th[scope=row]')].map(e => e.textContent)"
    assert "<i>&amp;" in tab.evaluate(names)


def test_prints(tab: Tab, page: Path) -> None:
    tab.emulate("light")
    tab.open(page)
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF")
    assert 3 <= pdf.count(b"/Type /Page\n") <= 20


def test_a_table_of_numbers_stays_on_one_sheet(tab: Tab, page: Path) -> None:
    tab.emulate("light", "print")
    tab.open(page)
    assert tab.evaluate("getComputedStyle(document.querySelector('.task-page details')).breakInside") == "avoid"
