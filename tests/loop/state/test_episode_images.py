"""Images of episodes after a run has ended well: what something refers to stays."""

import pickle
from pathlib import Path

from hotseat.loop.state.run_dir import EPISODE_IMAGES, remove_unneeded_images

NAMES = {name: digit * 40 for name, digit in zip(("resumed", "kept", "shown", "alone", "canary"), "abcde", strict=True)}


def write(run_dir: Path) -> dict[str, str]:
    """Write images, and files of a run that refer to all of them but one."""
    images = run_dir / EPISODE_IMAGES
    images.mkdir(parents=True)
    for name in NAMES.values():
        (images / f"{name}.safetensors").write_bytes(b"pixels")
        (images / f"{name}.png").write_bytes(b"thumbnail")
    return {name: str(images / f"{digest}.safetensors") for name, digest in NAMES.items()}


def remaining(run_dir: Path) -> list[tuple[str, str]]:
    names = {digest: name for name, digest in NAMES.items()}
    return sorted((names[file.stem], file.suffix) for file in (run_dir / EPISODE_IMAGES).iterdir())


def test_images_that_a_checkpoint_or_a_kept_rollout_needs_stay_and_thumbnails_of_the_report(tmp_path):
    run_dir, checkpoints = tmp_path / "run", tmp_path / "elsewhere"
    paths = write(run_dir)
    spool, rollouts = checkpoints / "step-000002" / "spool", run_dir / "rollouts"
    for folder in (spool, rollouts):
        folder.mkdir(parents=True)
    (spool / "0-1").write_bytes(pickle.dumps((1, [("tokens", (paths["resumed"],))], b"\n" * 9), protocol=5))
    (checkpoints / "step-000002" / "state.json").write_text(f'{{"canary": ["{paths["canary"]}"]}}')
    (rollouts / "0-2").write_bytes(pickle.dumps({"images": [paths["kept"]]}, protocol=5))
    (run_dir / "samples.jsonl").write_text(f'{{"images": ["{paths["shown"]}"]}}\n')
    assert remove_unneeded_images(run_dir, checkpoints) == 3
    whole = [(name, suffix) for name in ("canary", "kept", "resumed") for suffix in (".png", ".safetensors")]
    assert remaining(run_dir) == [*whole, ("shown", ".png")]
    assert remove_unneeded_images(run_dir, checkpoints) == 0


def test_a_run_whose_images_nothing_needs_keeps_no_folder_and_one_without_images_is_left_alone(tmp_path):
    write(tmp_path / "run")
    assert remove_unneeded_images(tmp_path / "run", tmp_path / "checkpoints") == 2 * len(NAMES)
    assert not (tmp_path / "run" / EPISODE_IMAGES).exists()
    assert remove_unneeded_images(tmp_path / "run", tmp_path / "checkpoints") == 0


def test_what_is_not_named_by_a_digest_is_left_alone(tmp_path):
    """Data of a run below this one's directory may lie beside its images."""
    write(tmp_path / "run")
    folder = tmp_path / "run" / EPISODE_IMAGES
    (folder / "largest-0123456789abcdef.safetensors").write_bytes(b"pixels")
    (folder / "notes").mkdir()
    assert remove_unneeded_images(tmp_path / "run", tmp_path / "checkpoints") == 2 * len(NAMES)
    assert sorted(file.name for file in folder.iterdir()) == ["largest-0123456789abcdef.safetensors", "notes"]
