"""The chat page in headless Chromium, where there is one (pip install playwright, and a chromium on the PATH)."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.tiny_server import Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None or CHROMIUM is None:
        pytest.skip("no Chromium to drive (pip install playwright, and a chromium on the PATH)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark", "phone"])
def page(browser: Any, served: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    size = {"width": 375, "height": 700} if request.param == "phone" else {"width": 1200, "height": 760}
    scheme = "dark" if request.param == "dark" else "light"
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(served.url)
    until(page, "document.getElementById('model').textContent === 'tiny'")
    yield page
    assert faults == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def test_a_long_name_widens_nothing(page: Any) -> None:
    page.evaluate("document.getElementById('model').textContent = 'a-very-long-name/'.repeat(20)")
    for name in ("send", "text"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= page.viewport_size["width"]


def until(page: Any, condition: str) -> None:
    deadline = time.monotonic() + 20
    while not page.evaluate(f"() => !!({condition})"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def set_value(page: Any, name: str, value: str) -> None:
    page.evaluate("([name, value]) => { document.getElementById(name).value = value; }", [name, value])


WORKING, IDLE = (
    "document.getElementById('send').textContent === 'Stop'",
    "document.getElementById('send').textContent === 'Send'",
)


def test_send_stop_regenerate(page: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    set_value(page, "temperature", "0")
    set_value(page, "max_tokens", "5")
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    until(page, f"document.querySelector('.answer .foot')?.textContent.includes('written') && {IDLE}")
    first = page.locator(".answer").inner_text()
    assert "Infinity" not in first
    page.evaluate("document.querySelector('.answer').id = 'old'")
    page.click("#again")
    # The browser may tell of the click before the page has seen it.
    until(page, "!document.getElementById('old')")
    until(page, f"document.querySelector('.answer .foot')?.textContent.includes('written') && {IDLE}")
    assert page.locator(".answer").count() == 1
    assert page.locator(".answer").inner_text().split("\n")[0] == first.split("\n")[0]
    engine = served.service.running.llm.engine
    step = engine.step

    def slow_step(*arguments: Any) -> Any:
        """The whole of the answer would be there before the page has shown its beginning."""
        time.sleep(0.005)
        return step(*arguments)

    monkeypatch.setattr(engine, "step", slow_step)
    set_value(page, "max_tokens", "1900")
    page.fill("#text", "and now a long one")
    page.click("#send")
    until(page, f"{WORKING} && document.querySelectorAll('.answer').length === 2")
    page.keyboard.press("Escape")
    until(page, f"{IDLE} && document.querySelectorAll('.answer .foot')[1].textContent.startsWith('stopped')")
    deadline = time.monotonic() + 5
    while served.scheduler.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    page.click("#new")
    assert page.locator(".answer").count() == 0
    if page.locator("#panel").is_visible():
        page.click("#panel")
    assert "KV caches in use" in page.locator("#ledger").inner_text()


def test_markdown_is_shown_and_html_is_not_run(page: Any) -> None:
    text = (
        "# Title\n\nSome **bold** and `code` and [link](https://example.org).\n\n- one\n- two\n\n"
        "```python\nx = '<b>'\n```\n<img src=x onerror=\"document.title='broken'\">\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n[bad](javascript:alert(1))"
    )
    html = page.evaluate(
        "(text) => { const box = document.createElement('div'); box.append(markdown(text)); return box.innerHTML; }",
        text,
    )
    for part in (
        "<h1>Title</h1>",
        "<strong>bold</strong>",
        "<code>code</code>",
        '<a href="https://example.org"',
        "<ul><li>one</li><li>two</li></ul>",
        "<pre><code>x = '&lt;b&gt;'</code></pre>",
        "<td>2</td>",
        "&lt;img",
        "[bad](javascript:alert(1))",
    ):
        assert part in html
    assert "<img" not in html
    assert page.title() == "tiny"


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    import urllib.request

    with urllib.request.urlopen(served.url) as response:
        text, policy = response.read().decode(), response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "src=" not in text
    assert "@import" not in text
