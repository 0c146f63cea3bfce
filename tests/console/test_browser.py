"""The console in a real browser, by mouse and by keyboard, on a real server."""

import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

import breadbox
from breadbox.model.types import BufferConfig
from support.console import WIDE, browser, console, film, opened, played
from support.eventually import eventually_sync
from support.server_process import ServerProcess
from support.token_files import write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

NARROW = {"width": 400, "height": 800}
HOSTILE = "<img src=x onerror=window.hacked=1>\u202egnp.exe"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--store", f"file://{tmp_path}/store", log=tmp_path / "server.log"
    ) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address) as connected:
        connected.start_session("run")
        yield connected


@pytest.fixture
def url(server: ServerProcess, tmp_path: Path) -> Iterator[str]:
    with console(server.address, tmp_path / "console.log") as found:
        yield found


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    yield from opened(chromium, url)


def go(page: Any, url: str, fragment: str) -> None:
    page.goto(f"{url}{fragment}")


def test_the_overview_says_why_the_learner_waits_and_what_leaves_next(
    page: Any, client: breadbox.Client
) -> None:
    card = page.get_by_role("region", name="Buffer default")
    card.get_by_text("No learner has fetched yet").wait_for()

    client.append(played(0))
    card.get_by_role("link", name="w0").wait_for()
    card.get_by_text("Healthy").wait_for()
    card.get_by_role("cell", name="chunk 0 of w0").wait_for()


def test_the_latest_batch_says_how_fresh_it_was(page: Any, client: breadbox.Client) -> None:
    for at in range(4):
        client.append(played(at, episode_id=at))
    page.get_by_text("4 seen").wait_for()  # Of what has left unread only the staleness is known.
    client.service.publish_model("run", 1)
    with client.fetch(fragment_count=2, max_wait_s=10):
        pass  # Also where the lease ends before the console looks.
    page.get_by_text("1 / 1 / 1 (min / median / max)").wait_for()
    page.get_by_text("2, acted with version 0").wait_for()
    page.get_by_text("w0 100 %").wait_for()


def test_an_episode_that_was_just_appended_can_be_looked_at_within_two_seconds(
    page: Any, url: str, client: breadbox.Client
) -> None:
    go(page, url, "#/episodes/default")
    page.get_by_text("0 of 0 episodes seen").wait_for()
    appended_at = time.monotonic()
    client.append(played(0, obs=film()))
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_role("img", name="obs.camera").wait_for()
    took_s = time.monotonic() - appended_at

    assert took_s < 2.0, f"{took_s:.2f} s"


def test_a_bar_of_the_histogram_filters_by_keyboard(
    page: Any, url: str, client: breadbox.Client
) -> None:
    for at in range(4):
        client.append(played(at, reward=float(at), episode_id=at))
    go(page, url, "#/episodes/default")
    page.get_by_text("4 of 4 episodes seen").wait_for()
    last = page.get_by_role("button", name="returns").last
    last.focus()
    page.keyboard.press("Enter")
    page.get_by_text("1 of 4 episodes seen").wait_for()

    assert 1 == page.get_by_role("link", name="w0 #").count()
    assert "w0 #3" == page.get_by_role("link", name="w0 #").inner_text()


def test_what_can_be_watched_comes_first_and_is_one_click_from_the_overview(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, worker_id="kept", obs=film()))
    client.append(played(0, obs=film()))
    page.get_by_text("2 seen").wait_for()
    client.start_session("next")  # Of what was held only what the console kept is left.
    go(page, url, "#/episodes/default")
    page.get_by_role("row", name="w0 #0").get_by_role("cell", name="no", exact=True).wait_for()
    links = page.get_by_role("region", name="Ended episodes").get_by_role("link")
    assert ["kept #0", "w0 #0"] == links.all_inner_texts()
    go(page, url, "#/overview/default")
    page.get_by_role("link", name="Watch the latest whole episode").click()
    page.get_by_role("heading", name="kept #0").wait_for()
    assert 0 == brightness(page)


def test_an_episode_is_listed_with_the_return_that_its_worker_reports_and_a_part_apart(
    page: Any, url: str, client: breadbox.Client
) -> None:
    returns = np.full(32, np.nan, np.float32)
    returns[31] = 500.0
    lengths = np.where(np.arange(32) == 31, 500, 0)
    extras = [{"episode_return": np.full(32, np.nan, np.float32), "episode_length": 0 * lengths}]
    extras.append({"episode_return": returns, "episode_length": lengths})
    client.append(played(0, ends=(), extras=extras[0]))
    client.append(played(3, first=False, extras=extras[1]))
    go(page, url, "#/episodes/default")
    page.get_by_text("2 of 2 episodes seen, 1 of them ended").wait_for()
    ended = page.get_by_role("region", name="Ended episodes").get_by_role("row").nth(1)
    part = page.get_by_role("region", name="Running or cut off").get_by_role("row").nth(1)

    assert ["500", "500", "terminated, without its start"] == ended.get_by_role(
        "cell"
    ).all_inner_texts()[3:6]
    assert ["32", "32", "cut"] == part.get_by_role("cell").all_inner_texts()[3:6]
    page.get_by_role("button", name="returns 500 to 500: 1").wait_for()
    learnt = page.request.get(f"{url}api/buffers/default/learning").json()
    assert [500.0] == learnt["returns"]["all"]["return"]
    ended.get_by_role("link").click()
    page.get_by_text("return 500; 32 seen of 500 steps").wait_for()


def brightness(page: Any) -> int:
    """The red of the camera's first pixel, once the image has loaded."""
    page.locator("figure[aria-busy]").wait_for(state="detached")
    image = page.get_by_role("img", name="obs.camera")
    eventually_sync(lambda: image.evaluate("image => image.complete && image.naturalWidth > 0"))
    return int(
        page.evaluate(
            """() => {
              const image = document.querySelector('img[alt="obs.camera"]');
              const canvas = document.createElement("canvas");
              canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
              const context = canvas.getContext("2d");
              context.drawImage(image, 0, 0);
              return context.getImageData(0, 0, 1, 1).data[0];
            }"""
        )
    )


def test_every_stream_follows_one_transport_by_keyboard_and_mouse(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, obs=film(), ends=()))
    client.append(played(1, obs=film(start=32), first=False))
    go(page, url, "#/episodes/default")
    page.get_by_text("64").first.wait_for()
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_text("step 1 of 64").wait_for()
    assert 0 == brightness(page)

    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.get_by_text("step 4 of 64").wait_for()
    assert 3 == brightness(page)
    page.keyboard.press("End")
    assert 63 == brightness(page)
    page.get_by_role("button", name="Step back").click()
    assert 62 == brightness(page)
    page.get_by_role("button", name="Life of fragment 1:").click()
    page.get_by_text("step 33 of 64").wait_for()
    assert 32 == brightness(page)
    # A link to a step leads to it.
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.get_by_text("step 33 of 64").wait_for()


def test_play_runs_to_the_end_and_stops(page: Any, url: str, client: breadbox.Client) -> None:
    client.append(played(0, obs=film()))
    go(page, url, "#/episodes/default")
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_text("step 1 of 32").wait_for()
    page.get_by_label("Steps per second").select_option("60")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Play").click()
    page.get_by_text("step 32 of 32").wait_for()
    page.get_by_role("button", name="Play").wait_for()


def test_two_episodes_are_compared_on_one_transport(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, obs=film()))
    client.append(played(0, worker_id="w1", obs=film(start=100)))
    go(page, url, "#/episodes/default")
    page.get_by_text("2 of 2 episodes seen").wait_for()
    for number in (1, 2):
        page.get_by_label(f"Compare episode {number}").check()
    page.get_by_role("button", name="Compare two").click()
    page.get_by_text("step 1 of 32").wait_for()

    pictures = page.get_by_role("img", name="obs.camera")
    pictures.nth(1).wait_for()
    assert 2 == pictures.count()


def test_names_tags_and_text_are_shown_and_never_run(
    page: Any, url: str, client: breadbox.Client
) -> None:
    texts = np.array([HOSTILE] * 32)
    client.append(played(0, extras={"tag": texts, "task": texts, "said": texts}))
    page.get_by_role("link", name="w0").wait_for()
    go(page, url, "#/episodes/default")
    page.get_by_role("cell", name=HOSTILE).first.wait_for()
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_role("heading", name="extras.said").wait_for()

    assert HOSTILE in page.locator(".text").last.inner_text()
    assert page.evaluate("window.hacked") is None
    assert 0 == page.locator("img[src='x']").count()


def test_actions_are_shown_as_tokens_where_a_detokenizer_knows_them(
    chromium: Any, server: ServerProcess, client: breadbox.Client, tmp_path: Path
) -> None:
    client.append(played(0))
    words = ("--detokenizer", "tests.support.words:spelled")
    with console(server.address, tmp_path / "words.log", *words) as url:
        for page in opened(chromium, f"{url}#/episodes/default"):
            page.get_by_role("link", name="w0 #0").click()
            page.get_by_role("button", name="Show actions as tokens").click()
            token = page.get_by_role("button", name="<17>", exact=True)
            token.wait_for()

            assert "step 18: log-probability -0.5, version 0" == token.get_attribute("title")


def test_a_small_frame_is_enlarged_beside_what_the_cursor_is_at(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, obs=film()))
    go(page, url, "#/episodes/default")
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_text("step 1 of 32").wait_for()
    brightness(page)
    page.get_by_text("obs.camera uint8 48×64×3").wait_for()
    page.keyboard.press("Shift+ArrowRight")
    page.get_by_label("At the cursor").get_by_text("action").locator("..").get_by_text(
        "10"
    ).wait_for()

    camera = page.get_by_role("img", name="obs.camera")
    # The frame of the step is drawn anew, and has no box meanwhile.
    eventually_sync(lambda: (camera.bounding_box() or {}).get("width") == 448)
    assert 0 == page.get_by_role("button", name="Show actions as tokens").count()


def test_an_episode_is_downloaded_as_parquet_and_as_a_film(
    page: Any, url: str, client: breadbox.Client, tmp_path: Path
) -> None:
    import av
    import pyarrow.parquet as parquet

    client.append(played(0, obs=film()))
    go(page, url, "#/episodes/default")
    page.get_by_role("link", name="w0 #0").click()
    with page.expect_download() as caught:
        page.get_by_role("link", name="Parquet").click()
    rows = parquet.read_table(io.BytesIO(Path(caught.value.path()).read_bytes()))
    with page.expect_download() as caught:
        page.get_by_role("link", name="MP4").click()
    with av.open(str(caught.value.path())) as opened_film:
        frames = sum(1 for _ in opened_film.decode(video=0))

    assert (32, 32) == (rows.num_rows, frames)


def test_an_episode_that_has_left_says_so_and_keeps_its_rewards(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, worker_id="kept", obs=film()))
    client.append(played(0, obs=film()))
    go(page, url, "#/episodes/default")
    held = page.get_by_role("row", name="w0 #0").get_by_role("cell")
    held.get_by_text("yes", exact=True).wait_for()
    client.start_session("next")
    held.get_by_text("no", exact=True).wait_for()  # The console has seen that it left.
    page.get_by_role("link", name="w0 #0").click()

    page.get_by_text("The same at each step: reward 1").wait_for()
    page.get_by_text("steps 1 to 32: left: its session ended").wait_for()


def test_what_one_worker_sends_while_episodes_are_listed_can_be_watched_when_it_has_left(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, obs=film()))
    client.append(played(0, worker_id="w1", obs=film()))
    go(page, url, "#/episodes/default")
    page.get_by_text("2 of 2 episodes seen").wait_for()
    page.get_by_label("Worker").select_option("w1")
    page.get_by_text("what w1 sends is kept").wait_for()
    client.append(played(1, worker_id="w1", obs=film(start=32), episode_id=1))
    page.get_by_text("2 of 3 episodes seen").wait_for()
    client.start_session("next")
    page.get_by_role("row", name="w1 #0").get_by_role("cell", name="no", exact=True).wait_for()
    page.get_by_role("button", name="Worst that can be watched").click()
    page.get_by_text("1 of 3 episodes seen").wait_for()
    page.get_by_role("link", name="w1 #1").click()
    page.get_by_text("step 1 of 32").wait_for()

    assert 32 == brightness(page)


def test_an_episode_whose_last_fragment_has_left_shows_the_frames_of_the_others(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.create_buffer("two", BufferConfig(uses_max=1, sampler="newest_first"))
    client.start_session("run", buffer="two")
    client.append(played(0, worker_id="kept", obs=film()), buffer="two")
    client.append(played(0, obs=film(), ends=()), buffer="two")
    client.append(played(1, obs=film(start=32), first=False), buffer="two")
    go(page, url, "#/episodes/two")
    page.get_by_role("link", name="w0 #0").wait_for()
    with client.fetch(fragment_count=1, max_wait_s=10, buffer="two"):
        pass
    page.get_by_text("50 %").wait_for()
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_text("32 of 64 steps are not held any more").wait_for()

    assert 0 == brightness(page)


def test_the_life_of_a_fragment_says_when_it_was_granted_and_why_it_left(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, worker_id="kept", obs=film()))
    client.append(played(0, obs=film()))
    client.append(played(1, obs=film(), episode_id=1))
    go(page, url, "#/episodes/default")
    page.get_by_text("3 of 3 episodes seen").wait_for()
    client.append(played(1, worker_id="kept", obs=film()))
    page.get_by_text("4 of 4 episodes seen").wait_for()
    client.service.publish_model("run", 2)
    with client.fetch(fragment_count=4, max_wait_s=10):
        pass
    page.get_by_label("Where").select_option("can be watched whole")
    page.get_by_text("2 of 4 episodes seen").wait_for()
    page.get_by_label("Where").select_option("")
    page.get_by_role("link", name="w0 #1").click()
    life = page.get_by_role("button", name="Life of fragment 1:")
    life.wait_for()

    said = life.get_attribute("aria-label")
    assert "at staleness 2, consumed" in said, said
    assert "left: it was used up" in said, said


def test_subscriptions_show_their_lag_and_uses_their_chunks(
    page: Any, client: breadbox.Client
) -> None:
    client.create_subscription("evaluator")
    for at in range(3):
        client.append(played(at, episode_id=at))
    with client.fetch(fragment_count=1, max_wait_s=10):
        pass
    row = page.get_by_role("row", name="evaluator 2")
    row.wait_for()
    page.get_by_role("img", name="uses 1: 1").wait_for()


def test_looking_uses_nothing_up_and_leaves_no_lease(
    page: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0, obs=film()))
    go(page, url, "#/episodes/default")
    page.get_by_role("link", name="w0 #0").click()
    page.get_by_role("img", name="obs.camera").wait_for()
    brightness(page)
    state = client.get_buffer().state

    assert (1, 0, 0) == (state.chunk_count, state.lease_count, state.counters["uses"])
    with client.fetch(fragment_count=1, max_wait_s=10) as lease:
        assert [0] == [each.fragment_index for each in lease.fragments()]


def test_a_token_is_asked_for_and_shows_its_buffers_only(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    admin, ann = write_tokens(file, "admin boss", "learner ann buffers=red")
    one_token = tmp_path / "ann"
    one_token.write_text(ann)
    arguments = ("--store", f"file://{tmp_path}/store", "--tokens", str(file))
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address, token=admin) as client,
        console(server.address, tmp_path / "console.log") as url,
    ):
        client.create_buffer("red", BufferConfig())
        for page in opened(chromium, url):
            # A newcomer is told where a token comes from.
            page.get_by_text("make env").wait_for()
            page.get_by_text("breadbox token --role viewer").wait_for()
            page.get_by_label("Token").fill("bbx_wrong")
            page.keyboard.press("Enter")
            page.get_by_text("The server refuses the token").wait_for()
            page.get_by_label("Token").fill(f"@{one_token}")
            page.keyboard.press("Enter")
            page.get_by_text("this is no token").wait_for()
            page.get_by_label("Token").fill(ann)
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("region", name="Buffer red").wait_for()
            assert 0 == page.get_by_role("region", name="Buffer default").count()
            (cookie,) = page.context.cookies()
            assert (True, "Strict") == (cookie["httpOnly"], cookie["sameSite"])
            answer = page.request.get(f"{url}api/buffers/default/episodes")
            assert 404 == answer.status
            page.get_by_role("button", name="Log out").click()
            page.get_by_label("Token").wait_for()
            assert 401 == page.request.get(f"{url}api/buffers/red/episodes").status


def logged_in(chromium: Any, url: str, token: str) -> Iterator[Any]:
    for page in opened(chromium, url):
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        yield page


def test_two_viewers_of_two_consoles_see_frames_by_the_gateway_each_of_its_own_buffer(
    chromium: Any, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    teams = ("red", "blue")
    admin, *viewers = write_tokens(
        file, "admin boss", *(f"viewer {team} buffers={team}" for team in teams)
    )
    arguments = ("--store", f"file://{tmp_path}/store", "--tokens", str(file), "--gateway")
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address, token=admin) as client,
        console(server.address, tmp_path / "one.log") as one,
        console(server.address, tmp_path / "two.log") as two,
    ):
        for at, team in enumerate(teams):
            client.create_buffer(team, BufferConfig())
            client.start_session("run", buffer=team)
            client.append(played(0, worker_id=team, obs=film(start=40 * at)), buffer=team)
        for url in (one, two):
            for at, team in enumerate(teams):
                for page in logged_in(chromium, url, viewers[at]):
                    page.get_by_role("region", name=f"Buffer {team}").wait_for()
                    assert 1 == page.get_by_role("region", name="Buffer").count()
                    go(page, url, f"#/episodes/{team}")
                    page.get_by_role("link", name=f"{team} #0").click()
                    page.get_by_text("step 1 of 32").wait_for()
                    assert 40 * at == brightness(page)
        assert 0 == client.get_buffer("red").state.lease_count


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_every_page_is_accessible_and_as_wide_as_its_window(
    chromium: Any, url: str, client: breadbox.Client, scheme: str, viewport: dict[str, int]
) -> None:
    axe = Axe()
    for at in range(3):
        client.append(played(at, obs=film(), reward=float(at), episode_id=at))
    for page in opened(chromium, url, viewport=viewport, color_scheme=scheme):
        for name, awaited in (
            ("overview", "Latest batch"),
            ("episodes/default", "3 of 3"),
            ("episode/default/1", "step 1 of 32"),
            ("learning/default", "Return of episodes"),
        ):
            go(page, url, f"#/{name}")
            page.get_by_text(awaited).first.wait_for()
            found = axe.run(page).response["violations"]
            serious = [each for each in found if each["impact"] in ("serious", "critical")]
            assert [] == [(each["id"], each["nodes"][0]["html"]) for each in serious], name
            overhang = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert 0 == overhang, name


NOTE_LABELS = """
    window.labels = [];
    const { fillText } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
      const size = this.measureText(text), at = this.getTransform().transformPoint({ x, y });
      const isInside = at.x >= size.actualBoundingBoxLeft && at.y >= size.actualBoundingBoxAscent
        && at.x + size.actualBoundingBoxRight <= this.canvas.width
        && at.y + size.actualBoundingBoxDescent <= this.canvas.height;
      window.labels.push([text, isInside]);
      return fillText.call(this, text, x, y, ...rest);
    };
"""
"""Notes each label of an axis, and if it is drawn inside its canvas."""


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_labels_of_axes_are_whole_and_times_are_those_of_a_day(
    chromium: Any, url: str, client: breadbox.Client, viewport: dict[str, int]
) -> None:
    client.append(played(0, reward=1e5))
    for page in opened(chromium, url, viewport=viewport):
        page.add_init_script(NOTE_LABELS)
        page.get_by_role("link", name="w0").wait_for()
        # One episode alone is one point in time.
        for name, over, awaited in (
            ("overview", "", ":"),
            ("learning/default", "steps", ","),
            ("learning/default", "time", ":"),
        ):
            page.goto("about:blank")
            go(page, url, f"#/{name}")
            if over:
                page.get_by_label("Over").select_option(over)
            is_drawn = f"labels.some(([text]) => text.includes('{awaited}'))"
            eventually_sync(lambda: page.evaluate(is_drawn), name)  # noqa: B023 - called here
            labels = page.evaluate("labels")
            times = [text for text, _ in labels if ":" in text]

            assert [] == [text for text, is_inside in labels if not is_inside], name
            assert [] == [text for text in times if not re.fullmatch(r"\d\d(:\d\d){1,2}", text)]
            assert [] == [text for text, _ in labels if re.search("[/a-z]", text)]


def test_a_narrow_page_has_cards_in_place_of_tables(
    chromium: Any, url: str, client: breadbox.Client
) -> None:
    client.append(played(0))
    for page in opened(chromium, url, viewport=NARROW):
        for name in ("overview", "episodes/default"):
            go(page, url, f"#/{name}")
            page.get_by_role("link", name="w0").first.wait_for()
            cells = page.evaluate(
                """() => [...document.querySelectorAll("td")].map((cell) => [
                    getComputedStyle(cell, "::before").content,
                    cell.getBoundingClientRect().right <= window.innerWidth,
                ])"""
            )
            assert cells
            assert [] == [label for label, is_inside in cells if label == "none" or not is_inside]
            # Lists are still sorted by their headings.
            assert page.get_by_role("button", name="Return", exact=True).count() == (
                name != "overview"
            )


def test_other_sites_can_neither_frame_nor_log_in_nor_reach_it_by_a_name(
    page: Any, url: str, client: breadbox.Client
) -> None:
    answer = page.request.get(url)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    login = f"{url}api/login"
    foreign = page.request.post(login, data={"token": "x"}, headers={"origin": "http://evil.test"})
    assert 403 == foreign.status
    assert 415 == page.request.post(login, form={"token": "x"}).status
    assert 400 == page.request.get(url, headers={"host": "evil.test"}).status
    assert 0 == client.get_buffer().state.lease_count
