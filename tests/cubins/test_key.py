"""What a cubin's name depends on."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import pytest

from jax_fa4.configs import all_configs, forward_config
from jax_fa4.cubins import key
from jax_fa4.operands import Operands
from jax_fa4.spec import AttentionSpec


def config_of(batch, seqlen, window):
    """The config of a call with these sizes and this window."""
    array = jax.ShapeDtypeStruct((batch, seqlen, 4, 128), jnp.bfloat16)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    x = Operands(array, array, array, jax.ShapeDtypeStruct((), jnp.float32), window_right=scalar if window else None)
    return forward_config(AttentionSpec.of(x), "sm_90a")


def test_sizes_are_not_part_of_it():
    assert key.recipe_of(config_of(1, 63, True)) == key.recipe_of(config_of(7, 4097, True))


def test_what_selects_code_is_part_of_it():
    assert key.recipe_of(config_of(1, 63, True)) != key.recipe_of(config_of(1, 63, False))


def test_every_field_of_the_config_is_part_of_it(config):
    changed = dataclasses.replace(config, kv_stages=config.kv_stages - 1)
    assert key.recipe_of(changed) != key.recipe_of(config)


def test_the_compiler_is_part_of_it():
    assert key.key_of("0" * 64, "4.8.1") != key.key_of("0" * 64, "4.8.2")


@pytest.mark.parametrize(
    ("name", "content"),
    [("core/mask.py", "x = 2"), ("core/bounds.py", "x = 1"), ("mask.py", "x = 1"), ("core/mask.py", "x = 1\n")],
)
def test_names_and_bytes_of_the_sources_are_part_of_it(tmp_path, name, content):
    for folder, file, text in (("a", "core/mask.py", "x = 1"), ("b", name, content)):
        path = tmp_path / folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert key.digest_of_folder(tmp_path / "a") != key.digest_of_folder(tmp_path / "b")


@pytest.mark.parametrize("folder", ["kernels", "configs"])
def test_kernels_and_what_configs_derive_are_part_of_it(tmp_path, monkeypatch, folder):
    copies = [shutil.copytree(source, tmp_path / source.name) for source in key.source_folders()]
    monkeypatch.setattr(key, "source_folders", lambda: copies)
    assert not key.sources_have_changed()
    with (tmp_path / folder / "__init__.py").open("a") as file:
        file.write("# changed\n")
    assert key.sources_have_changed()


def test_files_that_are_not_sources_are_no_part_of_it(tmp_path):
    (tmp_path / "mask.py").write_text("x = 1")
    before = key.digest_of_folder(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "mask.cpython-311.pyc").write_bytes(b"\0")
    (tmp_path / "notes.md").write_text("text")
    assert key.digest_of_folder(tmp_path) == before


def test_a_link_to_the_sources_gives_the_same(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mask.py").write_text("x = 1")
    (tmp_path / "link").symlink_to("kernels")
    assert key.digest_of_folder(tmp_path / "link") == key.digest_of_folder(tmp_path / "kernels")


@pytest.mark.parametrize("version", ["4.8.1", "4.8.12", "4.8.2.dev1"])
def test_versions_of_the_tested_range_may_compile(version):
    assert key.why_dsl_unusable(version) is None


@pytest.mark.parametrize("version", ["4.8.0", "4.7.9", "4.9.0", "4.9.0.dev0", "5.0.0"])
def test_other_versions_are_refused_with_the_range(version):
    assert key.why_dsl_unusable(version) == (
        f"nvidia-cutlass-dsl {version} is installed, kernels are tested with >=4.8.1,<4.9: "
        'pip install "jax-fa4[cuda13]"'
    )


def test_a_missing_compiler_is_named():
    assert key.why_dsl_unusable(None) == (
        'the kernel compiler (nvidia-cutlass-dsl) is not installed: pip install "jax-fa4[cuda13]"'
    )


def test_every_kernel_of_the_table_has_a_recipe_of_its_own():
    configs = all_configs("sm_90a")
    assert config_of(1, 63, True) in configs
    assert len({key.recipe_of(config) for config in configs}) == len(configs)
