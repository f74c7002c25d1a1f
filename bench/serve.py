"""The server compared with LitServe and a plain Starlette script: the same ViT-Ti/16, the same photos, 64 clients.

    python -m bench.serve --data DIR [--clients 64] [--seconds 20] [--json FILE]

The photos of imagenet-photos are sent as multipart/form-data, since LitServe accepts no raw bodies. The servers run
one after the other, in rounds, in their own processes. The clients are one process on the same cores. "CPU ms" is the
CPU time of the server per image, which other load on the machine hardly changes; measure images/s and latency on idle
cores.

plainvit     `plainvit serve`, with the backend and the precision that it chooses
fp32         `plainvit serve --precision fp32`
torch        `plainvit serve --precision fp32 --backend torch`
litserve     LitServe with batches of 32 and a batch timeout of 2 ms, PyTorch fp32 (pip install litserve)
plain        a Starlette route that calls the PyTorch model in a thread pool, one image at a time, fp32 (pip install
             python-multipart)
"""

import importlib.util
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.clients import encode_request, find_port, measure_server, start_server
from bench.measure import make_parser, print_table, warn_skipped, write_results
from bench.photos import read_photos

# The preprocessing of the weights by Pillow, and the model in fp32, for both peers
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


def make_commands(weights: Path, folder: Path) -> dict[str, tuple[list[str], int]]:
    """Server -> its command and port."""
    commands: dict[str, tuple[list[str], int]] = {}
    fp32 = ["--precision", "fp32"]
    for name, flags in {"plainvit": [], "fp32": fp32, "torch": [*fp32, "--backend", "torch"]}.items():
        port = find_port()
        flags = [*flags, "--port", str(port), "--deadline", "60", "--no-explain"]
        commands[name] = [sys.executable, "-m", "plainvit", "serve", f"ti={weights}", *flags], port
    for name, code in (("litserve", LITSERVE), ("plain", PLAIN)):
        port = find_port()
        script = folder / f"{name}_server.py"
        script.write_text(f"WEIGHTS, PORT = {str(weights)!r}, {port}\n{MODEL}{code}")
        commands[name] = [sys.executable, str(script)], port
    return commands


def make_row(name: str, rounds: list[dict[str, float]], litserve: list[dict[str, float]] | None) -> dict[str, Any]:
    median = {key: statistics.median(values[key] for values in rounds) for key in rounds[0]}
    return {
        "server": name,
        "images_per_second": round(median["rate"], 1),
        "p50_ms": round(median["p50_ms"]),
        "p99_ms": round(median["p99_ms"]),
        "cpu_ms": round(median["cpu_ms"], 1),
        "failed": int(median["failed"]),
        "ratio": round(median["rate"] / statistics.median(r["rate"] for r in litserve), 2) if litserve else "",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=3, data="imagenet-photos and weights")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="Duration of each measurement")
    args = parser.parse_args(arguments)
    requests = [encode_request([photo]) for photo in read_photos(args.data)]
    weights = args.data / "weights" / "vit_ti16_augreg.safetensors"
    skipped: list[str] = []
    rounds: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as folder:
        commands = make_commands(weights.resolve(), Path(folder))
        for name, module in {"litserve": "litserve", "plain": "python_multipart"}.items():
            if importlib.util.find_spec(module) is None:
                warn_skipped(f"{name}: {module} is not installed (pip install litserve python-multipart)", skipped)
                del commands[name]
        for _ in range(args.repeats):
            for name, (command, port) in commands.items():
                with start_server(command, port, requests) as session:
                    result = measure_server(session, port, requests, clients=args.clients, seconds=args.seconds)
                rounds.setdefault(name, []).append(result)
    rows = [make_row(name, results, rounds.get("litserve")) for name, results in rounds.items()]
    columns = ("server", "images/s", "p50 ms", "p99 ms", "CPU ms", "failed", "x litserve")
    title = f"ViT-Ti/16, {args.clients} clients, median of {args.repeats} rounds"
    print_table(title, columns, [list(row.values()) for row in rows], left=("server",))
    write_results("bench.serve", arguments, args.json, title=title, rows=rows, rounds=rounds, skipped=skipped)


if __name__ == "__main__":
    main()
