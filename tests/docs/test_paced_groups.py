"""`make paced-groups`: the table in the documents is that of its runs, which are as simulated."""

import shutil
from pathlib import Path

from bench.paced_groups import COMMAND, DATA, PAGE, SIMULATED, read, table
from bench.report import write_into


def test_the_table_follows_from_the_runs_which_agree_with_the_simulation(tmp_path: Path) -> None:
    rows = read(DATA)
    assert [3] * len(SIMULATED) == [len(found) for _, found in rows]
    text, agrees = table(rows)
    assert agrees
    again = tmp_path / PAGE.name
    shutil.copy(PAGE, again)
    write_into(again, text, COMMAND)
    assert PAGE.read_text() == again.read_text()
    worst = {row.name: max(each.worst for each in found) for row, found in rows}
    bound = {row.name: row.options[row.options.index("--staleness-max") + 1] for row in SIMULATED
             if "keep" not in row.name}  # fmt: skip
    assert all(worst[name] <= int(limit) for name, limit in bound.items())
