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
        others = len(limits.METRICS) - 2
        lines = ["==PROF== Connected to process 1", _row("ID", "Kernel Name", *limits.METRICS)]
        lines.append(_row("", "", "ns", "%", *["%"] * others))
        for number, (kernel, nanoseconds, tensor) in enumerate(launches):
            lines.append(_row(number, kernel, nanoseconds, tensor, *["10,000,000"] * others))
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
    assert (found["tensor"], found["Mclk"], found["L2 GB"]) == (61.3, 10, 0.01)


def test_flushes_of_every_peer_are_told(limits, written):
    text = written(("void sinh_kernel<float>", "1", 0), ("forward", "1", 50), ("void sinh_kernel<float>", "1", 0))
    assert [[launch.kernel for launch in call] for call in limits.between_flushes(limits.launches(text))] == [
        ["forward"]
    ]


def test_both_parts_name_the_calls_that_the_grid_has(limits):
    problems = limits.problems(["d96", "decode"], ["forward", "backward"], [])
    found = [limits.names(problem) for problem in problems]
    assert [record["direction"] for record in found] == ["forward", "backward"] * 2 + ["forward"] * 5
    assert len({record["cell"] for record in found}) == 7


def test_peers_take_turns_at_one_direction_of_one_cell(limits):
    found = [limits.names(problem) for problem in limits.problems(["d96 4x4096 h16 d96", "gqa"], ["forward"], ["fa3"])]
    assert [record["peer"] for record in found] == ["jax_fa4", "fa3"] * 2
    assert [record["cell"].split()[0] for record in found] == ["d96", "d96", "gqa", "gqa"]
    assert {record["direction"] for record in found} == {"forward"}


class UnhelpfulLibrary:
    """A management library all of whose functions fail."""

    def __getattr__(self, name):
        return lambda *args: 3


def test_a_card_that_does_not_answer_is_told_and_not_waited_for(limits, monkeypatch):
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda name: UnhelpfulLibrary())
    with pytest.raises(RuntimeError, match="nvmlInit_v2 failed with status 3"):
        limits.Card()
