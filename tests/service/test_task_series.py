"""Names of tasks come from whoever reports: nobody uses up the room of others."""

from breadbox_server.metrics.episodes import OTHER, Reporter, TaskSeries


def test_a_reporter_with_most_tasks_counts_further_ones_as_other() -> None:
    tasks = TaskSeries(2)
    one = Reporter("", "w")

    assert [("a", None), ("b", None), (OTHER, None), ("a", None)] == [
        tasks.place(task, one) for task in ("a", "b", "c", "a")
    ]


def test_a_newcomer_takes_the_place_of_what_the_greediest_used_least_lately() -> None:
    tasks = TaskSeries(3)
    for task in ("a", "b", "c", "a"):
        tasks.place(task, Reporter("", "greedy"))

    assert ("d", "b") == tasks.place("d", Reporter("", "w"))
    assert ("a", None) == tasks.place("a", Reporter("", "w"))


def test_invented_workers_of_one_token_do_not_use_up_the_room_of_another() -> None:
    tasks = TaskSeries(4)
    for index in range(9):
        tasks.place(f"invented-{index}", Reporter("hostile", f"w{index}"))
    tasks.place("pole", Reporter("honest", "w0"))
    tasks.place("maze", Reporter("honest", "w0"))
    for index in range(9):
        tasks.place(f"again-{index}", Reporter("hostile", f"v{index}"))

    assert [("pole", None), ("maze", None)] == [
        tasks.place(task, Reporter("honest", "w1")) for task in ("pole", "maze")
    ]


def test_workers_that_come_and_go_find_room_for_their_tasks() -> None:
    tasks = TaskSeries(2)
    for index in range(10):
        worker = Reporter("", f"run-{index}")
        placed = [tasks.place(f"task-{index}-{part}", worker)[0] for part in range(2)]
        assert f"task-{index}-0" == placed[0]
