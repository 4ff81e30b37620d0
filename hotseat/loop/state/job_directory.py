"""Files of a run that was started by `ray job submit` with a working directory."""

from __future__ import annotations

from pathlib import Path

from hotseat.config import Config

# Below Ray's temporary directory: copies of the working directories of jobs. A copy goes when no job uses it.
_COPIES = "runtime_resources/working_dir_files"


def check_job_directory(config: Config, directory: Path) -> list[str]:
    """Return a note if files of the run would go into Ray's copy of a job's working directory, which Ray deletes.

    directory: the current one, from which relative paths start.
    """
    if f"/{_COPIES}/" not in f"{directory}/":
        return []
    paths = {
        "run_dir": config.run_dir,
        "checkpoint.path": config.checkpoint.path,
        "checkpoint.export_path": config.checkpoint.export_path,
    }
    inside = [f"{key} {path}" for key, path in paths.items() if path and _is_inside(directory / path, directory)]
    if not inside:
        return []
    return [
        f"{', '.join(inside)}: relative to {directory}, Ray's copy of the job's working directory, which Ray may delete"
        " once the job has ended; give absolute paths to keep them"
    ]


def _is_inside(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())
