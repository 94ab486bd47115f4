"""The plots: what they draw of results, and that every line, point and cell can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_results import results

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from oasis_eval.plots import bench, depth, everything, needles, scores
from oasis_eval.plots.style import OF_INDEX, looks
from oasis_hf.cli import app

ABOUT = {"model": "some-model", "dtype": "float32", "text": "prose", "config": {"samples": 4}}


def cell(arm: str, mean: float, **more: Any) -> dict[str, Any]:
    """A cell of scores."""
    shared = {"task": "niah_single_2", "context": 512, "arm": arm, "mean": mean}
    return shared | {"low": mean, "high": mean, "hbm_bytes": 1e6, "bytes_per_step": 0.0} | more


# ---- lines that can be told apart ----------------------------------------------------------------


def test_lines_differ_by_marker_and_width_and_stand_aside() -> None:
    names = ["keys2bit/fetch", "keys2bit/skip", "minmax/fetch", "my.module:Index/fetch"]
    found = looks(names)
    for what in ("marker", "width", "shift"):
        assert len({getattr(look, what) for look in found.values()}) == len(names)
    assert sum(look.shift for look in found.values()) == pytest.approx(0)
    assert found["keys2bit/fetch"].colour == found["keys2bit/skip"].colour == OF_INDEX["keys2bit"]
    assert found["keys2bit/fetch"].dashes != found["keys2bit/skip"].dashes


def test_lines_of_one_index_and_policy_have_dashes_of_their_own() -> None:
    names = ["keys2bit/fetch", "keys2bit/skip/block_size=8", "keys2bit/fetch/block_size=8"]
    names += ["keys2bit/fetch/block_size=4", "minmax/fetch"]
    found = [(look.colour, str(look.dashes)) for look in looks(names).values()]
    assert len(set(found)) == len(names)


def test_curves_that_coincide_have_points_of_their_own() -> None:
    arms = ("keys2bit/fetch/64", "keys2bit/fetch/128", "oracle/fetch/64", "oracle/fetch/128")
    (axes,) = scores.over_budget(ABOUT, [cell(arm, 1.0) for arm in arms]).axes
    drawn = {tuple(container[0].get_xdata()) for container in axes.containers}
    assert len(drawn) == 2
    for points in drawn:
        for point, budget in zip(points, (64, 128), strict=True):
            assert point == pytest.approx(budget, rel=0.05)


# ---- the cost ----------------------------------------------------------------------------------


def test_points_of_the_cost_carry_their_budgets() -> None:
    cells = [cell("dense", 1.0), cell("keys2bit/fetch/64", 0.5), cell("keys2bit/fetch/2048", 0.9)]
    for axes in scores.over_cost(ABOUT, cells).axes:
        assert sorted(text.get_text() for text in axes.texts) == ["2,048", "64"]


def test_no_marker_of_the_cost_is_cut_at_an_edge() -> None:
    """Points at nothing moved and nothing right, where an axis would cut them in half."""
    cells = [cell("dense", 1.0), cell("keys2bit/fetch/64", 0.0), cell("minmax/fetch/64", 1.0)]
    for axes in scores.over_cost(ABOUT, cells).axes:
        for line in axes.lines:
            assert not line.get_clip_on()
            box, radius = axes.bbox, line.get_markersize() * axes.figure.dpi / 72 / 2
            for x, y in axes.transData.transform(line.get_xydata()):
                assert box.x0 <= x - radius and x + radius <= box.x1
                assert box.y0 <= y - radius and y + radius <= box.y1


def test_words_at_points_that_are_near_do_not_cover_each_other() -> None:
    near = [cell(f"keys2bit/fetch/{b}", 0.5, hbm_bytes=1e6 + b) for b in (64, 128, 256)]
    figure = scores.over_cost(ABOUT, [*near, cell("dense", 1.0, hbm_bytes=9e6)])
    left, _ = figure.axes
    boxes = [text.get_window_extent() for text in left.texts]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[n + 1 :])


# ---- the depth ---------------------------------------------------------------------------------


def needle(arm: str, place: float, score: float) -> dict[str, Any]:
    """A record of one needle."""
    return {"task": "t", "context": 512, "arm": arm, "depths": [place], "score": score}


def test_cells_of_the_depth_have_numbers_and_empty_ones_say_so() -> None:
    records = [needle("dense", 0.1, 1.0), needle("dense", 0.15, 0.0), needle("dense", 0.9, 1.0)]
    assert depth.grid(records, ["dense"]) == [[50, None, None, None, 100]]
    axes = depth.by_depth(ABOUT, records).axes[0]
    assert [text.get_text() for text in axes.texts] == ["50", "none", "none", "none", "100"]
    assert [patch.get_hatch() for patch in axes.patches] == ["////"] * 3


def test_depths_fall_into_five_bins() -> None:
    assert [depth.depth_bin(place) for place in (0, 0.19, 0.2, 1)] == [0, 0, 1, 4]


def test_the_colours_of_the_depth_get_lighter_all_along() -> None:
    """Red and green of one lightness are the same to many eyes; lightness is not."""
    from matplotlib import colormaps

    shades = colormaps[depth.COLOURS]([n / 20 for n in range(21)])[:, :3]
    light = (shades @ [0.2126, 0.7152, 0.0722]).tolist()
    assert light == sorted(light) and light[-1] - light[0] > 0.6


# ---- the bench and the needles -----------------------------------------------------------------


def test_plots_show_one_policy_and_budget() -> None:
    shown = bench.shown(results())
    assert list(shown) == [
        "oasis, keys2bit, skip",
        "oasis, keys2bit, skip, compiled",
        "DynamicCache",
    ]
    assert bench.sizes_of(shown) == [(1, 130560), (8, 32256), (8, 130560)]


def test_bars_are_as_high_as_the_rows_say() -> None:
    left, right = bench.decoding(results()).axes
    assert [bar.get_height() for bar in left.patches] == [8.5, 8.5, 8.5, 6.0, 7.0, 85.0]
    assert [bar.get_height() for bar in right.patches] == [18.0] * 5 + [34.0]
    assert "ms" in left.get_ylabel() and "GB" in right.get_ylabel()
    assert [text.get_text() for text in left.texts].count("does not fit") == 2
    assert [label.get_text() for label in left.get_xticklabels()] == [
        "B1, 128K",
        "B8, 32K",
        "B8, 128K",
    ]


def test_throughput_is_drawn_over_batch() -> None:
    (axes,) = bench.throughput(results()).axes
    lines = [[round(x) for x in drawn.get_xdata()] for drawn in axes.lines]
    assert [1, 8] in lines and [8] in lines
    assert "tokens per second" in axes.get_ylabel()


def test_needles_have_a_panel_per_context_and_a_line_per_index() -> None:
    found = [
        {"context": c, "index": i, "on_miss": m, "budget": b, "hits": b // 64, "of": 16}
        for c in (4096, 8192)
        for i in ("keys2bit", "minmax")
        for m in ("fetch", "skip")
        for b in (256, 128)
    ]
    panels = needles.needles({"cells": found, "about": ABOUT}).axes
    assert [panel.get_title()[:5] for panel in panels] == ["4,096", "8,192"]
    for panel in panels:
        *drawn, dense = panel.lines
        assert [list(map(float, one.get_ydata())) for one in drawn] == [[2.0, 4.0]] * 2
        assert list(dense.get_ydata()) == [16, 16]


# ---- files -------------------------------------------------------------------------------------


def test_the_same_results_draw_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench.json").write_text(json.dumps(results()))
    drawn = []
    for name in ("one", "two"):
        files = everything.draw_all(tmp_path / "results", tmp_path / name)
        drawn.append({file.name: file.read_bytes() for file in files})
    assert set(drawn[0]) == {"decoding.svg", "throughput.svg"}
    assert drawn[0] == drawn[1]


def test_the_command_draws_results_and_says_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(results()))
    words = ["plots", "--results", str(tmp_path), "--out", str(tmp_path / "out"), "--kind", "png"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0 and (tmp_path / "out" / "plots" / "decoding.png").exists()
    ran = CliRunner().invoke(app, ["plots", "--results", str(tmp_path / "out")])
    assert ran.exit_code == 2 and "holds no results" in ran.output
