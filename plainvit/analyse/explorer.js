/* Click a patch of an image to see its attention in every layer and head that the page contains.
   The page's data: {images: [{source, name, prediction, width, height}], grid: [h, w], keys, headKeys: [h, w] of the maps,
   token: what the token before the patches is called, heads: [[number]] of each layer, means, singles: [image][png],
   reads: whether the head reads that token alone, heat, crisp: how the images are drawn at first,
   largest, largestSingles: [image][view][query] in per mille}. A png is a grey image with a row for each query (patches in reading
   order, then the token) and a column for each key, scaled to the row's largest; a last column has the token's fraction. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const root = document.getElementById("explorer-stage");
  const [rows, columns] = data.grid, patches = rows * columns, ratio = data.images[0].height / data.images[0].width;
  const middle = (rows >> 1) * columns + (columns >> 1);
  const layers = data.heads.length, singlesBefore = [];
  data.heads.reduce((sum, heads, layer) => (singlesBefore[layer] = sum) + heads.length, 0);
  const state = { image: 0, query: data.reads ? patches : middle, layer: layers - 1, head: null, heat: data.heat };
  const decoded = new Map(), loadedImages = new Map();

  function make(name, parent, settings = {}, attributes = {}) {
    const made = Object.assign(document.createElement(name), settings);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return parent.appendChild(made);
  }

  function load(source) {
    if (!loadedImages.has(source)) loadedImages.set(source, new Promise((resolve, reject) => {
      const loaded = new Image();
      loaded.onload = () => resolve(loaded);
      loaded.onerror = reject;
      loaded.src = source;
    }));
    return loadedImages.get(source);
  }

  // A view is {kind: "means" or "singles", at, keys}: its grey values, one byte for each query and key
  async function values(image, view) {
    const key = [image, view.kind, view.at].join("/");
    if (!decoded.has(key)) {
      const loaded = await load("data:image/png;base64," + data[view.kind][image][view.at]);
      const canvas = Object.assign(document.createElement("canvas"), { width: loaded.width, height: loaded.height });
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.drawImage(loaded, 0, 0);
      const pixels = context.getImageData(0, 0, loaded.width, loaded.height).data;
      decoded.set(key, Uint8Array.from({ length: pixels.length / 4 }, (_, i) => pixels[4 * i]));
    }
    return decoded.get(key);
  }

  // The image, dark where attention is low, or grey under a heat map; the selected patch has a frame
  async function paint(canvas, view) {
    busy(1);
    try { await shade(canvas, view); } finally { busy(-1); }
  }

  let painting = 0;
  const busy = (more) => { root.dataset.busy = String(painting += more); };

  async function shade(canvas, view) {
    const { image, query } = state, ticket = (canvas.ticket = (canvas.ticket || 0) + 1);
    const loaded = await load(data.images[image].source), grey = await values(image, view);
    if (ticket !== canvas.ticket) return; // another one has been asked for meanwhile
    const context = canvas.getContext("2d"), [down, across] = view.keys, size = down * across;
    const { width, height } = canvas, first = query * (size + (data.token ? 1 : 0));
    context.imageSmoothingEnabled = !data.crisp;
    context.filter = state.heat ? "grayscale(1)" : "none";
    context.drawImage(loaded, 0, 0, width, height);
    context.filter = "none";
    const small = Object.assign(document.createElement("canvas"), { width: across, height: down });
    const over = small.getContext("2d").createImageData(across, down);
    for (let i = 0; i < size; i++) over.data.set((state.heat ? hot : dimmed)(grey[first + i] / 255), 4 * i);
    small.getContext("2d").putImageData(over, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, width, height);
    if (query < patches) frame(context, query, width, height);
    if (canvas === main && token) showToken(grey[first + size] / 255);
  }

  // The overlay of a pixel, [red, green, blue, alpha], by its fraction of the largest: shade, or a colour
  const dimmed = (fraction) => [0, 0, 0, 165 * (1 - fraction)];
  const COLOURS = [[13, 8, 65], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]]; // as in .ramp.heat
  function hot(fraction) {
    const at = fraction * (COLOURS.length - 1), low = Math.min(Math.floor(at), COLOURS.length - 2);
    return [...COLOURS[low].map((from, i) => from + (at - low) * (COLOURS[low + 1][i] - from)), 190];
  }

  function showToken(fraction) {
    token.style.setProperty("--fraction", `${100 * fraction}%`);
    tokenFraction.textContent = `${(100 * fraction).toFixed(0)} %`;
    token.setAttribute("aria-label", `the ${data.token}: ${tokenFraction.textContent} of the attention`);
  }

  function frame(context, query, width, height) {
    const x = query % columns, y = Math.floor(query / columns), thick = Math.max(2, width / 140);
    context.lineWidth = thick;
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
  scale.append(" largest attention of this map ");
  const heat = make("label", scale);
  make("input", heat, { type: "checkbox", checked: state.heat, onchange: (event) => change({ heat: event.target.checked }) });
  heat.append(" heat map");
  const words = make("p", left, { id: "explorer-words", className: "words" }, { "aria-live": "polite" });

  const choose = make("div", right, { className: "choose" }, { role: "group", "aria-label": "Image" });
  const imageButtons = data.images.map((image, number) => {
    const button = make("button", choose, { type: "button", title: image.name });
    make("img", button, { src: image.source, alt: image.name, className: data.crisp ? "small" : "" });
    button.onclick = () => change({ image: number });
    return button;
  });
  choose.hidden = data.images.length < 2;

  function tile(parent, label, onclick) {
    const button = make("button", parent, { type: "button", onclick });
    const canvas = make("canvas", button, { width: 160, height: Math.round(160 * ratio) });
    make("span", button, { textContent: label });
    return { button, canvas };
  }

  make("h3", right, { textContent: "Layers, mean of their heads" });
  const layerStrip = make("div", right, { className: "strip layers" });
  const layerTiles = data.heads.map((_, layer) => tile(layerStrip, "layer " + (layer + 1), () => change({ layer, head: null })));
  const title = make("h3", right), headStrip = make("div", right, { className: "strip heads" });
  let headTiles = [], headsOf = null;

  // Views
  const mean = (layer) => ({ kind: "means", at: layer, keys: data.keys });
  const single = (layer, head) => ({ kind: "singles", at: singlesBefore[layer] + data.heads[layer].indexOf(head), keys: data.headKeys });

  function change(next) {
    Object.assign(state, next);
    draw();
  }

  function choosePatch(event) {
    const box = main.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const y = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const query = Math.min(Math.max(y, 0), rows - 1) * columns + Math.min(Math.max(x, 0), columns - 1);
    if (query !== state.query) change({ query });
  }
  main.onclick = choosePatch;
  main.onpointermove = (event) => { if (event.pointerType === "mouse" && event.buttons & 1) choosePatch(event); };

  main.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { query, layer } = state, x = query % columns, y = Math.floor(query / columns), key = event.key;
    const inside = query < patches;
    if (key === "ArrowLeft" && inside && x > 0) change({ query: query - 1 });
    else if (key === "ArrowRight" && inside && x < columns - 1) change({ query: query + 1 });
    else if (key === "ArrowUp" && inside && y > 0) change({ query: query - columns });
    else if (key === "ArrowDown" && inside && y < rows - 1) change({ query: query + columns });
    else if (key === "PageUp" && layer > 0) change({ layer: layer - 1, head: null });
    else if (key === "PageDown" && layer < layers - 1) change({ layer: layer + 1, head: null });
    else if (key.startsWith("Arrow") && !inside) change({ query: middle });
    else if (!key.startsWith("Arrow") && !key.startsWith("Page")) return;
    event.preventDefault();
  };

  function updateHeads() {
    if (headsOf === state.layer) return;
    headsOf = state.layer;
    headStrip.replaceChildren();
    const heads = data.heads[state.layer];
    headTiles = heads.map((head) => ({ head, ...tile(headStrip, "head " + (head + 1),
      () => change({ head: state.head === head ? null : head })) }));
    title.textContent = `Heads of layer ${state.layer + 1}` + (heads.length ? "" : ": omitted to keep this page small");
  }

  function describe() {
    const { image, query, layer, head } = state, prediction = data.images[image].prediction;
    const where = query === patches ? "the " + data.token :
      `the patch in row ${Math.floor(query / columns) + 1}, column ${(query % columns) + 1}`;
    const who = `Layer ${layer + 1}` + (head === null ? ", mean of its heads" : `, head ${head + 1}`);
    const view = head === null ? mean(layer) : single(layer, head);
    const largest = data[view.kind === "means" ? "largest" : "largestSingles"][image][view.at][query] / 10;
    const even = (100 * patches) / (view.keys[0] * view.keys[1] * data.tokens);
    const most = ` Largest value: ${largest.toFixed(1)} %; uniform attention: ` +
      `${even.toFixed(1)} %.` + (largest < 2 * even ? " Nearly uniform: the scale of the map exaggerates the differences." : "");
    const unread = data.reads && layer === layers - 1 && query < patches ?
      ` Patches of the last layer do not affect the prediction: the head reads only the ${data.token}.` : "";
    words.textContent = `${who}: attention of ${where}.${unread}${most}` + (prediction ? ` Prediction: ${prediction}.` : "");
    main.setAttribute("aria-label", words.textContent);
  }

  function draw() {
    const { image, layer, head, query } = state;
    updateHeads();
    imageButtons.forEach((button, number) => button.setAttribute("aria-pressed", number === image));
    if (token) token.setAttribute("aria-pressed", query === patches);
    ramp.classList.toggle("heat", state.heat);
    layerTiles.forEach(({ button, canvas }, number) => {
      button.setAttribute("aria-pressed", number === layer);
      paint(canvas, mean(number));
    });
    headTiles.forEach((one) => {
      one.button.setAttribute("aria-pressed", one.head === head);
      paint(one.canvas, single(layer, one.head));
    });
    paint(main, head === null ? mean(layer) : single(layer, head));
    describe();
  }
  draw();
})();
