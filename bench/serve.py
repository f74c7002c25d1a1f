"""The server against LitServe and a plain Starlette script: the same ViT-Ti/16, the same photos, 64 clients.

    python -m bench.serve --data DIR [--weights FILE] [--clients 64] [--seconds 20] [--json FILE]

DIR is the data root: its imagenet-photos are sent as multipart/form-data, since LitServe takes no raw bodies. The
servers run one after the other, in rounds, each in processes of its own on the loopback interface. The clients are one
process on the same cores. CPU ms is the time that a server's processes spent per image, which other load on the machine
hardly changes; images/s and latency mean something only on idle cores.

plainvit     `plainvit serve`, with the backend and the precision that it chooses by itself
fp32         `plainvit serve --precision fp32`: as the two others
torch        `plainvit serve --precision fp32 --backend torch`: the model runs in PyTorch, too
litserve     LitServe with batches of 32 and a batch timeout of 2 ms, timm-style decoding by Pillow, PyTorch
plain        a Starlette route that decodes by Pillow and calls the model, one image at a time, in a thread pool

LitServe is measured where it is installed (pip install litserve).
"""

import asyncio
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.clients import encode_request, find_port, read_cpu_seconds, read_photos, send, start, summarise
from bench.measure import make_parser, publish, show, tell

# What the two peers do with a photo: Pillow, the preprocessing of the weights, fp32
MODEL = """
import io, sys, torch, numpy as np
from PIL import Image
import plainvit

class Classifier:
    def __init__(self, weights):
        self.model = plainvit.load(weights).eval()

    def decode(self, body):
        image = Image.open(io.BytesIO(body)).convert("RGB")
        scale = 248 / min(image.size)
        image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
        left, top = (image.width - 224) // 2, (image.height - 224) // 2
        pixels = np.asarray(image.crop((left, top, left + 224, top + 224)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    @torch.inference_mode()
    def predict(self, images):
        values, classes = self.model(images).softmax(-1).topk(5)
        return [{"classes": c, "probabilities": v} for c, v in zip(classes.tolist(), values.tolist())]
"""
LITSERVE = """
import litserve

class API(litserve.LitAPI):
    def setup(self, device):
        self.classifier = Classifier(WEIGHTS)

    def decode_request(self, request):
        return self.classifier.decode(request["image"].file.read())

    def batch(self, inputs):
        return torch.stack(inputs)

    def predict(self, images):
        return self.classifier.predict(images)

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return output

if __name__ == "__main__":
    api = API(max_batch_size=32, batch_timeout=0.002)
    litserve.LitServer(api, accelerator="cpu", timeout=60).run(port=PORT, host="127.0.0.1", generate_client_file=False)
"""
PLAIN = """
import asyncio, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

classifier = Classifier(WEIGHTS)

async def predict(request):
    async with request.form() as form:
        body = await form["image"].read()
    return JSONResponse(await asyncio.to_thread(lambda: classifier.predict(classifier.decode(body)[None])[0]))

uvicorn.run(Starlette(routes=[Route("/predict", predict, methods=["POST"])]), port=PORT, log_level="error")
"""


def commands(weights: Path, folder: Path) -> dict[str, tuple[list[str], int]]:
    """system -> its command and its port."""
    found: dict[str, tuple[list[str], int]] = {}
    exact = ["--precision", "fp32"]
    for name, flags in {"plainvit": [], "fp32": exact, "torch": [*exact, "--backend", "torch"]}.items():
        port = find_port()
        flags = [*flags, "--port", str(port), "--deadline", "60", "--no-explain"]
        found[name] = [sys.executable, "-m", "plainvit", "serve", f"ti={weights}", *flags], port
    for name, code in (("litserve", LITSERVE), ("plain", PLAIN)):
        port = find_port()
        script = folder / f"{name}_server.py"
        script.write_text(f"WEIGHTS, PORT = {str(weights)!r}, {port}\n{MODEL}{code}")
        found[name] = [sys.executable, str(script)], port
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--data", type=Path, required=True, help="the data root, with imagenet-photos and weights")
    parser.add_argument("--weights", type=Path, help="ViT-Ti/16 weights; default: weights/ of the data root")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    options = parser.parse_args(arguments)
    photos = [encode_request([photo]) for photo in read_photos(options.data)]
    weights = options.weights or options.data / "weights" / "vit_ti16_augreg.safetensors"
    left_out: list[str] = []
    results: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as folder:
        systems = commands(weights.resolve(), Path(folder))
        if importlib.util.find_spec("litserve") is None:
            tell("litserve: it is not installed (pip install litserve)", left_out)
            del systems["litserve"]
        for _ in range(options.repeats):
            for name, (command, port) in systems.items():
                results.setdefault(name, []).append(measure(command, port, photos, options))
    rows = [describe(name, some, results.get("litserve")) for name, some in results.items()]
    columns = ("server", "images/s", "p50 ms", "p99 ms", "CPU ms", "failed", "times litserve")
    title = f"ViT-Ti/16, {options.clients} clients, median of {options.repeats} rounds"
    show(title, columns, [list(row.values()) for row in rows], left=("server",))
    publish("bench.serve", arguments, options.json, title=title, rows=rows, rounds=results, left_out=left_out)


def measure(command: Sequence[str], port: int, photos: Sequence[bytes], options: Any) -> dict[str, float]:
    with start(command, port, photos) as session:
        asyncio.run(send(port, photos, clients=options.clients, seconds=2.0))  # warm up
        cpu = read_cpu_seconds(session)
        answers = asyncio.run(send(port, photos, clients=options.clients, seconds=options.seconds))
        cpu = (read_cpu_seconds(session) - cpu) / max(len(answers), 1)
    return summarise(answers) | {"cpu_ms": 1e3 * cpu}


def describe(name: str, some: list[dict[str, float]], reference: list[dict[str, float]] | None) -> dict[str, Any]:
    middle = {key: statistics.median(one[key] for one in some) for key in some[0]}
    ratio = middle["rate"] / statistics.median(one["rate"] for one in reference) if reference else None
    return {
        "server": name,
        "images_per_second": round(middle["rate"], 1),
        "p50_ms": round(middle["p50_ms"]),
        "p99_ms": round(middle["p99_ms"]),
        "cpu_ms": round(middle["cpu_ms"], 1),
        "failed": int(middle["failed"]),
        "ratio": "" if ratio is None else round(ratio, 2),
    }


if __name__ == "__main__":
    main()
