"""Files of a job that runs in Ray's copy of its working directory."""

from pathlib import Path

from hotseat.config import loads
from hotseat.loop.start import check_job_directory

COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0123")


def test_relative_paths_in_rays_copy_are_noted():
    config = loads("{checkpoint: {path: ./ckpt, export_path: /models/new}}")
    [note] = check_job_directory(config, COPY)
    assert note.startswith(f"run_dir runs, checkpoint.path ./ckpt: relative to {COPY}, Ray's copy")
    assert note.endswith("give absolute paths to keep them")


def test_absolute_paths_and_other_directories_are_not(tmp_path):
    config = loads("{run_dir: /runs, checkpoint: {path: /ckpt}}")
    assert check_job_directory(config, COPY) == []
    assert check_job_directory(loads(""), tmp_path) == []
