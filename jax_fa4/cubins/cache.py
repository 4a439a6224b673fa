"""Cubins on disk: folders of `<key>.cubin` files, and who may have written them.

A cubin runs with the rights of the process, so a folder or file is used only if the user or root owns it and nobody
else may write it; whatever a file's name, the key inside must be the one asked for. Files appear by renaming, so
readers need no lock. The lock of a key only keeps two processes from compiling the same thing at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import stat
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from jax_fa4.cubins.cubin import BadCubinError, Cubin, read_metadata

__all__ = ["DIRECTORY_VARIABLE", "Entry", "Store", "shipped_store", "user_store"]

DIRECTORY_VARIABLE = "JAX_FA4_CACHE_DIR"
LOCK_TIMEOUT_S = 600  # a kernel compiles in seconds: whoever holds its lock this long is stuck, and we go on without
_METADATA_BYTES = 1 << 16  # read of each file when listing
_CUBIN_NAME = re.compile(r"[0-9a-f]{64}\.cubin")
_OUR_NAME = re.compile(r"[0-9a-f]{64}(\.cubin|\.lock|-\w+\.tmp)")
_warned: set[pathlib.Path] = set()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A cubin file as listed. The metadata is unverified, and None where it can't be read."""

    path: pathlib.Path
    size: int  # bytes
    metadata: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """One folder of cubins. What is wrong with it is a warning and an absent cubin, never an exception."""

    folder: pathlib.Path
    shipped: bool = False  # with the installed package: trusted as its code is, and never written

    def get(self, key: str) -> Cubin | None:
        """The verified cubin of this key, or None."""
        path = self.folder / f"{key}.cubin"
        try:
            self._check_folder()
            cubin = Cubin.from_bytes(self._read(path))
            if cubin.key != key:
                raise BadCubinError(f"it holds the kernel of another key, {cubin.key}")
        except FileNotFoundError:
            return None
        except OSError as e:
            self._warn_of_memory(e)
            return None
        except BadCubinError as e:
            _warn_once(path, f"ignoring the cached kernel {path}: {e}")
            return None
        return cubin

    def find(self, recipe: str) -> Cubin | None:
        """The verified cubin that some DSL version made of this recipe (of several, the newest version's), or None."""
        made = [e.metadata for e in self.entries() if e.metadata and e.metadata["recipe"] == recipe]
        made.sort(key=lambda m: [int(n) for n in re.findall(r"\d{1,9}", m["dsl_version"])], reverse=True)
        return next(filter(None, (self.get(m["key"]) for m in made)), None)

    def put(self, cubin: Cubin) -> None:
        """Writes a cubin; where that is impossible, warns once."""
        try:
            self._make_folder()
            file, name = tempfile.mkstemp(prefix=f"{cubin.key}-", suffix=".tmp", dir=self.folder)
            temporary = pathlib.Path(name)
            try:
                with os.fdopen(file, "wb") as stream:
                    stream.write(cubin.to_bytes())
                    stream.flush()
                    os.fsync(stream.fileno())  # else a crash may leave the final name on an empty file
                temporary.replace(self.folder / f"{cubin.key}.cubin")
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as e:
            self._warn_of_memory(e)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Keeps other processes from compiling this key meanwhile; where locking is impossible, warns once."""
        import filelock  # 30 ms that a warm cache never spends

        lock = filelock.FileLock(self.folder / f"{key}.lock", timeout=LOCK_TIMEOUT_S, mode=0o600)
        try:
            self._make_folder()
            lock.acquire()
        except (OSError, NotImplementedError) as e:  # the last from a file system that has no locks
            self._warn_of_memory(e)
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """All cubin files of the folder, by name."""
        try:
            self._check_folder()
            paths = sorted(path for path in self.folder.iterdir() if _CUBIN_NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as e:
            self._warn_of_memory(e)
            return []
        return [entry for path in paths if (entry := self._entry(path))]

    def clear(self) -> tuple[int, int]:
        """Removes the files that this package writes, and no others. Returns (files, bytes) removed.

        Raises OSError where a file can't be removed.
        """
        if not self.folder.is_dir():
            return 0, 0
        ours = [path for path in self.folder.iterdir() if _OUR_NAME.fullmatch(path.name)]
        size = sum(path.lstat().st_size for path in ours)
        for path in ours:
            path.unlink(missing_ok=True)
        return len(ours), size

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_folder()

    def _check_folder(self) -> None:
        """Raises OSError if it is absent, or if others could have put files there."""
        if not self.shipped and (reason := _why_untrusted(self.folder.stat())):
            raise PermissionError(errno.EPERM, reason)

    def _read(self, path: pathlib.Path, size: int = -1) -> bytes:
        """Content of a regular file that nobody but its trusted owner could have written."""
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BadCubinError("it is no regular file")
        with path.open("rb") as stream:
            if not self.shipped and (reason := _why_untrusted(os.fstat(stream.fileno()))):
                raise BadCubinError(reason)
            return stream.read(size)

    def _entry(self, path: pathlib.Path) -> Entry | None:
        try:
            return Entry(path=path, size=path.lstat().st_size, metadata=self._metadata(path))
        except FileNotFoundError:  # another process has cleared the cache meanwhile
            return None

    def _metadata(self, path: pathlib.Path) -> dict[str, Any] | None:
        try:
            return read_metadata(self._read(path, _METADATA_BYTES))
        except (OSError, BadCubinError):
            return None

    def _warn_of_memory(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        _warn_once(
            self.folder,
            f"kernels can't be kept in {self.folder} and stay in memory: {reason}; "
            f"{DIRECTORY_VARIABLE} names another directory",
        )


def user_store() -> Store:
    """The user's own cache, where JAX_FA4_CACHE_DIR says, else where the platform keeps caches.

    Raises ValueError where the variable names the home of a user that there is not.
    """
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        try:
            return Store(folder=pathlib.Path(chosen).expanduser().absolute())
        except RuntimeError:
            raise ValueError(f"{DIRECTORY_VARIABLE} must name a directory, got {chosen!r}: no such user") from None
    import platformdirs  # 20 ms that a chosen directory does not need

    return Store(folder=platformdirs.user_cache_path("jax_fa4", appauthor=False))


def shipped_store() -> Store:
    """The cubins that came with the package; empty in a checkout."""
    return Store(folder=pathlib.Path(__file__).parents[1] / "prebuilt", shipped=True)


def _why_untrusted(status: os.stat_result) -> str | None:
    """None if nobody but this user and root can write the file or folder, else who can."""
    if status.st_uid not in (0, os.geteuid()):
        return f"user {status.st_uid} owns it, this process runs as user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write it, its mode is {stat.S_IMODE(status.st_mode):o} (chmod go-w)"
    return None


def _warn_once(path: pathlib.Path, text: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
