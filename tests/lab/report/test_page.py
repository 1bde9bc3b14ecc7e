"""The page as a file: complete, self-contained, safe whatever the runs are called, readable by a screen reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.lab.report.folders import NAN, Tree, of_class, report, summary, text, write_run

from ocnopt.lab.report import write_report
from ocnopt.lab.report.palette import DARK, INK, LIGHT, PAPER, dash, hue
from ocnopt.lab.runs import RunError, RunFolder

HOSTILE = "<script>alert(1)</script>\"'&amp;</svg></style>--><img src=x onerror=alert(1)>"


def test_no_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs must name at least one run folder"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_folder_without_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nothing-here holds no run"):
        write_report([tmp_path / "nothing-here"], tmp_path / "report.html")


def test_takes_paths_and_run_folders_and_counts_each_once(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", accuracy=0.5), write_run(tmp_path / "b", accuracy=0.7, seed=1)
    out = write_report([first, RunFolder(second), first / ".." / "a"], tmp_path / "new" / "report.html", title="Mine")
    root = Tree(out.read_text("utf-8")).root
    assert out == tmp_path / "new" / "report.html"
    assert summary(root)["Adam"][0] == "60.00 ± 14.14 %"
    assert {text(title) for title in root.iter("h1")} == {"Mine"} == {text(next(root.iter("title")))}


def test_text_stays_text(tmp_path: Path) -> None:
    """Everything that a user can name holds tags; none of them becomes one."""
    options = {"note": HOSTILE, HOSTILE.replace(".", ""): 1}
    for seed in range(2):
        write_run(
            tmp_path / "runs" / f"{seed} <b>&",
            label=HOSTILE,
            seed=seed,
            data={"name": HOSTILE},
            options=options,
            layers=True,
            environment={"command": HOSTILE, HOSTILE: HOSTILE},
        )
    write_run(tmp_path / "runs" / "other", label="Adam", lr=0.3)
    root = report(tmp_path / "runs", title=HOSTILE)
    kinds = {element.tag for element in root.iter()}
    assert not kinds & {"script", "img", "iframe", "object"}
    assert not [key for element in root.iter() for key in element.keys() if key.startswith("on")]  # noqa: SIM118
    assert text(next(root.iter("h1"))) == HOSTILE
    assert HOSTILE in text(of_class(root, "summary")[0])


def test_names_that_are_no_text_do_not_break_the_page(tmp_path: Path) -> None:
    """A file name may hold bytes that are no UTF-8, and control characters."""
    write_run(tmp_path / "runs" / "a\udcff\x01b")
    root = report(tmp_path / "runs", title="\x00\x1b[31m")
    assert "a��b" in text(of_class(root, "runs")[0])


def test_nothing_refers_to_anything_outside(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", layers=True, environment={"command": "curl https://example.org"})
    write_run(tmp_path / "runs" / "b", lr=0.3)
    root = report(tmp_path / "runs")
    links = [v for e in root.iter() for k, v in e.items() if k in ("src", "href", "xlink:href", "srcset", "action")]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    styles = " ".join(v for e in root.iter() for v in e.attrib.values()) + text(next(root.iter("style")))
    assert set(re.findall(r"url\(\s*['\"]?(.)", styles)) == {"#"}
    assert not re.search(r"@import|https?:|//\w", styles)
    assert {e.get("http-equiv"): e.get("content") for e in root.iter("meta")}["Content-Security-Policy"].startswith(
        "default-src 'none'"
    )


def test_sixty_runs_make_a_small_file_with_every_chart(tmp_path: Path) -> None:
    for i in range(60):
        method, lr, seed = i % 10, (0.01, 0.1)[i // 10 % 2], i // 20
        losses = [2.0 / (step + 1 + method) for step in range(400)]
        write_run(
            tmp_path / "runs" / f"{i:02}", label=f"Method {method}", lr=lr, seed=seed, losses=losses, layers=i < 1
        )
    root = report(tmp_path / "runs")
    assert len(summary(root)) == 1 + 1 + 10
    assert len(of_class(root, "chart")) == 5
    assert len(list(of_class(root, "runs")[0].iter("tr"))) == 61
    assert (tmp_path / "report.html").stat().st_size < 400_000


def test_one_run_has_all_curves_and_no_learning_rates_to_compare(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    titles = [text(next(chart.iter("figcaption"))) for chart in of_class(report(tmp_path / "runs"), "chart")]
    assert titles == [
        "Training loss against steps",
        "Test accuracy against steps",
        "Training loss against wall-clock time",
        "Test accuracy against wall-clock time",
    ]


@pytest.mark.parametrize(
    "losses", [[2.0, NAN, NAN, NAN], [NAN] * 4, [2.0, 1e30, float("inf"), NAN], [-1.0, 0.0, 3.0, 1e9]]
)
def test_losses_that_are_no_numbers_are_not_drawn(tmp_path: Path, losses: list[float]) -> None:
    write_run(tmp_path / "runs" / "a", accuracy=None, losses=losses, diverged=True)
    write_run(tmp_path / "runs" / "b", lr=0.01, accuracy=0.6, seed=1)
    root = report(tmp_path / "runs")
    drawn = [element.attrib for svg in root.iter("svg") for element in svg.iter()]
    assert not re.search(
        r"nan|inf", " ".join(v for a in drawn for k, v in a.items() if k in ("d", "x", "y", "cx", "cy"))
    )
    assert summary(root)["Adam"][3] == "1 of 2"


@pytest.mark.parametrize("losses", [[2.0, 1.0, 0.5, 0.25], [2.0, 1.0, 0.0, -1.0]], ids=["log", "linear"])
def test_a_loss_that_blows_up_does_not_flatten_the_others(tmp_path: Path, losses: list[float]) -> None:
    write_run(tmp_path / "runs" / "a", losses=losses)
    write_run(tmp_path / "runs" / "b", label="SGDm", losses=[2.0, 1e5, 1e15, 1e20], diverged=True)
    chart = of_class(report(tmp_path / "runs"), "chart")[0]
    upright = [text(tick) for tick in of_class(chart, "end")]
    assert max(float(tick.replace("−", "-")) for tick in upright) <= 12


def test_a_half_written_line_is_no_obstacle(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "a", finished=False)
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind":"final","test_acc')
    assert summary(report(tmp_path / "runs"))["Adam"][0] == "–"


def test_pictures_and_tables_can_be_read_aloud(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", label="OCNOpt", layers=True, accuracy=0.9)
    write_run(tmp_path / "runs" / "b", label="SGDm", lr=0.3, accuracy=0.8)
    root = report(tmp_path / "runs")
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for svg in root.iter("svg"):
        if svg.get("aria-hidden") != "true" and svg.get("viewbox") != "0 0 100 16":
            assert svg.get("role") == "img"
            assert text(svg[0])
            assert svg[0].tag == "title"
    for chart in of_class(root, "chart"):
        (svg,) = chart.iter("svg")
        named = [element for element in svg.iter() if element.get("id") in svg.get("aria-labelledby", "").split()]
        assert [element.tag for element in named] == ["title", "desc"]
        assert re.search(r"OCNOpt: .*; SGDm: ", text(named[1]))
    said = [text(description) for description in root.iter("desc")]
    assert said[1] == "test accuracy against steps. OCNOpt: 90.00 % after 40 steps; SGDm: 80.00 % after 40 steps."
    assert "SGDm: best 80.00 % at learning rate 0.3" in said[4]
    for table in root.iter("table"):
        assert {cell.get("scope") for cell in table.iter("th")} <= {"col", "row", "rowgroup"}
    assert root.get("lang") == "en"


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("scheme", "hues"), [("light", LIGHT), ("dark", DARK)])
def test_colours_stand_out(scheme: str, hues: tuple[str, ...]) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert min(contrast(value, PAPER[scheme]) for value in hues) >= 3
    assert contrast(INK[scheme], PAPER[scheme]) >= 7


def test_methods_differ_in_more_than_their_colour() -> None:
    assert len({dash(i) for i in range(8)}) == 8
    assert len({(hue(i), dash(i)) for i in range(64)}) == 64
