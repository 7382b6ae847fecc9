"""The dashboard as a person sees it: in a headless Chromium, against a real daemon."""

import threading
from collections.abc import Iterator

import pytest

from tests.daemon.command_line import BOTH_TIERS, numpy_cache, put
from tests.daemon.test_dashboard import Dashboard, dashboard_of
from tests.support.browser import Browser, Page, chromium, until
from tests.support.daemon_process import DaemonProcess

CHROMIUM = chromium()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

SYSTEM = list(range(1000))
HOSTILE = (
    '<script>window.hostile=1</script><img src=x onerror="window.hostile=2">'
    '<a href="https://evil.example/">x</a>'
)
CHARTS = ("ram", "ssd", "tokens", "takes", "latency", "writer")
STATE = "document.getElementById('state').textContent"
TREE_BOXES = "document.querySelectorAll('#tree path.surface').length"
SLICES = "[...document.querySelectorAll('#tree g.slice')]"
REQUESTS = "performance.getEntriesByType('resource').filter(e => e.name.includes('/look')).length"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            for number in range(3):
                chat = [*SYSTEM, *range(20_000 * (number + 1), 20_000 * (number + 1) + 400)]
                put(cache, chat, "model")
                assert cache.take([*chat, 1], namespace="model", session=f"chat {number}")
            put(cache, SYSTEM, HOSTILE)
            assert cache.take([*SYSTEM, 1], namespace=HOSTILE, session=HOSTILE)
            assert not cache.take([7, 8, 9], namespace="none")
            assert cache.flush()
        yield process
        print(process.log())


@pytest.fixture(scope="module")
def dashboard(daemon: DaemonProcess) -> Iterator[Dashboard]:
    with dashboard_of(daemon) as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as one:
        yield one


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    yield (one := live(browser.open(dashboard.address)))
    browser.call("Target.closeTarget", targetId=one.target)


def live(page: Page) -> Page:
    """Wait until everything was drawn once."""
    page.wait_for(f"{STATE} === 'live' && {TREE_BOXES} > 3")
    return page


def hover(page: Page, element: str) -> None:
    """Move the mouse over the middle of an element."""
    page.value(f"{element}.scrollIntoView({{block: 'center'}})")
    box = page.value(
        f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())"
    )
    for step in (-2, 0):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + step, y=box[1])


def troubles(page: Page) -> list[str]:
    """What the browser complained of, but for the styles of the charting library's maps.

    The page's policy refuses them, and no chart here needs them.
    """
    said = [entry["entry"]["text"] for entry in page.events("Log.entryAdded")]
    thrown = [str(event) for event in page.events("Runtime.exceptionThrown")]
    return [text for text in said if not text.startswith("Applying inline style")] + thrown


def test_everything_is_drawn(page: Page) -> None:
    """Tiers, hits and misses, tokens, latency, tree, clients, writer, pressure; no complaint."""
    for chart in CHARTS:
        page.wait_for(f"document.querySelectorAll('#{chart} .trace').length >= 1")
    text = page.text()
    for shown in (
        "RAM", "SSD", "Tokens saved", "Takes that hit", "empty 1", "Writer", "Memory pressure",
        "Prefix tree", "chat 2", "4 pieces", "take", "p99",
    ):  # fmt: skip
        assert shown in text, shown
    assert troubles(page) == []


def test_it_works_offline(page: Page, dashboard: Dashboard) -> None:
    """Every request goes to the dashboard, below its token."""
    addresses = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert len(addresses) > 5
    assert not [one for one in addresses
                if not one.startswith((dashboard.address, "data:"))]  # fmt: skip
    sent = [event["headers"] for event in page.events("Network.requestWillBeSentExtraInfo")]
    assert len(sent) > 5
    assert not any(name.lower() == "referer" for headers in sent for name in headers)


def test_names_are_text(page: Page) -> None:
    """A namespace and a label that are markup are shown as they are, and make no element."""
    assert HOSTILE[:60] in page.text()
    boxes = page.value("[...document.querySelectorAll('#tree text')].map(e => e.textContent)")
    assert any(box.startswith("<script>") for box in boxes), boxes
    hover(page, f"{SLICES}.find(e => e.textContent.includes('<script>'))")
    page.wait_for("document.querySelector('#tree .hoverlayer').textContent.includes('<script>')")
    assert page.value("document.querySelectorAll('script').length") == 2
    assert page.value("document.querySelectorAll('main img, main a, main script').length") == 0
    assert page.value("window.hostile") is None
    assert troubles(page) == []


def test_hovering_over_the_tree_says_who_shares_it(page: Page) -> None:
    """Tokens, bytes, tier, branches, conversations, and when it was last used."""
    hover(page, f"{SLICES}.filter(e => e.textContent.startsWith('0')).at(-1)")
    page.wait_for("document.querySelector('#tree .hoverlayer').textContent.includes('branches')")
    text = page.value("document.querySelector('#tree .hoverlayer').textContent")
    for shown in ("tokens)", "RAM and SSD", "shared by 3 branches", "chat 0", "last used"):
        assert shown in text, text


def test_a_box_is_as_wide_as_its_tokens_or_bytes(page: Page) -> None:
    """The choice changes the widths, and stays while the page goes on."""
    values = "document.getElementById('tree').data[0].values"
    tokens = page.value(values)
    page.value("document.querySelector('#width [value=nbytes]').click()")
    assert page.value(values) != tokens
    assert page.value("document.querySelector('#width [value=nbytes]').ariaPressed") == "true"
    page.value("document.querySelector('#width [value=tokens]').click()")
    assert page.value(values) == tokens


def test_the_span_can_be_chosen(page: Page) -> None:
    """Two minutes, an hour, a day: the axis says so."""
    axis = "document.getElementById('ram').layout.xaxis.range.map(t => Date.parse(t))"
    for name, seconds in (("hour", 3600), ("day", 86400), ("recent", 120)):
        page.value(f"document.querySelector('#span [value={name}]').click()")
        begin, end = page.value(axis)
        assert (end - begin) / 1000 == seconds


def test_it_is_live(page: Page, daemon: DaemonProcess) -> None:
    """What a client does shows without a reload."""
    takes = "document.querySelector('#requests td:nth-child(2)').textContent"
    before = page.value(takes)
    with numpy_cache(daemon.socket) as cache:
        assert cache.take([*SYSTEM, 1], namespace="model")
        page.wait_for(f"{takes} !== '{before}'")
        page.wait_for("document.getElementById('clients').textContent.includes('prefixcached')")


def test_a_waiting_take_is_seen(page: Page, daemon: DaemonProcess) -> None:
    """Q2: what is being computed, and how many wait for it."""
    cold = list(range(90_000, 93_000))
    with numpy_cache(daemon.socket) as claimant, numpy_cache(daemon.socket) as waiter:
        claimed = claimant.take(cold, namespace="w")
        assert not claimed
        thread = threading.Thread(
            target=waiter.take, args=(cold,), kwargs={"namespace": "w", "wait": 60.0}
        )
        thread.start()
        page.wait_for("document.getElementById('claims').textContent.includes('2,999')")
        page.wait_for("document.querySelector('#claims td:last-child').textContent === '1'")
        put(claimant, cold, "w")
        thread.join(30)
        assert not thread.is_alive()


def test_a_hidden_page_asks_nothing(page: Page, browser: Browser, dashboard: Dashboard) -> None:
    """Behind another tab it pauses, and it goes on when it is seen again."""
    other = live(browser.open(dashboard.address))
    browser.call("Target.activateTarget", targetId=other.target)
    page.wait_for(f"document.hidden && {STATE} === 'paused'")
    asked = page.value(REQUESTS)
    before = other.value(REQUESTS)
    until(lambda: other.value(REQUESTS) >= before + 3, "the page that is seen asks on")
    assert page.value(REQUESTS) == asked
    browser.call("Target.closeTarget", targetId=other.target)
    browser.call("Target.activateTarget", targetId=page.target)
    page.wait_for(f"!document.hidden && {STATE} === 'live' && {REQUESTS} > {asked}")


def test_light_and_dark_follow_the_reader(browser: Browser, dashboard: Dashboard) -> None:
    """Colours of page and charts follow the system's, also while the page is open."""
    page = live(browser.open(dashboard.address, prefers_color_scheme="light"))
    colours = ("[getComputedStyle(document.body).backgroundColor, "
               "document.getElementById('ram').layout.font.color]")  # fmt: skip
    light = page.value(colours)
    page.call("Emulation.setEmulatedMedia",
              features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    page.wait_for(f"{colours}[1] !== '{light[1]}'")
    assert page.value(colours)[0] != light[0]
    browser.call("Target.closeTarget", targetId=page.target)


def test_it_fits_a_narrow_window(page: Page) -> None:
    """A phone's width scrolls down, not sideways."""
    page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1,
              mobile=False)  # fmt: skip
    page.wait_for("document.documentElement.scrollWidth <= 400")


def test_a_daemon_that_goes_is_waited_for(browser: Browser) -> None:
    """The page says so, keeps what it had, and shows the next run when it comes."""
    with DaemonProcess() as daemon, dashboard_of(daemon) as dashboard:
        page = browser.open(dashboard.address)
        page.wait_for(f"{STATE} === 'live'")
        assert f"process {daemon.pid}" in page.text()
        daemon.kill()
        page.wait_for(f"{STATE}.startsWith('trying again: no daemon')")
        assert "Memory pressure" in page.text()
        daemon.start()
        page.wait_for(f"{STATE} === 'live'")
        assert f"process {daemon.pid}" in page.text()
        browser.call("Target.closeTarget", targetId=page.target)
