"""Compile caches are in the user's cache directory, unless the user says where."""

from hotseat.caches import FOLDERS, keep_compiled


def test_caches_are_in_the_users_cache_directory(tmp_path):
    environment = {"HOME": str(tmp_path)}
    keep_compiled(environment)
    folder = tmp_path / ".cache" / "hotseat"
    assert {name: environment[name] for name in FOLDERS} == {name: str(folder / FOLDERS[name]) for name in FOLDERS}
    elsewhere = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg"), "TRITON_CACHE_DIR": "/mine"}
    keep_compiled(elsewhere)
    assert elsewhere["TRITON_CACHE_DIR"] == "/mine"
    assert elsewhere["VLLM_CACHE_ROOT"] == str(tmp_path / "xdg" / "hotseat" / "vllm")


def test_compilers_keep_their_defaults_where_no_directory_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "file")}
    keep_compiled(environment)
    assert not set(FOLDERS) & set(environment)
