"""report: the pages of ladders and runs, written again from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optrush.errors import ConfigError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of ladders and of runs")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="of several folders; report.html if not given")
    ] = None,
) -> None:
    """Write report.html from the records.

    One folder: its own page and charts are written again in place. Several folders: one page that compares them,
    ladders rung by rung and each training run in a row. A page needs no network and holds no script.
    """
    from optrush.report import bench as pages

    kinds = [pages.kind(folder) for folder in folders]
    if len(folders) == 1:
        if out is not None:
            raise ConfigError(f"--out {out}", "one folder: its report lies in it", "leave --out out, or name several")
        folder = folders[0]
        (pages.write_bench if kinds[0] == "bench" else pages.write_run)(folder)
        print(folder / pages.PAGE)
        return
    page = Path(pages.PAGE) if out is None else out
    if page.suffix != ".html" or page.is_dir():
        raise ConfigError(f"--out {page}", "no name of a page", "end it in .html")
    if not page.absolute().parent.is_dir():
        raise ConfigError(f"--out {page}", f"no folder {page.parent}", "make it first, or take another")
    pages.write_many(folders, page)
    print(page)
