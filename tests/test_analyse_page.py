"""The report of an analysis: its attention data, its size, hostile names, and the explorer in a real browser."""

import base64
import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from html_reader import Reader, check_harmless
from pictures import encode, photo
from PIL import Image
from subjects import make_subject, pixels
from tiny import vit

import plainvit
from plainvit.analyse.analysis import analyse_model
from plainvit.analyse.explorer import (
    BUDGET,
    COARSEST,
    Plan,
    compute_views,
    count_bytes,
    describe_omissions,
    explorer_section,
    find_limits,
    plan_explorer,
    pooled_grid,
)
from plainvit.analyse.html import render_page
from plainvit.config import About
from plainvit.models import Trace
from plainvit.names import configure

HOSTILE = ["</script><img src=x onerror=document.title='harmed'>", '"><svg onload=alert(1)>', "<!--", "'; alert(1) //"]


def without_weights(name: str, image_size: int = 224) -> Any:
    """What a plan reads of a model."""
    config = configure(name, image_size=image_size)
    return SimpleNamespace(config=config, blocks=range(config.depth))


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="explorer-data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def decode(url: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        assert image.mode == "L"
        return np.array(image)


# What is in it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"registers": 2}, {"pool": "average", "class_token": False}])
def test_explorer_data_equals_the_attention_of_the_model(changes: dict[str, Any]) -> None:
    model = vit(**changes).float()
    data = embedded(explorer_section(make_subject(model))[0].body)
    trace = Trace("block*/attention")
    with torch.no_grad():
        model(pixels(model), trace)
    prefix = model.config.prefix
    for layer in range(3):
        attention = trace[f"block{layer}/attention"][1]  # of the second image, [H, N, N]
        rows = torch.cat((attention[:, prefix:], attention[:, :1]), 1) if prefix else attention  # [H, queries, N]
        for number, row in enumerate((rows.mean(0), *rows)):  # a layer has its mean and four heads
            view, patches = 5 * layer + number, row[:, prefix:]
            largest = patches.amax(1)
            expected = patches / largest[:, None]
            if prefix:  # the class token's own fraction, in a column of its own
                expected = torch.cat((expected, row[:, :1]), 1)
            assert abs(decode(data["maps"][1][view]) - 255 * expected.numpy()).max() <= 0.51
            assert abs(np.array(data["largest"][1][view]) - 1000 * largest.numpy()).max() <= 0.51
    assert data["reads"] == data["token"] == ("class token" if prefix else "")  # without one all patches are read


def test_cells_of_pooled_maps_are_sums_over_patches() -> None:
    """A grid of 3 x 5 patches in cells of 2 x 2: the cells of the last row and column have fewer patches."""
    model = vit().float()
    views = compute_views(model, pixels(model, 1)[0], Plan(1, pool=2, head_pool=1, layers=[2]))
    trace = Trace("block2/attention")
    with torch.no_grad():
        model(pixels(model, 1), trace)
    patches = trace["block2/attention"][0].mean(0)[1:, 1:].view(15, 3, 5)
    cells = [(slice(y, y + 2), slice(x, x + 2)) for y in (0, 2) for x in (0, 2, 4)]
    sums = torch.stack([patches[:, y, x].sum((1, 2)) for y, x in cells], 1)  # [15, 6]
    gray, largest, _ = views[2]
    assert abs(largest[:15] - 1000 * sums.amax(1).numpy()).max() <= 0.51
    assert abs(gray[:15, :6] - 255 * (sums / sums.amax(1, keepdim=True)).numpy()).max() <= 0.51
    assert [view.gray.shape for view in views] == [(16, 6 + 1)] * 3 + [(16, 15 + 1)] * 4


def test_a_few_large_values_do_not_hide_the_others() -> None:
    """The scale of a map ends at its 97th percentile, but at a tenth of its largest value at least."""
    maps = torch.rand(5, 196, generator=torch.Generator().manual_seed(0))
    maps[1, :5] = 9.0  # five patches with most of the attention
    maps[2] = 0.0
    maps[3, 1:] *= 0.01
    maps[3, 0] = 1.0
    expected = np.quantile(maps.numpy(), 0.97, axis=1, method="inverted_cdf")
    assert expected[1] < 1
    expected[2:4] = (0, 0.1)
    assert np.allclose(find_limits(maps).numpy(), expected)


# How large it grows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "images", "heads"),
    [("ViT-B/16", 224, 3, 12), ("ViT-Ti/16", 224, 6, 12), ("ViT-B/32", 224, 6, 12), ("ViT-L/16", 384, 1, 12)],
)
def test_plans_of_published_sizes(name: str, size: int, images: int, heads: int) -> None:
    """All heads of ViT-B/16 on three images; of ViT-L/16 at 384 pixels, those of every other layer on one."""
    model = without_weights(name, size)
    plan = plan_explorer(model, 128)
    assert count_bytes(model, plan) <= BUDGET  # 8.2 MB as base64, were it incompressible
    assert (plan.images, len(plan.layers)) == (images, heads)
    assert min(pooled_grid(model, plan.head_pool)) >= min(COARSEST, model.config.grid[0])
    assert plan.layers[-1] == len(model.blocks) - 1  # the last layer is always there


def test_omissions_are_described() -> None:
    model = without_weights("ViT-L/16", 384)
    text = describe_omissions(plan_explorer(model, 128), model, 128)
    assert [part in text for part in ("1 image,", "12 x 12", "6 x 6", "12 of 24 layers")] == [True] * 4
    assert "no heads" in describe_omissions(plan_explorer(model, 6, 2_000_000), model, 6)
    assert pooled_grid(model, plan_explorer(model, 6, 1).pool) == (1, 1)  # there is always a plan
    small = vit()
    assert describe_omissions(plan_explorer(small, 3), small, 3) == ""


def test_a_page_of_vit_b_16_stays_below_ten_megabytes() -> None:
    """With attention that is noise, which compresses worst: the plan's own number of images, at full size."""
    model = plainvit.create("ViT-B/16", depth=1).eval()  # one layer of the twelve, all of whose views are alike in size
    plan = plan_explorer(without_weights("ViT-B/16"), 128)
    section, script = explorer_section(make_subject(model, 1), Plan(1, plan.pool, plan.head_pool, [0]))
    photo = len(embedded(section.body)["images"][0]["source"])
    layer, rest = len(section.body) - photo, len(render_page("ViT-B/16", "", [], script=script))
    assert plan.images * (12 * layer + photo) + rest < 9_000_000


# What it may do -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model whose name, classes and images all have markup in their names."""
    root = tmp_path_factory.mktemp("page")
    model = vit(dtype=torch.float32, image_size=(32, 32), depth=2)
    model.about = About(class_names=tuple(f"{HOSTILE[at % 4]} {at}" for at in range(7)))
    model.head.bias.data[0] = 100.0  # every image is of the first class, whose name would close the script element
    weights = root / "<b onclick=alert(1)>.safetensors"
    plainvit.save(model, weights)
    (root / "photos").mkdir()
    for place, name in enumerate([*HOSTILE[1:3], "<img src=x onerror=document.title='harmed'>"]):
        path = root / "photos" / f"{place} {name.replace('/', '')}.png"
        path.write_bytes(encode(photo(40, 40, place)))
    return analyse_model(weights, str(root / "photos"), root / "out", device="cpu", quiet=True).report


def test_hostile_names_inject_no_markup_and_the_page_loads_nothing(hostile: Path) -> None:
    text = hostile.read_text()
    check_harmless(Reader(text), scripts=2)  # the data and the explorer
    assert "Analysis of &lt;b onclick=alert(1)&gt;" in text
    assert "url(" not in text.replace("url(#", "")


def test_the_policy_allows_one_script(hostile: Path) -> None:
    text = hostile.read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert Reader(text).policy().endswith(f"script-src 'sha256-{digest}'")


# In a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no browser: neither chromium nor google-chrome is on the PATH")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """One opened page, and all that it asked for or complained about."""

    def __init__(self, browser: Any, path: Path, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.settled()

    def settled(self) -> None:
        """Until every canvas shows what was asked for."""
        self.page.wait_for_selector("#explorer-stage[data-busy='0']")

    def canvases(self) -> list[str]:
        return self.page.evaluate("[...document.querySelectorAll('#explorer-stage canvas')].map(c => c.toDataURL())")

    def words(self) -> str:
        return self.page.inner_text("#explorer-words")

    def click(self, row: int, column: int, side: int = 4) -> None:
        box = self.page.locator("#explorer-image").bounding_box()
        at = {"x": (column - 0.5) * box["width"] / side, "y": (row - 0.5) * box["height"] / side}
        self.page.locator("#explorer-image").click(position=at)
        self.settled()

    def press(self, key: str) -> None:
        self.page.locator("#explorer-image").press(key)
        self.settled()

    def leave(self) -> None:
        self.context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file://", "data:", "blob:"))] == []
        assert len([url for url in self.asked if url.startswith("file://")]) == 1


def test_a_click_on_a_patch_changes_all_maps(browser: Any, hostile: Path) -> None:
    visit = Visit(browser, hostile, viewport={"width": 1100, "height": 900})
    before = visit.canvases()
    assert len(before) == 1 + 2 + 4  # the large one, two layers, four heads
    assert "Layer 2, mean of its heads: attention of the class token." in visit.words()
    assert "do not affect" not in visit.words()
    assert visit.page.get_by_label("heat map", exact=True).is_checked()  # images of 32 pixels
    visit.click(1, 4)
    assert "do not affect the prediction" in visit.words()
    after = visit.canvases()
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert "row 1, column 4" in visit.words()
    visit.page.get_by_role("button", name="layer 1").click()
    visit.settled()
    assert "Layer 1, mean of its heads" in visit.words()
    chosen = visit.canvases()
    assert chosen[1:3] == after[1:3]
    assert all(one != other for one, other in zip(chosen[3:], after[3:], strict=True))
    visit.page.get_by_role("button", name="head 3").click()
    visit.settled()
    assert "Layer 1, head 3" in visit.words()
    assert "do not affect" not in visit.words()
    even, most = 100 / 17, float(visit.words().split("Largest value: ")[1].split()[0])
    assert "uniform attention: 5.9 %" in visit.words()
    assert ("Nearly uniform" in visit.words()) == (most < 2 * even)
    assert visit.canvases()[0] != chosen[0]
    visit.page.get_by_role("button", name="the class token").click()
    visit.settled()
    assert "attention of the class token" in visit.words()
    cell = visit.page.locator("button.token")
    assert re.fullmatch(r"class token\s+\d+ %", cell.inner_text())  # of all attention; the test above has which
    filled = visit.page.locator("button.token i").bounding_box()["height"] / cell.bounding_box()["height"]
    assert abs(100 * filled - int(cell.inner_text().split()[-2])) < 5
    visit.page.locator(".choose button").nth(1).click()
    visit.settled()
    assert visit.page.title() == "Analysis of <b onclick=alert(1)>"  # no name has run
    visit.leave()


def test_the_explorer_by_keyboard_on_a_phone(browser: Any, hostile: Path) -> None:
    visit = Visit(browser, hostile, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390  # nothing sticks out
    before = visit.canvases()
    for key, where in (
        ("ArrowLeft", "row 3, column 3"),  # from the class token, which stands nowhere, into the middle
        ("ArrowLeft", "row 3, column 2"),
        ("ArrowDown", "row 4, column 2"),
        ("ArrowDown", "row 4, column 2"),
    ):
        visit.press(key)
        assert where in visit.words()
    assert all(one != other for one, other in zip(before, visit.canvases(), strict=True))
    visit.press("PageUp")
    assert visit.words().startswith("Layer 1,")
    visit.page.locator("#explorer-image").tap(position={"x": 5, "y": 5})
    visit.settled()
    assert "row 1, column 1" in visit.words()
    visit.leave()
