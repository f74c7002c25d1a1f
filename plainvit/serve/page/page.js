// The page of `plainvit serve`: photos in, predictions and maps out. Text from the server is only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { models: [], loading: null, photos: [], selected: null, ask: 0 };
const MAPS = {
  photo: () => "The photo, cropped and resized as the model sees it.",
  relevance: (photo) => `Where attention raises the score of “${photo.label}” (gradient-weighted attention).`,
  rollout: () => "Attention rollout: attention multiplied through all layers, whatever the class.",
  attention: () => `Layer ${$("layer").value}, ${headName()}: what the model's output token attends to.`,
};
// Colors of a map from its smallest to its largest value (inferno), with how opaque they are
const RAMP = [[20, 11, 53, 0], [87, 16, 110, 0.35], [188, 55, 84, 0.75], [249, 142, 9, 0.92], [252, 255, 164, 1]];

function create(tag, properties = {}) {
  return Object.assign(document.createElement(tag), properties);
}

function headName() {
  return $("head").value === "0" ? "mean of its heads" : `head ${$("head").value}`;
}

// The server ---------------------------------------------------------------------------------------------------------

async function request(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server cannot be reached.");
  }
  if (response.status === 401) {
    $("token-form").hidden = false;
    throw new Error(token ? "The token is wrong." : "Enter the token of this server.");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error || body.results?.[0]?.error || `The server answered ${response.status}.`);
  return body;
}

async function post(path, photo, extra = "") {
  await state.loading; // a photo may come before the names of the models
  const query = `model=${encodeURIComponent($("model").value)}${extra}`;
  return request(`${path}?${query}`, { method: "POST", body: photo.file, headers: { "Content-Type": "application/octet-stream" } });
}

async function loadModels() {
  try {
    state.models = (await request("/models")).models;
  } catch (error) {
    return showProblem(error.message);
  }
  showProblem("");
  $("model").replaceChildren(...state.models.map((model) => new Option(model.name, model.name)));
  $("model").hidden = state.models.length < 2;
  $("model-name").textContent = state.models.length < 2 ? state.models[0].name : "";
}

// Photos -------------------------------------------------------------------------------------------------------------

function addPhotos(files) {
  const added = [...files].filter((file) => file.type.startsWith("image/") || !file.type);
  for (const file of added) {
    const photo = { file, url: URL.createObjectURL(file), name: file.name || "photo", maps: {} };
    const image = create("img", { src: photo.url, alt: photo.name });
    image.addEventListener("error", () => image.replaceWith(create("span", { textContent: photo.name })));
    photo.button = create("button", { type: "button", className: "waiting" });
    photo.button.append(image);
    photo.button.addEventListener("click", () => select(photo));
    state.photos.push(photo);
    $("strip").append(photo.button);
    classify(photo);
  }
  document.body.classList.toggle("has-photos", state.photos.length > 0);
  if (added.length) select(state.photos[state.photos.length - added.length]);
  showProblem(added.length ? "" : "No image was given.");
}

async function classify(photo) {
  const start = performance.now();
  const maps = photo.maps; // replaced when another model is chosen
  let result = null;
  let failure = null;
  photo.error = photo.result = null;
  try {
    result = (await post("/predict", photo)).results[0];
  } catch (error) {
    failure = error.message;
  }
  if (photo.maps !== maps) return; // the response of the model before
  [photo.result, photo.error, photo.milliseconds] = [result, failure, performance.now() - start];
  if (result) choose(photo, 0);
  photo.button.className = photo.error ? "failed" : "";
  if (state.selected === photo) show();
}

function choose(photo, place) {
  const chosen = photo.result.predictions[place];
  photo.class = chosen.class;
  photo.label = chosen.label;
}

function select(photo) {
  state.selected = photo;
  for (const one of state.photos) one.button.setAttribute("aria-pressed", one === photo);
  show();
}

function show() {
  const photo = state.selected;
  $("result").hidden = !photo;
  if (!photo) return;
  $("stage").hidden = Boolean(photo.error);
  $("error").hidden = !photo.error;
  $("error").textContent = photo.error ? `${photo.name}: ${photo.error}` : "";
  const found = photo.result?.predictions || [];
  $("predictions").replaceChildren(...found.map((one, place) => predictionRow(photo, one, place)));
  $("time").textContent = describeTime(photo);
  $("confidence").textContent = confidence(photo.result?.confidence);
  if (found.length) say(`${photo.name}: ${found[0].label}, ${percent(found[0].probability)}`);
  explain(photo);
}

function describeTime(photo) {
  if (photo.error) return "";
  return photo.result ? `Answered in ${Math.round(photo.milliseconds)} ms.` : "Computing the prediction …";
}

function predictionRow(photo, one, place) {
  const row = create("li");
  const button = create("button", { type: "button", title: "Show where the model looks for this class" });
  const name = create("bdi", { textContent: one.label });
  const value = create("span", { textContent: percent(one.probability) });
  const bar = create("progress", { max: 1, value: one.probability });
  bar.setAttribute("aria-hidden", "true");
  button.setAttribute("aria-pressed", one.class === photo.class);
  button.append(name, value, bar);
  button.addEventListener("click", () => {
    choose(photo, place);
    show();
    $("predictions").children[place].firstChild.focus();
  });
  row.append(button);
  return row;
}

function percent(value) {
  return value < 0.0005 ? "< 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

function confidence(known) {
  if (!known) return "";
  const [low, high] = known.interval.map((end) => Math.round(100 * end));
  const rate = Math.round((100 * known.right) / known.of);
  return `Calibrated confidence: ${rate} %. Of the ${known.of} test photos with the most similar probability, ${known.right} were right (95 % interval ${low}–${high} %).`;
}

/** Tells a screen reader; the page shows the same. */
function say(words) {
  $("status").textContent = words;
}

/** Shows a problem that belongs to no photo; "" removes it. */
function showProblem(words) {
  $("problem").textContent = words;
}

// Maps ---------------------------------------------------------------------------------------------------------------

async function explain(photo) {
  draw();
  const key = photo.class ?? "";
  if (photo.error || !photo.result || photo.maps[key]) return;
  const ask = ++state.ask;
  const maps = photo.maps;
  $("canvas").setAttribute("aria-busy", "true");
  try {
    const found = await post("/explain", photo, key === "" ? "" : `&class=${key}`);
    found.loadedImage = new Image();
    found.loadedImage.src = found.image;
    await found.loadedImage.decode();
    maps[key] = found;
    if (state.selected === photo) draw();
  } catch (error) {
    if (ask === state.ask) $("map-words").textContent = error.message;
  }
  if (ask === state.ask) $("canvas").removeAttribute("aria-busy");
}

function draw() {
  const photo = state.selected;
  const found = photo.maps[photo.class ?? ""];
  const canvas = $("canvas");
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  $("controls").hidden = !found?.grid;
  showNeighbors(found?.neighbors || []);
  if (!found) {
    drawPreview(photo, canvas, context);
    $("map-words").textContent = photo.error ? "" : "Computing the maps …";
    return;
  }
  canvas.height = Math.round((canvas.width * found.loadedImage.naturalHeight) / found.loadedImage.naturalWidth);
  context.imageSmoothingQuality = "high";
  context.drawImage(found.loadedImage, 0, 0, canvas.width, canvas.height);
  if (!found.grid) {
    $("map-words").textContent = `No attention map: ${found.missing_maps}.`;
    return;
  }
  setRanges(found);
  const view = document.querySelector("input[name=view]:checked").value;
  $("layer-head").hidden = view !== "attention";
  $("strength").disabled = view === "photo";
  const words = MAPS[view](photo);
  let place = "";
  if (view !== "photo") {
    const map = readMap(found, view);
    drawMap(context, canvas, map, found.grid);
    const at = map.indexOf(Math.max(...map));
    place = ` Strongest in row ${Math.floor(at / found.grid[1]) + 1} of ${found.grid[0]}, column ${(at % found.grid[1]) + 1} of ${found.grid[1]}.`;
  }
  $("map-words").textContent = words;
  canvas.setAttribute("aria-label", words + place);
}

function drawPreview(photo, canvas, context) {
  const image = photo.button.firstChild;
  if (!image.complete || !image.naturalWidth) return image.addEventListener("load", () => state.selected === photo && draw(), { once: true });
  const scale = Math.max(canvas.width / image.naturalWidth, canvas.height / image.naturalHeight);
  const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
  context.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
}

function setRanges(found) {
  if (Number($("layer").max) !== found.layers) {
    $("layer").max = found.layers;
    $("layer").value = found.layers;
  }
  $("head").max = found.heads;
  $("layer-value").textContent = $("layer").value;
  $("head-value").textContent = $("head").value === "0" ? "mean" : $("head").value;
  document.querySelector("input[value=relevance]").disabled = !found.relevance;
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function readMap(found, view) {
  if (view !== "attention") return [...bytes(found[view] || found.rollout)];
  const size = found.grid[0] * found.grid[1];
  const all = bytes(found.attention);
  const at = (Number($("layer").value) - 1) * (found.heads + 1) + Number($("head").value); // head 0 is their mean
  return [...all.subarray(at * size, (at + 1) * size)];
}

function drawMap(context, canvas, map, [rows, columns]) {
  const small = document.createElement("canvas");
  [small.width, small.height] = [columns, rows];
  const pixels = new ImageData(columns, rows);
  map.forEach((value, at) => pixels.data.set(color(value / 255), 4 * at));
  small.getContext("2d").putImageData(pixels, 0, 0);
  context.save();
  context.fillStyle = `rgb(0 0 0 / ${Number($("strength").value) / 240})`; // darker, so that the map stands out
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalAlpha = Number($("strength").value) / 100;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  context.restore();
}

function color(value) {
  const at = Math.min(value, 0.9999) * (RAMP.length - 1);
  const [low, high] = [RAMP[Math.floor(at)], RAMP[Math.floor(at) + 1]];
  const mixed = low.map((channel, index) => channel + (at % 1) * (high[index] - channel));
  return [mixed[0], mixed[1], mixed[2], 255 * mixed[3]];
}

function showNeighbors(found) {
  $("neighbors-box").hidden = !found.length;
  $("neighbors").replaceChildren(...found.map((one) => {
    const item = create("li");
    const name = create("bdi", { textContent: one.label });
    item.append(create("img", { src: one.image, alt: "" }), name, `similarity ${one.similarity.toFixed(2)}`);
    return item;
  }));
}

// Input --------------------------------------------------------------------------------------------------------------

async function openCamera() {
  if (!navigator.mediaDevices?.getUserMedia) return showProblem("The camera needs https, or a server on this machine.");
  try {
    $("video").srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    $("camera-dialog").showModal();
  } catch {
    showProblem("The camera is not available.");
  }
}

function closeCamera() {
  for (const track of $("video").srcObject?.getTracks() || []) track.stop();
  $("video").srcObject = null;
  $("camera-dialog").close();
}

function takePhoto() {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [$("video").videoWidth, $("video").videoHeight];
  canvas.getContext("2d").drawImage($("video"), 0, 0);
  closeCamera();
  canvas.toBlob((blob) => blob && addPhotos([new File([blob], "camera.jpg", { type: "image/jpeg" })]), "image/jpeg", 0.92);
}

$("choose").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { addPhotos($("files").files); $("files").value = ""; });
$("camera").addEventListener("click", openCamera);
$("shoot").addEventListener("click", takePhoto);
$("cancel").addEventListener("click", closeCamera);
$("camera-dialog").addEventListener("cancel", (event) => { event.preventDefault(); closeCamera(); });
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => { event.preventDefault(); $("drop").classList.remove("over"); addPhotos(event.dataTransfer.files); });
document.addEventListener("paste", (event) => { if (event.clipboardData.files.length) addPhotos(event.clipboardData.files); });
for (const id of ["layer", "head", "strength"]) $(id).addEventListener("input", draw);
for (const radio of document.querySelectorAll("input[name=view]")) radio.addEventListener("change", draw);
$("model").addEventListener("change", () => { for (const photo of state.photos) { photo.maps = {}; photo.class = undefined; classify(photo); } });
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value);
  $("token-form").hidden = true;
  state.loading = loadModels();
  state.photos.filter((photo) => photo.error).forEach(classify);
});
state.loading = loadModels();
