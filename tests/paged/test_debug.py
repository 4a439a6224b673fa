"""JAX_FA4_CHECK=1: a program that runs with a page index outside the pool raises."""

import jax
import numpy as np
import pytest

import jax_fa4


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setenv("JAX_FA4_CHECK", "1")
    yield
    jax.clear_caches()  # programs that check


def call(table, lengths=(5, 2)):
    q, pages = np.ones((2, 1, 2, 8), np.float32), np.ones((3, 4, 2, 8), np.float32)
    program = jax.jit(lambda table: jax_fa4.attention_paged(q, pages, pages, table, np.array(lengths)))
    return jax.block_until_ready(program(np.array(table)))


@pytest.mark.usefixtures("checked")
def test_the_error_names_the_entry():
    with pytest.raises(Exception, match=r"page_table\[1, 0\] must be from 0 to 2, got 3; 1 used entries are outside"):
        call([[0, 1], [3, 0]])


@pytest.mark.usefixtures("checked")
def test_a_write_is_checked_too():
    pages, new = np.ones((3, 4, 2, 8), np.float32), np.ones((1, 1, 2, 8), np.float32)
    with pytest.raises(Exception, match=r"page_table\[0, 1\] must be from 0 to 2, got -1; 1 used entries"):
        jax.block_until_ready(jax_fa4.append_kv(pages, pages, new, new, np.array([[0, -1]]), np.array([[4]])))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("table", [[[0, 1], [2, -1]], [[2, 0], [1, 99]]])
def test_entries_behind_a_length_may_be_anything(table):
    call(table)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_checked_without_it(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("JAX_FA4_CHECK", value)
    call([[0, 1], [3, 0]])


@pytest.mark.parametrize("value", ["false", "true", "2"])
def test_only_0_and_1_are_understood(monkeypatch, value):
    monkeypatch.setenv("JAX_FA4_CHECK", value)
    with pytest.raises(ValueError, match=f"JAX_FA4_CHECK must be 0 or 1, got '{value}'"):
        call([[0, 1], [2, 0]])
