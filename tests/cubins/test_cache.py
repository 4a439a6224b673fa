"""The store: what it gives back, and what it refuses to."""

import dataclasses
import os
import stat

import pytest

from jax_fa4.cubins import cache
from jax_fa4.cubins.cache import Store


@pytest.fixture
def store(folder):
    return Store(folder=folder)


@pytest.fixture
def path(store, cubin):
    """Of a stored cubin."""
    store.put(cubin)
    return store.folder / f"{cubin.key}.cubin"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_cubin_comes_back(store, cubin):
    assert store.get(cubin.key) is None
    store.put(cubin)
    assert store.get(cubin.key) == cubin


def test_only_the_user_may_enter_what_it_makes(store, path):
    assert mode_of(store.folder) == 0o700
    assert mode_of(path) == 0o600


def test_nothing_but_cubins_is_left_behind(store, path):
    assert list(store.folder.iterdir()) == [path]


def test_the_lock_is_the_users_alone(store, cubin):
    with store.lock(cubin.key):
        assert mode_of(store.folder / f"{cubin.key}.lock") == 0o600


def use(store, cubin):
    """Everything that can be done with a store which gives and takes nothing, twice."""
    for _ in range(2):
        assert store.get(cubin.key) is None
        assert store.entries() == []
        with store.lock(cubin.key):
            store.put(cubin)


DAMAGES = {
    "a changed byte": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "a lost end": lambda data: data[: len(data) // 2],
    "no content": lambda data: b"",
    "other content": lambda data: b"\x7fELF" + bytes(1000),
    "another version": lambda data: data[:8] + b"\xff" + data[9:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_counts_as_absent(store, cubin, path, damage):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"ignoring the cached kernel {path}: "):
        assert store.get(cubin.key) is None


def test_the_kernel_of_another_key_counts_as_absent(store, cubin, path):
    path.rename(store.folder / f"{'a' * 64}.cubin")
    with pytest.warns(RuntimeWarning, match=f"holds the kernel of another key, {cubin.key}"):
        assert store.get("a" * 64) is None


def test_a_damaged_file_is_replaced(store, cubin, path):
    path.write_bytes(b"")
    store.put(cubin)
    assert store.get(cubin.key) == cubin


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_counts_as_absent(store, cubin, path, kind):
    real = path.rename(store.folder / "elsewhere")
    {"link": lambda: path.symlink_to(real), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.warns(RuntimeWarning, match="ignoring the cached kernel"):
        assert store.get(cubin.key) is None


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666], ids=oct)
def test_a_file_that_others_may_write_is_not_run(store, cubin, path, mode):
    path.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"other users may write it, its mode is {mode:o}"):
        assert store.get(cubin.key) is None


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702], ids=oct)
def test_a_folder_that_others_may_write_is_not_used(store, cubin, path, mode):
    store.folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"stay in memory: other users may write it.*\(chmod go-w\)") as warned:
        use(store, cubin)
    assert len(warned) == 1
    assert list(store.folder.iterdir()) == [path]


def test_a_folder_that_others_may_read_is_used(store, cubin, path):
    store.folder.chmod(0o755)
    path.chmod(0o644)
    assert store.get(cubin.key) == cubin


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["folder", "file"])
def test_what_somebody_else_owns_is_not_run(store, cubin, path, whose):
    os.chown(path if whose == "file" else store.folder, 12345, -1)
    with pytest.warns(RuntimeWarning, match="user 12345 owns it, this process runs as user 0"):
        assert store.get(cubin.key) is None


def test_what_root_owns_is_run(store, cubin, path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid or 1000)
    assert store.get(cubin.key) == cubin


def test_a_link_to_a_folder_is_judged_by_the_folder(store, cubin, path, tmp_path):
    link = Store(folder=tmp_path / "link")
    link.folder.symlink_to(store.folder)
    assert link.get(cubin.key) == cubin
    store.folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users may write it"):
        assert link.get(cubin.key) is None


def test_a_place_that_cannot_be_a_folder_costs_one_warning(cubin, tmp_path):
    (tmp_path / "file").touch()
    store = Store(folder=tmp_path / "file" / "cache")
    with pytest.warns(
        RuntimeWarning, match=f"{store.folder} and stay in memory: Not a directory; JAX_FA4_CACHE_DIR"
    ) as warned:
        use(store, cubin)
    assert len(warned) == 1


def test_a_full_disk_costs_one_warning_and_no_litter(store, cubin, monkeypatch):
    def no_space(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        store.put(cubin)
    assert list(store.folder.iterdir()) == []


def test_a_shipped_set_is_trusted_as_the_package_is(cubin, store, path):
    store.folder.chmod(0o777)
    path.chmod(0o666)
    assert Store(folder=store.folder, shipped=True).get(cubin.key) == cubin


def test_a_recipe_is_found_whatever_compiler_made_it(store, cubin):
    store.put(cubin)
    assert store.find(cubin.recipe) == cubin
    assert store.find("f" * 64) is None


def test_of_several_compilers_the_newest_is_found(store, cubin):
    for digit, version in (("1", "4.8.2"), ("2", "4.8.10"), ("3", "4.8.9")):
        store.put(dataclasses.replace(cubin, key=digit * 64, dsl_version=version))
    assert store.find(cubin.recipe).dsl_version == "4.8.10"


def test_a_damaged_file_does_not_hide_a_good_one(store, cubin):
    for digit, version in (("1", "4.8.2"), ("2", "4.8.1")):
        store.put(dataclasses.replace(cubin, key=digit * 64, dsl_version=version))
    newest = store.folder / f"{'1' * 64}.cubin"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="ignoring"):
        assert store.find(cubin.recipe).dsl_version == "4.8.1"


def test_files_of_others_are_listed_or_passed_over_but_never_fatal(store, cubin, path):
    (store.folder / "notes.txt").write_text("text")
    (store.folder / f"{'b' * 64}.cubin").write_bytes(b"foreign")
    listed = {entry.path.name: entry.metadata for entry in store.entries()}
    assert listed.pop(path.name)["arch"] == "sm_90a"
    assert listed == {f"{'b' * 64}.cubin": None}
    assert store.find(cubin.recipe) == cubin


def test_clearing_removes_our_files_and_no_others(store, cubin, path):
    with store.lock(cubin.key):
        pass
    (store.folder / f"{cubin.key}-x1_y2.tmp").write_bytes(b"123")  # of a writer that was killed
    (store.folder / "notes.txt").write_text("text")
    (store.folder / "model.cubin").write_text("somebody's")
    assert store.clear() == (3, len(cubin.to_bytes()) + 3)
    assert sorted(p.name for p in store.folder.iterdir()) == ["model.cubin", "notes.txt"]


def test_clearing_nothing_is_fine(store):
    assert store.clear() == (0, 0)
    assert not store.folder.exists()


def test_the_place_is_read_from_the_environment_at_each_call(tmp_path, monkeypatch):
    for name in ("a", "b"):
        monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path / name))
        assert cache.user_store().folder == tmp_path / name


def test_the_home_of_nobody_is_no_place(monkeypatch):
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", "~nobody-has-this-name/cache")
    with pytest.raises(ValueError, match=r"^JAX_FA4_CACHE_DIR must .*: no such user"):
        cache.user_store()


def test_a_file_that_goes_while_the_folder_is_listed_is_left_out(store, path, monkeypatch):
    monkeypatch.setattr(type(path), "iterdir", lambda folder: [path, folder / f"{'d' * 64}.cubin"])
    assert [entry.path for entry in store.entries()] == [path]


def test_without_a_chosen_place_it_is_the_platforms(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_FA4_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.user_store().folder.name == "jax_fa4"
