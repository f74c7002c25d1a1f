"""The page of the server in Chromium: predictions, maps, keyboard, camera, hostile names, no outside request."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictures import plant
from servers import photos, serving
from tiny import vit

import plainvit
from plainvit.config import About
from plainvit.evaluate.predictor import Predictor
from plainvit.serve.explain import Explainer

HOSTILE = "<img src=x onerror=document.title='harmed'>"
SLOW_MODELS = """const quick = window.fetch;
window.fetch = async (path, options) => {
    if (path === "/models") await new Promise((resolve) => setTimeout(resolve, 300));
    return quick(path, options);
};"""

LATE_FIRST_PREDICTION = """const quick = window.fetch;
let predictions = 0;
window.fetch = async (path, options) => {
    if (!path.startsWith("/predict") || predictions++) return quick(path, options);
    await new Promise((resolve) => setTimeout(resolve, 1000));
    setTimeout(() => { document.body.dataset.late = "yes"; }, 100);
    return Response.json({ results: [{ predictions: [{ label: "stale", probability: 1, class: 0 }] }] });
};"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no browser: neither chromium nor google-chrome is on the PATH")
    flags = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=flags)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model with hostile class names, and an evaluation of 100 photos next to it."""
    folder = tmp_path_factory.mktemp("run")
    model = vit(torch.float32)
    model.about = About(class_names=tuple(f"{HOSTILE} {at}" for at in range(7)))
    plainvit.save(model, folder / "model.safetensors")
    rows = {"probability": np.linspace(0.2, 1, 100), "right": np.arange(100) % 4 > 0}
    shuffled = np.random.default_rng(0).permutation(100)
    pq.write_table(pa.table(rows).take(shuffled), folder / "images.parquet")
    return Predictor(folder / "model.safetensors", device="cpu")


class Visit:
    """One opened page, and all that it asked for or complained about."""

    def __init__(self, browser: Any, address: str, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def choose(self, *some: bytes) -> None:
        files = [{"name": f"{at}.jpg", "mimeType": "image/jpeg", "buffer": one} for at, one in enumerate(some)]
        self.page.set_input_files("#files", files)

    def give(self, some: list[bytes]) -> None:
        self.choose(*some)
        self.page.wait_for_selector("#predictions li")
        self.page.locator("#map-words", has_text="Where attention").wait_for()

    def draw(self) -> str:
        return self.page.evaluate("document.querySelector('#canvas').toDataURL()")

    def close(self, address: str) -> None:
        assert self.said == []
        assert all(url.startswith((address, "data:", "blob:")) for url in self.asked)
        self.context.close()


def test_photos_give_predictions_confidence_and_maps(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address, viewport={"width": 390, "height": 800})
        visit.give(photos(2))
        page, (expected,) = visit.page, predictor(photos(1))
        assert page.locator("#predictions bdi").all_inner_texts() == [one.label for one in expected]
        shown = page.locator("#predictions span").all_inner_texts()
        assert shown == [f"{100 * one.probability:.1f} %" for one in expected]
        assert "of the 25 test photos" in page.inner_text("#confidence").lower()
        drawn = [visit.draw()]
        for name in ("Photo", "Rollout", "One head"):
            page.get_by_text(name, exact=True).click()
            drawn.append(visit.draw())
        page.get_by_role("slider", name="Layer").fill("1")
        drawn.append(visit.draw())
        page.get_by_role("slider", name="Head").press("ArrowRight")
        assert "Layer 1, head 1" in page.inner_text("#map-words")
        drawn.append(visit.draw())
        assert len(set(drawn)) == 6
        assert "Strongest in row" in page.get_attribute("#canvas", "aria-label")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.title() == "plainvit"  # the names of the classes were not run
        visit.close(server.address)


def test_everything_works_by_keyboard(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address)
        visit.give(photos(2))
        page = visit.page
        labels = page.evaluate("""() => [...document.querySelectorAll('button, input, select')]
            .filter((one) => one.offsetParent && one.tabIndex >= 0)
            .map((one) => one.innerText || one.labels?.[0]?.innerText || one.querySelector('img')?.alt || '')""")
        assert all(label.strip() for label in labels)
        page.focus("#strip button:nth-child(2)")
        page.keyboard.press("Enter")
        assert page.get_attribute("#strip button:nth-child(2)", "aria-pressed") == "true"
        first = page.inner_text("#map-words")
        page.focus("#predictions li:nth-child(2) button")
        page.keyboard.press("Enter")
        page.locator("#map-words", has_not_text=first).wait_for()
        assert page.evaluate(
            "document.activeElement.parentElement === document.querySelector('#predictions').children[1]"
        )
        assert page.inner_text("#status").startswith("1.jpg: ")
        visit.close(server.address)


def test_photos_may_come_before_the_names_of_the_models(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address)
        visit.page.add_init_script(SLOW_MODELS)
        visit.page.reload()
        visit.give(photos(1))
        visit.close(server.address)


def test_the_camera_gives_a_photo(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address, permissions=["camera"])
        visit.page.click("#camera")
        visit.page.locator("#camera-dialog[open]").wait_for()
        visit.page.evaluate("document.querySelector('#video').play()")
        visit.page.click("#shoot")
        visit.page.wait_for_selector("#predictions li")
        visit.close(server.address)


def test_a_broken_photo_and_a_missing_token_are_explained(browser: Any, predictor: Predictor) -> None:
    with serving(predictor, token="secret") as server:
        visit = Visit(browser, server.address)
        visit.choose(b"nothing")
        visit.page.locator("#error", has_text="0.jpg: Enter the token").wait_for()
        for token, problem in (("wrong", "The token is wrong."), ("secret", "")):
            visit.page.fill("#token", token)
            visit.page.click("#token-form button")
            visit.page.locator("#problem", has_text=re.compile(f"^{problem}$")).wait_for(state="attached")
        visit.page.locator("#model-name", has_text="tiny").wait_for()
        visit.page.locator("#error", has_text="0.jpg: the format is not supported").wait_for()  # sent again
        visit.context.close()


def test_a_missing_camera_is_explained(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address)
        visit.page.evaluate("() => { navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error()); }")
        visit.page.click("#camera")
        visit.page.get_by_text("The camera is not available.").wait_for()
        assert visit.page.locator("#problem").bounding_box()["width"] > 100  # not only for screen readers
        visit.close(server.address)


def test_the_page_says_why_there_is_no_map(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address)
        visit.page.route("**/explain*", lambda route: route.fulfill(status=404, json={"error": "turned off"}))
        visit.choose(*photos(1))
        visit.page.locator("#map-words", has_text="turned off").wait_for(timeout=5000)
        visit.context.close()


def test_responses_of_the_model_before_are_not_shown(browser: Any, predictor: Predictor) -> None:
    with serving(predictor) as server:
        visit = Visit(browser, server.address)
        visit.page.add_init_script(LATE_FIRST_PREDICTION)
        visit.page.reload()
        visit.choose(*photos(1))
        visit.page.dispatch_event("#model", "change")  # as if another one was chosen
        visit.page.wait_for_selector("body[data-late]")
        assert "stale" not in visit.page.locator("#predictions bdi").all_inner_texts()
        visit.context.close()


@pytest.mark.parametrize("probability", [0.0, 0.21, 0.537, 1.0])
def test_confidence_is_that_of_the_evaluated_photos_with_the_nearest_probability(
    predictor: Predictor, probability: float
) -> None:
    rows = pq.read_table(Path(predictor.source).parent / "images.parquet").to_pylist()
    nearest = sorted(rows, key=lambda row: abs(row["probability"] - probability))[:25]
    confidence = Explainer(predictor).describe_confidence(probability)
    assert confidence
    assert (confidence["of"], confidence["right"]) == (25, sum(row["right"] for row in nearest))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of eight photos in two classes, of which one has a hostile name."""
    folder = tmp_path_factory.mktemp("data")
    names = ("a", HOSTILE.replace("/", ""))
    plant(folder, {f"{names[at % 2]}/{at}.png": one for at, one in enumerate(photos(8, "PNG"))})
    return str(folder)


def test_the_nearest_training_photos_are_the_most_similar(
    predictor: Predictor, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    some, explainer = photos(8, "PNG"), Explainer(predictor, training)
    features = torch.nn.functional.normalize(predictor.features(predictor.stack(some)), dim=-1)
    expected = (features @ features[3]).sort(descending=True)
    found = explainer.find_neighbors(predictor.load_image(some[3]))
    assert [one["label"] for one in found] == [("a", HOSTILE)[at % 2] for at in expected.indices[:6].tolist()]
    assert [one["similarity"] for one in found] == pytest.approx(expected.values[:6].tolist(), abs=1e-5)


def test_the_page_shows_the_nearest_training_photos(
    browser: Any, predictor: Predictor, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(predictor, neighbors=training) as server:
        visit = Visit(browser, server.address, viewport={"width": 390, "height": 800})
        visit.give(photos(1))
        page, expected = visit.page, server.service.explainer.find_neighbors(predictor.load_image(photos(1)[0]))
        assert page.locator("#neighbors bdi").all_inner_texts() == [one["label"] for one in expected]
        assert f"similarity {expected[0]['similarity']:.2f}" in page.inner_text("#neighbors li")
        sizes = page.evaluate("[...document.querySelectorAll('#neighbors img')].map((one) => one.naturalWidth)")
        assert len(sizes) == 6
        assert all(sizes)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.title() == "plainvit"
        visit.close(server.address)
