import random
import threading
import time

import numpy as np
import pytest
import torch
from scipy import stats

from batchbayes._common.rng import GlobalStream, dealt, dealt_first, even_numbers, generator, normals, stream_seed


def numbers() -> list[float]:
    """One number of each global generator."""
    return [float(torch.rand(1, dtype=torch.float64)), float(np.random.rand()), random.random()]


def expected(seed: int, count: int) -> list[list[float]]:
    with GlobalStream(seed):
        return [numbers() for _ in range(count)]


@pytest.fixture(autouse=True)
def _outside_state_is_kept():
    """No test may leave the global generators in another state, except for what it draws outside of blocks."""
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def test_names_of_streams_give_different_seeds():
    names = [(0,), (1,), (0, "a"), (0, "b"), (0, 1), (0, "1"), (0, "a", "b"), (0, "ab"), (10, 1), (1, 0, 1)]
    seeds = [stream_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(0, "draw", 3) == 948989781728166157  # published results depend on it


def test_a_stream_continues_where_its_last_block_ended():
    stream, found = GlobalStream(3), []
    for _ in range(3):
        with stream:
            found.append(numbers())
        numbers()  # outside
    assert found == expected(3, 3)
    assert expected(4, 3) != found


def test_the_generators_outside_are_untouched():
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    plain = [numbers(), numbers()]
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    first = numbers()
    with GlobalStream(0):
        numbers()
    assert [first, numbers()] == plain


def test_an_error_in_a_block_restores_the_state_and_frees_the_lock():
    stream, (first, second) = GlobalStream(5), expected(5, 2)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    def fails() -> None:
        with stream:
            assert numbers() == first
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    found = []

    def other_thread() -> None:
        with stream:
            found.append(numbers())

    thread = threading.Thread(target=other_thread, daemon=True)
    thread.start()
    thread.join(10)
    assert found == [second]


def test_blocks_may_be_nested():
    outer, inner = GlobalStream(1), GlobalStream(2)
    first, second = expected(1, 2)
    before = random.getstate()
    with outer:
        assert numbers() == first
        with inner:
            assert numbers() == expected(2, 1)[0]
        assert numbers() == second
    assert random.getstate() == before


def test_a_stream_inside_itself_gives_the_state_back():
    stream, before = GlobalStream(1), random.getstate()
    with stream:
        first = numbers()
        with stream:
            assert numbers() == first  # from its last known place, the start
        assert [first, numbers()] == expected(1, 2)
    assert random.getstate() == before


def test_threads_wait_for_each_other():
    wanted, found, barrier = {seed: expected(seed, 20) for seed in range(6)}, {}, threading.Barrier(6)

    def work(seed: int) -> None:
        barrier.wait()
        stream = GlobalStream(seed)
        found[seed] = []
        for _ in range(5):
            with stream:
                for _ in range(4):
                    found[seed].append(numbers())
                    time.sleep(1e-4)  # lets other threads run inside of the block

    threads = [threading.Thread(target=work, args=(seed,)) for seed in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


def test_normals_depend_on_the_seed_and_the_draw_only():
    all_rows = normals(0, range(6), 4)
    assert torch.equal(normals(0, [4, 1], 4), all_rows[[4, 1]])
    assert not torch.equal(normals(1, range(6), 4), all_rows)
    own = torch.empty(4, dtype=torch.float64).normal_(generator=generator(0, "draw", 2))
    assert torch.equal(all_rows[2], own)
    assert all_rows.dtype == torch.float64
    assert normals(0, [], 3).shape == (0, 3)


def test_normals_are_standard_normal():
    assert stats.kstest(normals(0, range(400), 10).flatten().numpy(), "norm").pvalue > 1e-3
    rows = normals(0, range(4000), 2)
    assert abs(float(torch.corrcoef(rows.T)[0, 1])) < 4 / 4000**0.5  # four standard errors


@pytest.mark.parametrize("cards", [1, 2, 5])
def test_each_card_is_dealt_once_before_any_comes_again(cards):
    found = [dealt(3, index, cards) for index in range(4 * cards)]
    for start in range(0, 4 * cards, cards):
        assert sorted(found[start : start + cards]) == list(range(cards))
    for count in (1, cards, 2 * cards + 1):
        assert dealt_first(3, count, cards).tolist() == [dealt(3, index, cards) for index in range(count)]


def test_decks_have_different_orders():
    decks = dealt_first(0, 40, 10).view(4, 10).tolist()
    assert len({tuple(deck) for deck in decks}) == 4
    assert dealt_first(1, 40, 10).view(4, 10).tolist() != decks


@pytest.mark.parametrize("count", [2, 8, 64, 128])
def test_even_numbers_fall_once_into_each_of_equal_parts(count):
    numbers = torch.stack([even_numbers(3, index, 5) for index in range(count)])  # (count, 5)
    for column in (numbers * count).long().T:
        assert sorted(column.tolist()) == list(range(count))


def test_there_are_as_many_even_numbers_as_a_wide_table_takes():
    first, second = even_numbers(0, 0, 30_000), even_numbers(0, 1, 30_000)
    assert torch.equal(first[:20_000], even_numbers(0, 0, 20_000)[:20_000])
    for numbers in (first, second):
        assert 0.45 < numbers[25_000:].mean() < 0.55
    assert not (first == second).any()


def test_even_numbers_depend_on_seed_and_index_alone():
    later = even_numbers(0, 100, 3)
    assert torch.equal(later, even_numbers(0, 100, 3))
    assert not torch.equal(later, even_numbers(1, 100, 3))
    assert not torch.equal(later, even_numbers(0, 101, 3))
    even_numbers(0, 100, 3).zero_()
    assert torch.equal(later, even_numbers(0, 100, 3))


def test_even_numbers_are_uniform_over_seeds():
    numbers = torch.stack([even_numbers(seed, 5, 2) for seed in range(400)])
    for column in numbers.T:
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-3


def test_generators_of_a_gpu_follow_the_stream(monkeypatch):
    """Stands in for `torch.cuda`, since there is no GPU here: one generator of the CPU."""
    gpu = torch.Generator().manual_seed(99)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [gpu.get_state()])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: gpu.set_state(states[0]))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpu.manual_seed)
    before = gpu.get_state()
    stream = GlobalStream(3)
    with stream:
        first = torch.rand(2, generator=gpu)
    assert torch.equal(gpu.get_state(), before)
    resumed = GlobalStream(3)
    resumed.restore(stream.state())
    with resumed:
        second = torch.rand(2, generator=gpu)
    with GlobalStream(3):
        assert torch.equal(torch.rand(4, generator=gpu), torch.cat([first, second]))
