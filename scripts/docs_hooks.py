"""What `mkdocs build` adds to docs/: the README as the first page, the repository's
other pages, and charts of benchmarks/results/.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
import figures  # noqa: E402
import release  # noqa: E402
from stale import origin  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the repository's root that are part of the site, by the name there."""
BLUE, ORANGE, GREY = "#2a6f97", "#e07b1a", "#8fa3b3"


TRAININGS = {"demo": "8 problems", "epochs": "100 problems"}


def _trainings() -> Iterator[tuple[str, list[float]]]:
    """Yield for each training of the README its name with the processor, and its
    rollout time by epoch relative to the run with speculation off.
    """
    for name, title in TRAININGS.items():
        for file in (f"{name}.json", f"{name}_intel.json"):
            processor = figures.processor(origin(figures.result(file)))
            yield f"{title} ({processor})", figures.by_epoch(file)


EPOCHS = dict(_trainings())
"""Rollout time by epoch relative to the run with speculation off, of the trainings that
the README shows.
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the charts."""
    for name, on_site in PAGES.items():
        content = _of_site((ROOT / name).read_text(), config.repo_url)
        files.append(File.generated(config, on_site, content=content))
    for name, draw in CHARTS.items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=_svg(draw)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to the repository's own pages lead to them on the site."""
    return re.sub(
        rf"\]\(\.\./({'|'.join(map(re.escape, PAGES))})",
        lambda link: f"]({PAGES[link[1]]}",
        markdown,
    )


def _of_site(text: str, address: str | None) -> str:
    """Return a page of the repository's root with links as they are on the site, and
    the repository's address where it is known.
    """
    if address:
        text = text.replace(release.PLACEHOLDER, address)
    return re.sub(r"\]\(docs/", "](", text)


def epochs() -> bytes:
    """Return the picture of the README, docs/pictures/chart_epochs.svg, with its
    figures as the description.
    """
    return _svg(_epochs, json.dumps(EPOCHS))


def _svg(draw: Any, description: str | None = None) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "das-adapter"
    from matplotlib import pyplot

    picture, axis = pyplot.subplots(figsize=(7.5, 3.8), layout="constrained")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e3e8ec")
    axis.set_axisbelow(True)
    draw(axis)
    buffer = io.BytesIO()
    picture.savefig(
        buffer, format="svg", metadata={"Date": None, "Description": description}
    )
    pyplot.close(picture)
    return buffer.getvalue()


def _epochs(axis: Any) -> None:
    axis.axhline(1, color=GREY)
    axis.annotate("without speculation", (1.05, 1.02), color=GREY)
    styles = itertools.product((BLUE, ORANGE), ("o-", "o--"))
    for (label, ratios), (colour, line) in zip(EPOCHS.items(), styles, strict=True):
        places = range(1, len(ratios) + 1)
        axis.plot(places, ratios, line, color=colour, label=label)
    axis.set(xlabel="epoch", ylabel="rollout time, relative", ylim=(0, 1.15))
    axis.legend(frameon=False, loc="lower left")


def _drafters(axis: Any) -> None:
    colours = {
        "history": ORANGE,
        "self:int4": "#7a5195",
        "draft_model": GREY,
        "eagle3": "#b3261e",
        "history+self": BLUE,
        "history+eagle3": "#2f8f6b",
    }
    ratios = figures.drafters()
    cells = [cell for cell in ratios["history"] if cell.startswith("256/")]
    for arm, colour in colours.items():
        axis.plot(
            range(len(cells)),
            [ratios[arm][cell] for cell in cells],
            "o-",
            color=colour,
            label=arm,
        )
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set_xticks(range(len(cells)), [cell.partition("/")[2] for cell in cells])
    axis.set(
        xlabel="requests in the batch", ylabel="rollout time, of off", ylim=(0, 1.2)
    )
    axis.legend(frameon=False, ncols=2)


def _controller(axis: Any) -> None:
    rollouts = figures.result("controller.json")["rollouts"]
    arms = {"optimal": ORANGE, "k1": "#c3d4df", "k3": "#7fa8c1", "k7": BLUE}
    for name, colour in arms.items():
        ratios = [
            r["arms"][name]["seconds"] / r["arms"]["idle"]["seconds"]
            for r in rollouts.values()
        ]
        label = (
            "the controller"
            if name == "optimal"
            else f"{name[1:]} draft tokens for each"
        )
        axis.plot(
            list(rollouts),
            ratios,
            "o-",
            color=colour,
            label=label,
            linewidth=3 if name == "optimal" else 1.5,
        )
    axis.set(
        xlabel="requests at the start", ylabel="time, of no drafts", ylim=(0, 1.15)
    )
    axis.legend(frameon=False)


CHARTS = {"chart_drafters": _drafters, "chart_controller": _controller}
