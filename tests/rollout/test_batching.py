"""When a batch goes."""

from breadbox_rollout.batching import ReadyQueue


def queue(batch: int = 4, wait_s: float = 0.5) -> ReadyQueue:
    return ReadyQueue(batch, wait_s)


def test_nobody_waiting_asks_for_no_patience() -> None:
    assert None is queue().patience_s(8, now=0.0)


def test_a_full_batch_goes_at_once_in_order_of_arrival() -> None:
    ready = queue()
    for group in (5, 3, 9, 1, 7):
        ready.add(group, 1, now=0.0)
    assert 0.0 == ready.patience_s(8, now=0.0)
    assert [5, 3, 9, 1] == ready.take()
    assert [7] == ready.take()


def test_a_part_of_a_batch_waits_for_what_is_left_of_the_maximum() -> None:
    ready = queue()
    ready.add(0, 1, now=10.0)
    ready.add(1, 1, now=10.4)
    assert 0.5 == ready.patience_s(8, now=10.0)
    assert 0.0 == ready.patience_s(8, now=10.5)


def test_fewer_live_environments_than_a_batch_holds_do_not_stall() -> None:
    """D26: the ancestor spun forever."""
    ready = queue(batch=8, wait_s=1e9)
    ready.add(0, 1, now=0.0)
    ready.add(1, 1, now=0.0)
    assert 0.0 == ready.patience_s(2, now=0.0)


def test_a_group_is_never_split_and_may_be_larger_than_a_batch() -> None:
    ready = queue()
    ready.add(0, 3, now=0.0)
    ready.add(1, 3, now=0.0)
    ready.add(2, 9, now=0.0)
    assert [[0], [1], [2]] == [ready.take(), ready.take(), ready.take()]
    assert 0 == ready.env_count


def test_a_group_whose_process_is_gone_is_forgotten() -> None:
    ready = queue()
    ready.add(0, 1, now=0.0)
    ready.add(1, 1, now=0.0)
    ready.remove(0)
    ready.remove(42)
    assert 1 == ready.env_count
    assert [1] == ready.take()
