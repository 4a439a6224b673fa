"""From a config to its cubin: memory, disk, the shipped set, the compiler; in this order and once."""

import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jax_fa4.cubins import cache, get, key, lookup
from jax_fa4.cubins.build import Compiler
from jax_fa4.cubins.cache import Store


def refuse(config):
    raise AssertionError("nothing should be compiled")


ABSENT = Compiler(version=None, compile=refuse)


def test_a_config_is_compiled_once(config, stand_in):
    assert get(config, compiler=stand_in.compiler()) is get(config, compiler=stand_in.compiler())
    assert stand_in.count == 1


def test_equal_configs_share_a_cubin(config, stand_in):
    equal = type(config)(**{name: getattr(config, name) for name in config.__dataclass_fields__})
    assert get(equal, compiler=stand_in.compiler()) is get(config, compiler=stand_in.compiler())


def test_another_process_would_find_it_on_disk(config, stand_in, forget):
    first = get(config, compiler=stand_in.compiler())
    forget()
    assert get(config, compiler=Compiler(version="4.8.1", compile=refuse)) == first


def test_configs_do_not_meet(config, other_config, stand_in):
    cubins = [get(c, compiler=stand_in.compiler()) for c in (config, other_config)]
    assert [c.config for c in cubins] == [repr(config), repr(other_config)]
    assert len({c.key for c in cubins}) == 2


def test_another_compiler_compiles_anew(config, stand_in, forget):
    get(config, compiler=stand_in.compiler("4.8.1"))
    forget()
    assert get(config, compiler=stand_in.compiler("4.8.2")).dsl_version == "4.8.2"
    assert stand_in.count == 2


@pytest.mark.parametrize("version", [None, "5.0.0"])
def test_without_a_usable_compiler_any_cubin_of_the_sources_serves(config, stand_in, forget, version):
    built = get(config, compiler=stand_in.compiler("4.8.2"))
    forget()
    assert get(config, compiler=Compiler(version=version, compile=refuse)) == built


def test_the_shipped_set_spares_the_compiler(config, stand_in, forget, monkeypatch, tmp_path):
    built = get(config, compiler=stand_in.compiler())
    forget()
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(cache, "shipped_store", lambda: Store(folder=tmp_path / "cache", shipped=True))
    assert get(config, compiler=ABSENT) == built
    forget()
    assert get(config, compiler=stand_in.compiler("4.8.2")) == built
    assert stand_in.count == 1


def test_a_damaged_entry_is_rebuilt(config, stand_in, folder, forget):
    cubin = get(config, compiler=stand_in.compiler())
    path = folder / f"{cubin.key}.cubin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    forget()
    with pytest.warns(RuntimeWarning, match="ignoring"):
        assert get(config, compiler=stand_in.compiler()).image == cubin.image.replace(b"image 1", b"image 2")
    assert stand_in.count == 2
    assert len(path.read_bytes()) == len(whole)


def test_a_foreign_entry_is_rebuilt(config, other_config, stand_in, folder, forget):
    keys = [get(c, compiler=stand_in.compiler()).key for c in (config, other_config)]
    mine, other = (folder / f"{key}.cubin" for key in keys)
    mine.write_bytes(other.read_bytes())
    forget()
    with pytest.warns(RuntimeWarning, match="another key"):
        assert get(config, compiler=stand_in.compiler()).config == repr(config)
    assert stand_in.count == 3


def test_an_unusable_place_leaves_kernels_in_memory(config, other_config, stand_in, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="Not a directory") as warned:
        cubins = [get(each, compiler=stand_in.compiler()) for each in (config, other_config, config)]
    assert len(warned) == 1
    assert cubins[0] is cubins[2]
    assert stand_in.count == 2


def test_without_compiler_and_cubin_the_error_says_what_to_do(config, folder):
    with pytest.raises(RuntimeError) as error:
        get(config, compiler=ABSENT)
    assert str(error.value) == (
        f"no cubin is stored for {config!r}, and the kernel compiler (nvidia-cutlass-dsl) is not installed: "
        'pip install "jax-fa4[cuda13]"; or lower this program where the compiler is installed '
        "(python -m jax_fa4 build --arch sm_90a makes those of common calls) and bring the files of "
        f"{folder} here"
    )


def test_an_untested_compiler_is_not_run(config):
    with pytest.raises(RuntimeError, match=r"nvidia-cutlass-dsl 4\.9\.0 is installed.*tested with >=4\.8\.1,<4\.9"):
        get(config, compiler=Compiler(version="4.9.0", compile=refuse))


def test_a_failing_compiler_names_the_config(config):
    def fail(config):
        raise ZeroDivisionError("by zero")

    with pytest.raises(RuntimeError, match=r"the kernel compiler failed on KernelConfig.*: by zero") as error:
        get(config, compiler=Compiler(version="4.8.1", compile=fail))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_failure_is_not_remembered(config, stand_in):
    with pytest.raises(RuntimeError):
        get(config, compiler=Compiler(version="4.8.1", compile=refuse))
    assert get(config, compiler=stand_in.compiler()).config == repr(config)


def test_a_kernel_edited_meanwhile_is_not_stored_under_the_old_name(config, stand_in, folder, monkeypatch):
    assert key.sources_digest()
    monkeypatch.setattr(key, "_digest_of_sources", lambda: "edited")
    assert get(config, compiler=stand_in.compiler()).config == repr(config)
    assert not list(folder.glob("*.cubin"))


def test_a_kernel_that_does_not_fit_its_config_is_not_kept(config, other_config, stand_in, folder):
    def confuse(config):
        return stand_in(type(config)(**{**vars(config), "has_left": True}))

    with pytest.raises(ValueError, match="are not those of its config"):
        get(config, compiler=Compiler(version="4.8.1", compile=confuse))
    assert not list(folder.glob("*.cubin"))


def test_the_compiler_keeps_off_stdout(config, stand_in, capsys):
    get(config, compiler=stand_in.compiler())
    assert capsys.readouterr() == ("", "noise of a compiler\n")


def test_threads_compile_once(config, stand_in):
    def slow(config):
        time.sleep(0.05)
        return stand_in(config)

    compiler = Compiler(version="4.8.1", compile=slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(get(config, compiler=compiler))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stand_in.count == 1
    assert len({id(cubin) for cubin in found}) == 1


PROCESS = """
    import pathlib, sys, time
    sys.path.insert(0, sys.argv[2])
    from conftest import StandIn
    from jax_fa4 import cubins
    from jax_fa4.cubins.build import Compiler
    from jax_fa4.configs.sm90 import forward
    from jax_fa4.spec import AttentionSpec

    name, folder = sys.argv[1], pathlib.Path(sys.argv[3])

    def compile(config):
        (folder / f"compiled-{name}").touch()
        deadline = time.monotonic() + 20
        while len(list(folder.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # the other one is at the lock by now
        return StandIn()(config)

    (folder / f"ready-{name}").touch()
    config = forward(AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, group=1))
    print(cubins.get(config, compiler=Compiler(version="4.8.1", compile=compile)).key)
"""


def test_two_processes_compile_once(tmp_path):
    here = pathlib.Path(__file__).parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), name, here, tmp_path], stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(list(tmp_path.glob("compiled-*"))) == 1


def test_what_is_stored_can_be_asked_without_compiling(config, stand_in):
    assert lookup.stored(config, compiler=stand_in.compiler()) is None
    built = get(config, compiler=stand_in.compiler())
    assert lookup.stored(config, compiler=stand_in.compiler()) == built
