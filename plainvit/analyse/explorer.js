/* Click a patch of an image to see its attention in every layer and head that the page contains. explorer.py writes the data:
   maps[image][view] is the URL of a gray PNG with a row for each query (patches in reading order, then the token) and a column
   for each cell of pool x pool patches; white is limit[image][view][query] (in per mille) or more. A last column has the token's
   fraction. largest[image][view][query] is the largest value, also in per mille. Views: for each layer its mean, then its heads
   if it is in layersWithHeads. `reads` names the tokens that the head of the model reads, if it does not read the patches. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const root = document.getElementById("explorer-stage");
  const [rows, columns] = data.grid, patches = rows * columns, ratio = data.size[0] / data.size[1];
  const middle = (rows >> 1) * columns + (columns >> 1);
  const layers = [];
  for (let layer = 0, next = 0; layer < data.layers; layer++) {
    const mean = { at: next++, pool: data.pool }, heads = [];
    if (data.layersWithHeads.includes(layer))
      for (let head = 0; head < data.heads; head++) heads.push({ at: next++, pool: data.headPool });
    layers.push({ mean, heads });
  }
  const state = { image: 0, query: data.reads ? patches : middle, layer: data.layers - 1, head: null, heat: true };
  const loadedImages = new Map(), decoded = new Map();

  function make(name, parent, settings = {}, attributes = {}) {
    const made = Object.assign(document.createElement(name), settings);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return parent.appendChild(made);
  }

  function newCanvas(width, height) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    return [canvas, canvas.getContext("2d", { willReadFrequently: true })];
  }

  function load(source) {
    if (!loadedImages.has(source)) {
      const image = Object.assign(new Image(), { src: source });
      loadedImages.set(source, image.decode().then(() => image));
    }
    return loadedImages.get(source);
  }

  // The gray values of a map, one byte for each query and cell
  async function readMap(source) {
    if (!decoded.has(source)) {
      const image = await load(source), [, context] = newCanvas(image.width, image.height);
      context.drawImage(image, 0, 0);
      const pixels = context.getImageData(0, 0, image.width, image.height).data;
      decoded.set(source, Uint8Array.from({ length: pixels.length / 4 }, (_, i) => pixels[4 * i]));
    }
    return decoded.get(source);
  }

  let painting = 0;
  const countPainting = (more) => { root.dataset.busy = String(painting += more); };

  async function paint(canvas, view) {
    countPainting(1);
    try { await drawMap(canvas, view); } finally { countPainting(-1); }
  }

  // The image in gray under a heat map, or dark where attention is low; the selected patch has a frame
  async function drawMap(canvas, { at, pool }) {
    const { image, query } = state, ticket = (canvas.ticket = (canvas.ticket || 0) + 1);
    const photo = await load(data.images[image].source), gray = await readMap(data.maps[image][at]);
    if (ticket !== canvas.ticket) return; // another map was requested meanwhile
    const context = canvas.getContext("2d"), { width, height } = canvas;
    const down = Math.ceil(rows / pool), across = Math.ceil(columns / pool), cells = down * across;
    const first = query * (cells + (data.token ? 1 : 0));
    context.imageSmoothingEnabled = !data.crisp;
    context.drawImage(photo, 0, 0, width, height);
    if (state.heat) {
      context.globalCompositeOperation = "saturation"; // with gray: the image without its colors
      context.fillStyle = "#808080";
      context.fillRect(0, 0, width, height);
      context.globalCompositeOperation = "source-over";
    }
    const [small, smallContext] = newCanvas(across, down), overlay = smallContext.createImageData(across, down);
    for (let i = 0; i < cells; i++) overlay.data.set((state.heat ? heatColor : shade)(gray[first + i] / 255), 4 * i);
    smallContext.putImageData(overlay, 0, 0);
    context.imageSmoothingEnabled = false; // the last row and column of cells may reach beyond the image
    context.drawImage(small, 0, 0, (width * across * pool) / columns, (height * down * pool) / rows);
    if (query < patches) drawFrame(context, query, width, height);
    if (canvas === main && token) showToken(gray[first + cells] / 255);
  }

  // The overlay of a pixel, [red, green, blue, alpha], by its fraction of the limit
  const shade = (fraction) => [0, 0, 0, 165 * (1 - fraction)];
  const COLORS = [[13, 8, 65], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]]; // as in .ramp.heat
  function heatColor(fraction) {
    const at = fraction * (COLORS.length - 1), low = Math.min(Math.floor(at), COLORS.length - 2);
    return [...COLORS[low].map((from, i) => from + (at - low) * (COLORS[low + 1][i] - from)), 115 + 90 * fraction];
  }

  function showToken(fraction) {
    token.style.setProperty("--fraction", `${100 * fraction}%`);
    tokenFraction.textContent = `${(100 * fraction).toFixed(0)} %`;
    token.setAttribute("aria-label", `the ${data.token}: ${tokenFraction.textContent} of the attention`);
  }

  function drawFrame(context, query, width, height) {
    const x = query % columns, y = Math.floor(query / columns);
    context.lineWidth = Math.max(2, width / 140);
    context.strokeStyle = "#ffb000";
    context.strokeRect((x * width) / columns, (y * height) / rows, width / columns, height / rows);
  }

  // Layout
  const left = make("div", root, { className: "stage" }), right = make("div", root, { className: "views" });
  const stage = make("div", left, { className: data.token ? "token-and-image" : "" });
  const token = data.token && make("button", stage, { type: "button", className: "token" },
    { title: `the ${data.token}: its fraction of the attention; click to see its own attention` });
  if (token) {
    make("i", token);
    make("span", token, { textContent: data.token });
    token.onclick = () => change({ query: patches });
  }
  const tokenFraction = token && make("b", token);
  const main = make("canvas", stage, { width: 840, height: Math.round(840 * ratio), tabIndex: 0, id: "explorer-image" },
    { role: "application", "aria-describedby": "explorer-words" });
  const scale = make("p", left, { className: "note scale" });
  scale.append("0 ");
  const ramp = make("span", scale, { className: "ramp" });
  const limitText = make("span", scale);
  const heat = make("label", scale);
  make("input", heat, { type: "checkbox", checked: state.heat, onchange: (event) => change({ heat: event.target.checked }) });
  heat.append(" heat map");
  const words = make("p", left, { id: "explorer-words", className: "words" }, { "aria-live": "polite" });

  const choose = make("div", right, { className: "choose" }, { role: "group", "aria-label": "Image" });
  const imageButtons = data.images.map(({ source, name }, image) => {
    const button = make("button", choose, { type: "button", title: name, onclick: () => change({ image }) });
    make("img", button, { src: source, alt: name, className: data.crisp ? "small" : "" });
    return button;
  });
  choose.hidden = data.images.length < 2;

  function makeTile(parent, label, onclick) {
    const button = make("button", parent, { type: "button", onclick });
    const canvas = make("canvas", button, { width: 160, height: Math.round(160 * ratio) });
    make("span", button, { textContent: label });
    return { button, canvas };
  }

  make("h3", right, { textContent: "Layers, mean of their heads" });
  const layerStrip = make("div", right, { className: "strip layers" });
  const layerTiles = layers.map((_, layer) => makeTile(layerStrip, `layer ${layer + 1}`, () => change({ layer, head: null })));
  const title = make("h3", right), headStrip = make("div", right, { className: "strip heads" });
  let headTiles = [], headsOf = null;

  function change(next) {
    Object.assign(state, next);
    draw();
  }

  function choosePatch(event) {
    const box = main.getBoundingClientRect();
    const clamp = (position, count) => Math.min(Math.max(Math.floor(position * count), 0), count - 1);
    const x = clamp((event.clientX - box.left) / box.width, columns), y = clamp((event.clientY - box.top) / box.height, rows);
    if (y * columns + x !== state.query) change({ query: y * columns + x });
  }
  main.onclick = choosePatch;
  main.onpointermove = (event) => { if (event.pointerType === "mouse" && event.buttons & 1) choosePatch(event); };

  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }, PAGES = { PageUp: -1, PageDown: 1 };
  main.onkeydown = (event) => {
    const move = MOVES[event.key], page = PAGES[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(move || page)) return;
    event.preventDefault();
    if (page && layers[state.layer + page]) change({ layer: state.layer + page, head: null });
    if (!move) return;
    const x = (state.query % columns) + move[0], y = Math.floor(state.query / columns) + move[1];
    if (state.query === patches) change({ query: middle });
    else if (x >= 0 && x < columns && y >= 0 && y < rows) change({ query: y * columns + x });
  };

  function updateHeads() {
    if (headsOf === state.layer) return;
    headsOf = state.layer;
    headStrip.replaceChildren();
    const { heads } = layers[state.layer];
    headTiles = heads.map((_, head) => makeTile(headStrip, `head ${head + 1}`, () => change({ head: state.head === head ? null : head })));
    title.textContent = `Heads of layer ${state.layer + 1}` + (heads.length ? "" : ": omitted to keep this page small");
  }

  function describe({ at, pool }) {
    const { image, query, layer, head } = state, prediction = data.images[image].prediction;
    const where = query === patches ? "the " + data.token :
      `the patch in row ${Math.floor(query / columns) + 1}, column ${(query % columns) + 1}`;
    const who = `Layer ${layer + 1}` + (head === null ? ", mean of its heads" : `, head ${head + 1}`);
    const [largest, limit] = [data.largest, data.limit].map((values) => values[image][at][query] / 10); // percent
    const uniform = (100 * pool * pool) / data.tokens;
    const most = ` Largest value: ${largest.toFixed(1)} %; uniform attention: ${uniform.toFixed(1)} %.` +
      (largest < 2 * uniform ? " Nearly uniform: the scale of the map exaggerates the differences." : "");
    const unread = data.reads && layer === layers.length - 1 && query < patches ?
      ` Patches of the last layer do not affect the prediction: the head reads only the ${data.reads}.` : "";
    words.textContent = `${who}: attention of ${where}.${unread}${most}` + (prediction ? ` Prediction: ${prediction}.` : "");
    main.setAttribute("aria-label", words.textContent);
    limitText.textContent = ` ${limit.toFixed(1)} %` + (limit < largest ? " or more" : "");
  }

  function draw() {
    const { image, layer, head, query } = state, chosen = head === null ? layers[layer].mean : layers[layer].heads[head];
    updateHeads();
    imageButtons.forEach((button, number) => button.setAttribute("aria-pressed", number === image));
    if (token) token.setAttribute("aria-pressed", query === patches);
    ramp.classList.toggle("heat", state.heat);
    layerTiles.forEach(({ button, canvas }, number) => {
      button.setAttribute("aria-pressed", number === layer);
      paint(canvas, layers[number].mean);
    });
    headTiles.forEach(({ button, canvas }, number) => {
      button.setAttribute("aria-pressed", number === head);
      paint(canvas, layers[layer].heads[number]);
    });
    paint(main, chosen);
    describe(chosen);
  }
  draw();
  layerStrip.scrollLeft = layerStrip.scrollWidth; // on a phone: the selected layer is the last
})();
