"""The report in a browser: opened from disk, clicked through, and never talking to anyone."""

import base64
import io
import json
import shutil

import pytest
from made_runs import ATTACK, make_run, write_lines
from PIL import Image

from hotseat.observe.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SECTIONS = ("overview", "curves", "timeline", "phases", "memory", "machine", "distributions", "gap", "samples", "setup")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(BROWSERS)}")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=list(ARGUMENTS), timeout=300_000)
        yield started
        started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """By name: one run, several, one that attacks, and one of examples only."""
    path = tmp_path_factory.mktemp("runs")
    one = make_run(path / "carry", num_steps=60)
    two = make_run(path / "slow", num_steps=40, seed=3, learning_rate=3e-4)
    changed = make_run(path / "changed", num_steps=20)
    change = {"step": 11, "key": "actor.optimizer.learning_rate", "from": 1e-3, "to": 5e-4, "is_allowed": False}
    write_lines(changed / "changes.jsonl", [change])
    attack = make_run(path / "attack", num_steps=10, attack=ATTACK)
    examples = path / "sft"
    examples.mkdir()
    (examples / "config.yaml").write_text("task: sft\n")
    write_lines(examples / "metrics.jsonl", [{"step": step, "loss": 3 / step} for step in range(1, 30)])
    evaluation = path / "eval"
    evaluation.mkdir()
    (evaluation / "config.yaml").write_text("task: rl\n")
    write_lines(evaluation / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.5}])
    write_lines(evaluation / "answers.jsonl", [{"input": "1+1=", "output": "2"}])
    runs = {
        "evaluation": [evaluation],
        "one": [one],
        "several": [one, two, examples],
        "attack": [attack],
        "examples": [examples],
    }
    runs |= {"changed": [changed], "unchanged": [make_run(path / "unchanged", num_steps=20)]}
    runs |= {"agent": [make_run(path / "agent", num_steps=10, has_agent=True)]}
    runs |= {"images": [with_images(make_run(path / "images", num_steps=10))]}
    film = make_run(path / "film", num_steps=4)
    lines = [json.loads(line) for line in (film / "samples.jsonl").read_text().splitlines()]
    write_lines(film / "samples.jsonl", [line | {"film": moving_square()} for line in lines])
    runs |= {"film": [film]}
    return {name: write_report(run_dirs, path / f"{name}.html") for name, run_dirs in runs.items()}


def with_images(run):
    """Give every sample two images, of which small copies lie beside the prepared ones, and a prompt to be folded."""
    for name, width in (("narrow", 20), ("wide", 60)):
        Image.new("RGB", (width, 40), "teal").save(run / f"{name}.png")
    images = [str(run / f"{name}.safetensors") for name in ("narrow", "wide", "gone")]
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    shown = [{**line, "images": images, "prompt_text": f"Which is wider? {'word ' * 200}"} for line in lines]
    write_lines(run / "samples.jsonl", shown)
    return run


def moving_square() -> str:
    """An animated image of 24 x 24 pixels in which a red square moves to the right."""
    frames = []
    for at in range(0, 16, 4):
        frame = Image.new("RGB", (24, 24), (190, 180, 150))
        frame.paste((200, 30, 20), (at, 8, at + 8, 16))
        frames.append(frame)
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], duration=200, loop=0, lossless=True)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def open_report(browser, reports):
    """Opens a report; at the end of the test, whatever it complained about or asked the network for fails the test."""
    troubles: list[str] = []
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    context.set_default_timeout(300_000)

    def show(name):
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else troubles.append(request.url),
        )
        page.goto(reports[name].as_uri())
        page.wait_for_selector("#curves canvas")
        return page

    yield show
    context.close()
    assert troubles == []


def drawing(page, selector):
    """The pixels of a chart. Charts are drawn when they come near the window."""
    page.locator(selector).first.scroll_into_view_if_needed()
    page.wait_for_selector(f"{selector} canvas")
    page.wait_for_timeout(60)
    return page.eval_on_selector(f"{selector} canvas", "canvas => canvas.toDataURL()")


def await_number(page, selector, number):
    """Wait until there are so many of them, and no more. Charts are drawn one by one as they come near the window."""
    page.wait_for_function(
        "([selector, number]) => document.querySelectorAll(selector).length === number", arg=[selector, number]
    )


def num_samples(page):
    return page.locator("#samples .sample-list li").count()


def token_colours(page):
    return page.eval_on_selector_all(
        "#samples .token", "tokens => tokens.map((token) => getComputedStyle(token).backgroundColor)"
    )


def every_section_shows_something(page):
    assert page.title() == "carry – Hotseat report"
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
        assert page.locator(f"#{section}").bounding_box()["height"] > 100, section
        assert page.locator(f"#{section} .absent").count() == 0, section
    tiles = page.locator(".tile").all_inner_texts()
    assert any(text.startswith("Steps\n60") for text in tiles)
    await_number(page, "#curves canvas", 6)
    assert page.locator("#phases tbody tr").count() == 6
    num_charts_of = {"timeline": 1, "phases": 1, "memory": 2, "machine": 2, "distributions": 2, "gap": 2}
    for section, num_charts in num_charts_of.items():
        page.locator(f"#{section} .chart").last.scroll_into_view_if_needed()
        await_number(page, f"#{section} .chart canvas", num_charts)


def every_part_of_the_machine_has_a_colour_of_its_own(page):
    lists = page.locator("#machine .legend").all()
    assert [each.locator("li").all_inner_texts() for each in lists] == [
        ["processors", "device 0", "device 1"],
        ["host", "device 0", "device 1"],
    ]
    swatches = "list => [...list.querySelectorAll('.swatch')].map((each) => getComputedStyle(each).backgroundColor)"
    shares, memory = (each.evaluate(swatches) for each in lists)
    assert shares == memory
    assert len(set(shares)) == 3
    page.locator("#machine canvas").first.hover()
    tip = page.locator("#machine .tip").first
    tip.wait_for()
    assert "device 1\n50%" in tip.inner_text().replace("\t", "\n")


@pytest.mark.long
def test_changes_of_a_resumed_run_are_marked_in_curves_and_listed(open_report):
    card = '[data-metric="reward"]'
    page = open_report("changed")
    marked = drawing(page, card)
    assert "Dashed lines: settings were changed there" in page.locator("#curves").inner_text()
    row = page.locator("#setup table.changes tbody tr").inner_text().split()
    assert row == ["11", "actor.optimizer.learning_rate", "0.001", "0.0005"]
    page.locator("#curves button[data-value=seconds]").click()
    by_time = drawing(page, card)
    plain = open_report("unchanged")
    assert drawing(plain, card) != marked
    plain.locator("#curves button[data-value=seconds]").click()
    assert drawing(plain, card) != by_time
    assert plain.locator("#setup table.changes").count() == 0


def smoothing_changes_the_curve(page):
    card = '[data-metric="reward"]'
    before = drawing(page, card)
    page.locator("#smoothing").fill("0.95")
    smoothed = drawing(page, card)
    assert smoothed != before
    assert page.locator("output").inner_text() == "0.95"
    page.locator("#smoothing").fill("0")
    assert drawing(page, card) not in (before, smoothed)


def the_axis_can_be_time(page):
    before = drawing(page, '[data-metric="reward"]')
    page.get_by_role("button", name="Time").click()
    assert drawing(page, '[data-metric="reward"]') != before


def any_metric_can_be_found_and_shown(page):
    assert page.locator('article[data-metric="extra/format"]').count() == 0
    page.get_by_label("Find a metric").fill("form")
    assert page.locator(".metric:visible").all_inner_texts() == ["format"]
    page.locator(".metric:visible").click()
    page.wait_for_selector('article[data-metric="extra/format"] canvas')
    page.locator(".metric:visible").click()
    assert page.locator('article[data-metric="extra/format"]').count() == 0


def a_chart_tells_its_values(page):
    page.locator('[data-metric="reward"] canvas').hover()
    tip = page.locator('[data-metric="reward"] .tip')
    tip.wait_for()
    assert tip.inner_text().startswith("step ")
    assert "smoothed" in tip.inner_text()


def the_timeline_moves_through_the_steps(page):
    chosen = page.locator("#timeline select")
    assert [chosen.nth(at).evaluate("select => select.selectedOptions[0].text") for at in (0, 1)] == [
        "step 58",
        "step 60",
    ]
    before = drawing(page, "#timeline")
    page.get_by_role("button", name="Earlier steps").click()
    assert chosen.nth(0).evaluate("select => select.selectedOptions[0].text") == "step 55"
    assert drawing(page, "#timeline") != before
    page.get_by_role("button", name="Slowest").click()
    assert "slowest" in chosen.nth(0).evaluate("select => select.selectedOptions[0].text")
    page.get_by_label("First step").select_option(label="step 3")
    assert chosen.nth(0).input_value() == "2"
    assert page.locator("#timeline tbody tr").count() == 2
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 200, "y": 56})
    tip = page.locator("#timeline .tip")
    tip.wait_for()
    assert "takes" in tip.inner_text()


def filters_narrow_the_list(page):
    total = num_samples(page)
    assert total == 13 * 6
    page.get_by_label("Lowest reward").fill("0.5")
    right = num_samples(page)
    assert 0 < right < total
    page.get_by_label("Step", exact=True).select_option("30")
    in_step = num_samples(page)
    assert in_step < right
    page.get_by_role("button", name="Reset").click()
    assert num_samples(page) == total
    page.get_by_label("Source").select_option("math")
    assert num_samples(page) == total / 3
    page.get_by_label("State").select_option("failed")
    assert num_samples(page) == 0
    assert page.locator(".sample-detail").inner_text() == "No sample passes these filters."
    page.get_by_role("button", name="Reset").click()
    page.get_by_label("Search in texts").fill("each of 60 boxes")
    assert num_samples(page) == 6
    assert page.locator("#sample-count").inner_text() == "6 of 78 samples"


@pytest.mark.long
def test_images_of_a_prompt_are_in_view_above_its_tokens(open_report):
    page = open_report("images")
    page.locator("#samples .sample-list li").nth(0).click()
    assert page.locator("#samples details.prompt").get_attribute("open") is None
    images = page.locator("#samples .images img")
    assert images.count() == 2  # the third has no copy
    assert [image["w"] for image in images.evaluate_all("all => all.map((one) => ({w: one.naturalWidth}))")] == [20, 60]
    lowest = max(image.bounding_box()["y"] + image.bounding_box()["height"] for image in images.all())
    assert images.first.bounding_box()["height"] >= 40
    assert lowest <= page.locator("#samples .token").first.bounding_box()["y"]


def a_sample_shows_its_tokens_and_their_facts(page):
    page.locator("#samples .sample-list li").nth(3).click()
    assert "every answer of the group was worth the same" in page.locator(".pairs").inner_text()
    page.locator("#samples .sample-list li").nth(0).click()
    tokens = page.locator("#samples .token")
    assert tokens.count() == 99
    assert page.locator("#samples .token.context").count() == 7
    tokens.nth(20).hover()
    facts = page.locator(".token-facts").inner_text()
    assert "POSITION\n20" in facts.upper()
    assert "learned" in facts or "clipped" in facts or "corrected" in facts
    tokens.nth(1).hover()
    assert "context, not sampled" in page.locator(".token-facts").inner_text()
    tokens.nth(30).click()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.index") == "31"


def test_an_episode_in_a_simulator_is_shown_as_a_film(open_report):
    page = open_report("film")
    page.locator("#samples").scroll_into_view_if_needed()
    film = page.locator("#samples img.film")
    film.scroll_into_view_if_needed()
    assert film.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [24, 24]
    assert film.bounding_box()["height"] == 192


def test_an_episode_of_an_agent_is_a_conversation_with_its_rewards_tools_branches_and_times(open_report):
    page = open_report("agent")
    samples = page.locator("#samples")
    said, read = samples.locator(".talk-said"), samples.locator(".talk-read")
    assert [said.nth(at).locator(".talk-head b").inner_text() for at in range(said.count())] == [
        "Turn 1", "Turn 2", "Turn 3", "Turn 4",
    ]  # fmt: skip
    assert "reward −0.1" in said.nth(0).inner_text()
    assert said.nth(0).locator(".tool-call").inner_text() == 'multiply({"a": 17, "b": 32})'
    assert "544" in read.nth(1).inner_text()
    heads = samples.locator(".talk-segment").all_inner_texts()
    assert heads == ["Segment 1", "Segment 2, a branch of segment 1"]
    assert "tokens as in segment 1" in read.nth(3).inner_text()
    assert samples.locator(".time-turn").count() == 4
    assert "environment and tools" in samples.locator(".time-legend").inner_text()
    assert samples.locator(".token").count() == 0
    said.nth(2).locator("summary").click()  # token by token, where that is asked for
    said.nth(2).locator(".token").first.hover()
    assert '"The"' in said.nth(2).locator(".token-facts").inner_text()
    samples.get_by_role("button", name="Token by token", exact=True).click()
    assert said.count() == 0
    assert samples.locator(".token").count() > 100
    samples.get_by_role("button", name="Conversation").click()
    assert said.count() == 4
    samples.locator(".time-turn").nth(3).click()
    assert "About 400" in page.evaluate("document.activeElement.innerText")


def arrows_move_through_the_list(page):
    page.locator("#samples .sample-list").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    selected = page.locator('#samples li[aria-selected="true"]')
    assert selected.count() == 1
    assert selected.get_attribute("id") == "sample-1"
    assert page.locator(".sample-list").get_attribute("aria-activedescendant") == "sample-1"
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    item, around = selected.bounding_box(), page.locator(".sample-list").bounding_box()
    assert around["y"] <= item["y"] <= around["y"] + around["height"] - item["height"] + 2


def tokens_are_coloured_by_the_chosen_fact(page):
    seen = [token_colours(page)]
    for mode in ("Advantage", "Engine log-prob", "Weight version", "Fate"):
        page.get_by_role("button", name=mode).click()
        colours = token_colours(page)
        assert colours not in seen, mode
        assert len(set(colours[7:])) > (mode != "Advantage"), mode
        assert set(colours[:7]) == {"rgba(0, 0, 0, 0)"}, "context has no colour"
        seen.append(colours)


def dark_and_light(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light, curve = page.evaluate(background), drawing(page, '[data-metric="reward"]')
    page.get_by_role("button", name="Switch to dark colours").click()
    assert page.evaluate(background) != light
    assert drawing(page, '[data-metric="reward"]') != curve
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate(background) == light


def the_colours_are_those_of_the_system(page):
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector('html[data-theme="dark"]')


def episodes_without_a_film_show_none(page):
    assert page.locator("#samples img.film").count() == 0


def several_runs_share_curves_and_take_turns_elsewhere(page):
    assert page.locator("h1").inner_text() == "3 runs side by side"
    assert page.locator("#overview tbody tr").count() == 3
    before = drawing(page, '[data-metric="reward"]')
    page.get_by_role("checkbox", name="slow").uncheck()
    assert drawing(page, '[data-metric="reward"]') != before
    differences = page.locator("table.differences").inner_text()
    assert "actor.optimizer.learning_rate" in differences
    assert "samples_per_prompt" in differences  # the run of examples has it not
    page.locator("#samples select.run").select_option(label="slow")
    assert num_samples(page) == 9 * 6
    assert page.locator("#timeline select.run").input_value() == "1"
    page.locator("#phases select.run").select_option(label="sft")
    assert page.locator("#samples .absent").inner_text().startswith("This run recorded no samples")


def a_run_of_examples_says_what_is_absent(page):
    await_number(page, "#curves canvas", 1)
    for section in ("timeline", "phases", "memory", "machine", "distributions", "gap", "samples"):
        assert page.locator(f"#{section} .absent").count() == 1, section


def test_an_evaluation_has_no_sections_of_training(open_report):
    page = open_report("evaluation")
    shown = ("overview", "curves", "distributions", "samples", "setup")
    assert page.eval_on_selector_all("main section", "sections => sections.map((each) => each.id)") == list(shown)
    assert page.locator("#nav a").count() == len(shown)
    assert page.locator("#setup h3").all_inner_texts() == ["Config"]


def test_text_of_a_model_is_shown_and_not_run(open_report):
    page = open_report("attack")
    assert ATTACK in page.locator("#samples .prompt pre").inner_text()
    assert ATTACK in page.locator("#samples .tokens").inner_text()
    assert ATTACK in page.locator(".events").inner_text()
    page.locator("#samples .token", has_text="onerror").hover()
    assert "onerror" in page.locator(".token-facts").inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("window.attacked") is None


def nothing_is_wider_than_the_window(page):
    for width in (1440, 1280, 800, 420):
        page.set_viewport_size({"width": width, "height": 720})
        page.wait_for_timeout(100)
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        (
            "one",
            (
                every_section_shows_something,
                every_part_of_the_machine_has_a_colour_of_its_own,
                smoothing_changes_the_curve,
                the_axis_can_be_time,
                dark_and_light,
                any_metric_can_be_found_and_shown,
                the_timeline_moves_through_the_steps,
            ),
        ),
        (
            "one",
            (
                a_chart_tells_its_values,
                episodes_without_a_film_show_none,
                tokens_are_coloured_by_the_chosen_fact,
                a_sample_shows_its_tokens_and_their_facts,
                filters_narrow_the_list,
            ),
        ),
        pytest.param("one", (arrows_move_through_the_list,), marks=pytest.mark.long),
        pytest.param(
            "several",
            (several_runs_share_curves_and_take_turns_elsewhere, nothing_is_wider_than_the_window),
            marks=pytest.mark.long,
        ),
        ("examples", (a_run_of_examples_says_what_is_absent, the_colours_are_those_of_the_system)),
    ],
    ids=("sections, curves and timeline", "values and samples", "arrows", "several runs", "examples"),
)
def test_the_page(open_report, name, checks):
    """Check what does not depend on what was clicked before on the same page: to open a page takes seconds."""
    page = open_report(name)
    for check in checks:
        check(page)
