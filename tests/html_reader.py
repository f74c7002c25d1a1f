"""Reads the HTML reports with the standard library, and checks that they can do no harm."""

from html.parser import HTMLParser

VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Elements, text and table rows of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()
        self.rows = [row for row in self.rows if row]  # a head has no td
        self.text = " ".join(" ".join(self.words).split()).replace("\u202f", " ")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        if "td" in self._open:
            self.rows[-1][-1] += data.replace("\u202f", " ")
        self.words.append(data)

    def policy(self) -> str:
        (policy,) = (at["content"] for _, at in self.elements if at.get("http-equiv") == "Content-Security-Policy")
        return policy or ""


def check_harmless(reader: Reader, scripts: int = 0) -> None:
    """No other script, no handler, nothing loaded from outside, and a policy that forbids all of it."""
    assert reader.unbalanced == []
    assert reader.policy().startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    tags = [tag for tag, _ in reader.elements]
    assert tags.count("script") == scripts
    assert not {*tags} & {"iframe", "object", "embed", "link", "base", "form", "foreignobject", "animate"}
    for tag, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "figures/", "metrics.jsonl", "data:image/")), (tag, name, value[:50])
        assert "url(http" not in (attributes.get("style") or "")
