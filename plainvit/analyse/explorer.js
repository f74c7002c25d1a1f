/* Click a patch of an image and see where it looks, in every layer and head that the page holds.
   The page's data: {images: [{source, name, guess, width, height}], grid: [h, w], views: [{layer, head}], maps: [[png]]};
   a map is a grey picture with a row for each query (patches in reading order, then the class token) and a column for
   each key; a row is scaled to its own largest value. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const [rows, columns] = data.grid, [down, across] = data.keys;
  const root = document.getElementById("explorer-stage");
  const state = { image: 0, query: Math.floor(rows / 2) * columns + Math.floor(columns / 2), layer: data.layers.length - 1 };
  const decoded = new Map();
  const make = (name, parent, settings = {}) => parent.appendChild(Object.assign(document.createElement(name), settings));

  function load(source) {
    return new Promise((resolve, reject) => {
      const picture = new Image();
      picture.onload = () => resolve(picture);
      picture.onerror = reject;
      picture.src = source;
    });
  }

  async function values(image, view) {
    const key = image + "/" + view;
    if (!decoded.has(key)) {
      const picture = await load("data:image/png;base64," + data.maps[image][view]);
      const canvas = Object.assign(document.createElement("canvas"), { width: picture.width, height: picture.height });
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.drawImage(picture, 0, 0);
      const pixels = context.getImageData(0, 0, picture.width, picture.height).data;
      const grey = new Uint8Array(picture.width * picture.height);
      for (let i = 0; i < grey.length; i++) grey[i] = pixels[4 * i];
      decoded.set(key, grey);
    }
    return decoded.get(key);
  }

  // The image, dark where the patch does not look
  async function paint(canvas, view) {
    const { image, query } = state, picture = await pictures[image];
    const grey = await values(image, view);
    if (image !== state.image || query !== state.query) return; // another one has been asked for meanwhile
    const context = canvas.getContext("2d");
    const width = canvas.width, height = canvas.height, size = down * across;
    context.globalCompositeOperation = "source-over";
    context.imageSmoothingEnabled = picture.width > 64;
    context.drawImage(picture, 0, 0, width, height);
    const small = Object.assign(document.createElement("canvas"), { width: across, height: down });
    const shade = small.getContext("2d").createImageData(across, down);
    for (let i = 0; i < size; i++) shade.data[4 * i + 3] = 225 * (1 - grey[query * size + i] / 255);
    small.getContext("2d").putImageData(shade, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, width, height);
    if (query < rows * columns) {
      const x = query % columns, y = Math.floor(query / columns);
      context.strokeStyle = "#ffb000";
      context.lineWidth = Math.max(2, width / 110);
      context.strokeRect((x * width) / columns, (y * height) / rows, width / columns, height / rows);
    }
    canvas.dataset.query = String(query);
  }

  const pictures = data.images.map((image) => load(image.source));
  const ratio = data.images[0].height / data.images[0].width;
  const choose = make("div", root, { className: "choose" });
  data.images.forEach((image, number) => {
    const button = make("button", choose, { type: "button", title: image.name });
    make("img", button, { src: image.source, alt: image.name });
    button.onclick = () => { state.image = number; draw(); };
  });

  const stage = make("div", root, { className: "stage" });
  const main = make("canvas", stage, { width: 420, height: Math.round(420 * ratio), tabIndex: 0 });
  main.setAttribute("role", "img");
  main.id = "explorer-image";
  const words = make("p", stage, { className: "note", id: "explorer-words" });
  words.setAttribute("aria-live", "polite");
  if (data.token) {
    const token = make("button", stage, { type: "button", textContent: "the class token", className: "token" });
    token.onclick = () => { state.query = rows * columns; draw(); };
  }
  main.onclick = (event) => {
    const box = main.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const y = Math.floor(((event.clientY - box.top) / box.height) * rows);
    state.query = Math.min(Math.max(y, 0), rows - 1) * columns + Math.min(Math.max(x, 0), columns - 1);
    draw();
  };
  main.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    const next = state.query + (step || 0);
    if (!step || next < 0 || next >= rows * columns) return;
    event.preventDefault();
    state.query = next;
    draw();
  };

  function strip(title, className) {
    make("h3", root, { textContent: title });
    return make("div", root, { className: "strip " + className });
  }

  function tile(parent, label, onclick) {
    const button = make("button", parent, { type: "button" });
    const canvas = make("canvas", button, { width: 120, height: Math.round(120 * ratio) });
    make("span", button, { textContent: label });
    button.onclick = onclick;
    return { button, canvas };
  }

  const layers = strip("Every layer, mean of its heads", "layers");
  const layerTiles = data.layers.map((layer, number) =>
    tile(layers, "layer " + (layer.number + 1), () => { state.layer = number; draw(); }));
  const title = make("h3", root);
  const heads = make("div", root, { className: "strip heads" });

  function draw() {
    const image = data.images[state.image], layer = data.layers[state.layer];
    [...choose.children].forEach((button, number) => button.setAttribute("aria-pressed", number === state.image));
    layerTiles.forEach(({ button, canvas }, number) => {
      button.setAttribute("aria-pressed", number === state.layer);
      paint(canvas, data.layers[number].mean);
    });
    const where = state.query === rows * columns ? "the class token" :
      `the patch in row ${Math.floor(state.query / columns) + 1}, column ${(state.query % columns) + 1}`;
    words.textContent = `Layer ${layer.number + 1}: where ${where} looks. The brighter, the more attention. ` +
      `The model says: ${image.guess}.`;
    main.setAttribute("aria-label", words.textContent);
    title.textContent = layer.heads.length ? `The heads of layer ${layer.number + 1}` :
      `The heads of layer ${layer.number + 1} are not in this page, which would grow too large`;
    heads.replaceChildren();
    layer.heads.forEach(({ number, view }) => {
      const { canvas, button } = tile(heads, "head " + (number + 1), () => paint(main, view));
      button.title = "show it large";
      paint(canvas, view);
    });
    paint(main, layer.mean);
  }
  draw();
})();
