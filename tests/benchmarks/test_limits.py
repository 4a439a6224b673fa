"""What the profiler writes, read as figures of calls."""

import pytest

FLUSH = "wrapped_cbrt"


@pytest.fixture(scope="module")
def limits(program):
    return program("limits")


@pytest.fixture
def written(limits):
    """A function that writes launches, (kernel, nanoseconds, tensor percent) each, as ncu does."""

    def write(*launches):
        metrics = [limits.DURATION, *limits.BUSY.values()]
        lines = ["==PROF== Connected to process 1", _row("ID", "Kernel Name", *metrics)]
        lines.append(_row("", "", "ns", *["%"] * len(limits.BUSY)))
        for number, (kernel, nanoseconds, tensor) in enumerate(launches):
            lines.append(_row(number, kernel, nanoseconds, tensor, *[10] * (len(limits.BUSY) - 1)))
        return "\n".join([*lines, "==PROF== Disconnected from process 1"])

    return write


def _row(*values):
    return ",".join(f'"{value}"' for value in values)


def test_a_call_is_what_stands_between_its_two_flushes(limits, written):
    text = written(
        ("warm", "1", 1), (FLUSH, "1", 0), (FLUSH, "1", 0), ("forward", "1,500", 50), (FLUSH, "1", 0),
        ("warm", "1", 1), (FLUSH, "1", 0), ("before", "250", 0), ("backward", "750", 60), (FLUSH, "1", 0),
    )  # fmt: skip
    found = list(limits.between_flushes(limits.launches(text)))
    assert [[launch.kernel for launch in call] for call in found] == [["forward"], ["before", "backward"]]


def test_a_call_is_told_by_its_longest_kernel(limits, written):
    launches = limits.launches(written(("before", "250", 1), ("backward", "1,750", 61.26), ("after", "500", 2)))
    found = limits.summary(launches)
    assert found["kernel"] == "backward"
    assert found["part"] == 0.7
    assert (found["tensor"], found["DRAM"]) == (61.3, 10)


def test_both_parts_name_the_calls_that_the_grid_has(limits):
    from jax_fa4.bench import cells

    found = list(limits.names(cells.select(["d96", "decode"])))
    assert [record["direction"] for record in found] == ["forward", "backward"] * 2 + ["forward"] * 5
    assert len({record["cell"] for record in found}) == 7
