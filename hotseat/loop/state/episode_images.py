"""Deletes the images that episodes showed, once a run has ended well and nothing refers to them.

They are files in the run's directory, named by digests; those of the data lie beside the runs, and are left alone. What
may refer to one: groups in checkpoints and rollouts that are kept, whose pixels a later run reads, and samples in the
report, which shows the thumbnail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hotseat.loop.state.run_dir import EPISODE_IMAGES, ROLLOUTS, SPOOL
from hotseat.observe import SAMPLES

_PREPARED = ".safetensors"
_THUMBNAIL = ".png"
_NAME = re.compile(rb"([0-9a-f]{40})\.safetensors")  # a path, wherever it stands in JSON
_DIGEST = re.compile(r"[0-9a-f]{40}")
_TENSORS = (_PREPARED, ".pt", ".distcp", ".bin")  # files that name no images, and are large


def remove_unneeded_images(run_dir: Path, checkpoints: Path) -> int:
    """Delete prepared images of a run's episodes that nothing needs any more; return how many files were deleted.

    checkpoints: the folder of the run's checkpoints.
    """
    folder = run_dir / EPISODE_IMAGES
    if not folder.is_dir():
        return 0
    needed = set(_names(_files(checkpoints, run_dir / SPOOL, run_dir / ROLLOUTS)))
    shown = set(_names([run_dir / SAMPLES]))
    num_deleted = 0
    for file in sorted(folder.iterdir()):
        if not _DIGEST.match(file.name):
            continue  # not ours
        is_shown = file.suffix == _THUMBNAIL and file.stem in shown
        if file.stem not in needed and not is_shown:
            file.unlink(missing_ok=True)
            num_deleted += 1
    if not any(folder.iterdir()):
        folder.rmdir()
    return num_deleted


def _files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file() and path.suffix not in _TENSORS)


def _names(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if not file.is_file():
            continue
        with file.open("rb") as lines:
            for line in lines:
                yield from (name.decode() for name in _NAME.findall(line))
