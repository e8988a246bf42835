"""The page in a real browser, from a file, without a network."""

import re
import shutil
import time

import pytest

from noisecast.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with chromedriver on this machine")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(swept, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_report(swept, file)
    return file


def show(browser, file, width=DESKTOP, scheme="light", scripts=True):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what was said before is not ours
    browser.get(f"file://{file}")
    if scripts:
        wait_for(browser, "return !DATA.cells || document.querySelectorAll('#ends-chart path.line').length > 0")


def wait_for(browser, script, seconds=60):
    end = time.monotonic() + seconds
    while not browser.execute_script(script):
        assert time.monotonic() < end, script
        time.sleep(0.05)


def lines(browser, chart="ends"):
    return browser.execute_script(
        f"return [...document.querySelectorAll('#{chart}-chart g[data-series] path.line')].map((p) => "
        f"p.getAttribute('d'))"
    )


def turn(browser, label, by):
    """Move the slider of that accessible name with the arrow keys, as a keyboard user does."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    slider = browser.find_element(By.CSS_SELECTOR, f'input[type=range][aria-label="{label}"]')
    slider.send_keys(*([Keys.ARROW_RIGHT] * by if by > 0 else [Keys.ARROW_LEFT] * -by))
    return slider


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_it_renders_without_an_error_an_overflow_or_a_request(browser, page, width, scheme):
    show(browser, page, width, scheme)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    sent = [e["message"] for e in browser.get_log("performance") if "Network.requestWillBeSent" in e["message"]]
    assert all(f"file://{page}" in message or "data:," in message for message in sent)
    assert not browser.execute_script("return document.querySelector('svg.static-chart').checkVisibility()")
    for chart in ("ends", "curves", "prices"):
        assert any(len(d) > 10 for d in lines(browser, chart)), chart
    ink, paper = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor].map((c) => "
        "c.match(/\\d+/g).map(Number))"
    )
    assert (sum(ink) < sum(paper)) == (scheme == "light")
    assert contrast(ink, paper) > 7


def contrast(one, other):
    """Of two sRGB colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, page, scheme):
    show(browser, page, scheme=scheme)
    pairs = browser.execute_script("""
      const channels = (c) => c.match(/[\\d.]+/g).map(Number);
      const paper = (e) => { for (; e; e = e.parentElement) { const c = channels(getComputedStyle(e).backgroundColor);
        if (c.length === 3 || c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
      const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
      const ink = (e) => channels(getComputedStyle(e)[e instanceof SVGElement ? 'fill' : 'color']).slice(0, 3);
      return [...document.querySelectorAll('main *, header *')]
        .filter((e) => hasText(e) && e.getClientRects().length)
        .map((e) => [e.textContent.slice(0, 40), ink(e), paper(e)]);""")
    assert len(pairs) > 100
    weak = [(text, round(contrast(ink, on), 1)) for text, ink, on in pairs if contrast(ink, on) < 4.5]
    assert weak == []


def test_the_slider_moves_the_curves_by_keyboard(browser, page):
    show(browser, page)
    before, curves = lines(browser), lines(browser, "curves")
    slider = turn(browser, "learning rate, DP-SGD", -1)
    if lines(browser) == before:
        slider = turn(browser, "learning rate, DP-SGD", 1)
    after = lines(browser)
    assert slider.get_attribute("aria-valuetext") in ("0.5", "4")
    assert after != before and lines(browser, "curves") != curves
    assert browser.execute_script("return document.querySelector('input[name=mode]:checked').value") == "hand"
    assert "settings of the sliders" in browser.execute_script("return document.getElementById('ends-say').textContent")


def test_what_a_slider_shows_is_what_the_table_holds(browser, page):
    show(browser, page)
    turn(browser, "clip norm, DP-Adam", 1)
    turn(browser, "learning rate, DP-Adam", 1)
    held, shown = browser.execute_script("""
      const o = DATA.optimizers.findIndex((x) => x.name === 'DP-Adam');
      const r = DATA.runners.findIndex((x) => x.name === 'training');
      const isOurs = (c) => c[1] === DATA.shape && c[2] === r && c[3] === o && c[5] === 0.1 && c[6] === 0.5;
      const held = DATA.cells.flatMap((c, i) => isOurs(c) ? [DATA.ends.test_loss[i][0]] : []);
      const all = document.getElementById('ends-chart').spec.series;
      const series = all.find((s) => !s.faint && s.runner === r && s.optimizer === o);
      return [held.sort(), series.points.map((p) => p.y).sort()];""")
    assert held == shown and len(held) == 2


@pytest.mark.parametrize("label", ["expected batch size", "ε of one run"])
def test_batch_size_and_epsilon_move_them_too(browser, page, label):
    show(browser, page)
    chart = "ends" if "batch" in label else "curves"
    before = lines(browser, chart)
    turn(browser, label, 1)
    if lines(browser, chart) == before:
        turn(browser, label, -1)
    assert lines(browser, chart) != before


def test_settings_may_be_kept_and_metrics_changed(browser, page):
    show(browser, page)
    browser.execute_script("document.querySelector('input[value=kept]').click()")
    assert "kept at every ε" in browser.execute_script("return document.getElementById('ends-say').textContent")
    before = lines(browser)
    turn(browser, "tuned at ε", -1)
    assert "kept at every ε" in browser.execute_script("return document.getElementById('ends-say').textContent")
    browser.execute_script(
        "const s = document.querySelector('select[aria-label=Shown]'); s.value = 'test_accuracy';"
        "s.dispatchEvent(new Event('change'))"
    )
    assert lines(browser) != before
    assert "test accuracy" in browser.execute_script("return document.querySelector('#ends-chart svg').textContent")
    assert browser.get_log("browser") == []


def test_live_thresholds_are_those_of_the_table(browser, page):
    """Two implementations of one rule: the sliders' and `score_thresholds.py`."""
    show(browser, page)
    live = browser.execute_script("return document.getElementById('ends-thresholds').textContent")
    table = browser.execute_script("return document.querySelector('#thresholds table').textContent")
    ours = set(re.findall(r"ε\* ≈ ([\d.]+)", live))
    assert ours and ours <= set(re.findall(r"ε\* ≈ ([\d.]+)", table))


def test_values_are_read_by_mouse_finger_and_keys(browser, page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    tip = "const t = document.querySelector('#ends-chart .tip'); return t.hidden ? '' : t.textContent"
    assert browser.execute_script(tip) == ""
    chart = browser.find_element(By.CSS_SELECTOR, "#ends-chart svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(browser).move_to_element(chart).perform()
    wait_for(browser, tip)
    assert re.search(r"ε = .*DP-SGD, training: [\d.]+ ± [\d.]+, rate", browser.execute_script(tip))
    chart.send_keys(Keys.ESCAPE)
    assert browser.execute_script(tip) == ""
    chart.send_keys(Keys.ARROW_RIGHT)
    assert "forecast" in browser.execute_script(tip)


def test_without_javascript_the_answer_and_a_chart_are_there(browser, page):
    from selenium.webdriver.common.by import By

    show(browser, page, scripts=False)
    try:
        # By the boxes that were laid out: Selenium's is_displayed is itself a script.
        height = {
            name: browser.find_element(By.CSS_SELECTOR, name).rect["height"]
            for name in (".unscripted svg.static-chart", "#answer table", "#ends-controls")
        }
        assert height[".unscripted svg.static-chart"] > 200 and height["#answer table"] > 100
        assert height["#ends-controls"] == 0
        assert len(browser.find_elements(By.CSS_SELECTOR, ".snippet")) > 4
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_planted_markup_stays_text(browser, made, tmp_path):
    evil = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"
    file = tmp_path / "evil.html"
    write_report(made(lambda table: table.assign(problem=evil)), file)
    show(browser, file)
    assert browser.execute_script("return document.querySelectorAll('img, script').length") == 2
    assert evil in browser.execute_script("return document.querySelector('h1').textContent")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_models_page(browser, model_folder, tmp_path, width):
    file = tmp_path / "model.html"
    write_report(model_folder(), file)
    show(browser, file, width)
    wait_for(browser, "return document.querySelectorAll('#budget-chart path.line').length === 1")
    turn(browser, "noise multiplier", 1)
    assert len(lines(browser, "budget")) == 2
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_script("document.querySelector('button.copy').click()")
    wait_for(browser, "return document.getElementById('announce').textContent !== ''")
