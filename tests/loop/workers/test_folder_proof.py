"""Ranks prove that they see the folder in which their checkpoints are made."""

import socket
import threading

import pytest

from hotseat.errors import RunError
from hotseat.loop.workers.folder_proof import FolderProof, witness


def test_ranks_that_see_the_folder_are_answered_and_nothing_is_left_of_it(tmp_path):
    with witness(tmp_path / "run") as proof:
        ranks = [
            threading.Thread(target=proof.of(role).give, args=(rank,))
            for role in ("actor", "critic")
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            assert not rank.is_alive()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_rank_on_another_disk_is_named_with_its_node_and_the_folder(tmp_path):
    with witness(tmp_path / "driver"):
        elsewhere = FolderProof(str(tmp_path / "rank"), "proof", appears_s=0.05)
        with pytest.raises(RunError) as caught:
            elsewhere.give(3)
    text = str(caught.value)
    assert f"actor rank 3 on {socket.gethostname()} does not see the folder {tmp_path / 'rank'}" in text
    assert "put run_dir, or checkpoint.path, on a disk that all nodes share" in text


def test_a_rank_whose_files_do_not_reach_the_driver_is_named(tmp_path):
    """As on an overlay, which shows what was there and keeps what is written to itself."""
    with witness(tmp_path / "driver") as proof:
        (tmp_path / "rank" / proof.name).mkdir(parents=True)
        elsewhere = FolderProof(str(tmp_path / "rank"), proof.name, "critic", answer_s=0.1)
        with pytest.raises(RunError, match=rf"critic rank 1 on .* writes to a folder {tmp_path / 'rank'} that is not"):
            elsewhere.give(1)


def test_what_an_earlier_run_left_is_no_answer(tmp_path):
    place = tmp_path / "proof"
    place.mkdir()
    for name in ("actor-0", "actor-0.seen"):
        (place / name).write_text("word of a run that was killed")
    with pytest.raises(RunError, match="is not the one in which this run makes its checkpoints"):
        FolderProof(str(tmp_path), "proof", answer_s=0.1).give(0)
    with witness(tmp_path, "proof") as proof:
        proof.give(0)
