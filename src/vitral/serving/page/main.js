// The page: takes a picture or a text, asks the server, and shows what it says.

import { askForKey, get, hasKey, post } from "/page/api.js";
import { drawOn, element, rowsOf, show } from "/page/answer.js";
import { BY_CLASS, Look, NAMES } from "/page/look.js";
import { rgb } from "/page/maps.js";
import { share } from "/page/share.js";

const SAMPLES = ["window.png", "hills.png", "digit.png", "scene.png"];
const LARGEST = 1600, MOST_CLASSES = 2000, $ = id => document.getElementById(id);
const canvas = $("canvas"), pen = canvas.getContext("2d");
let models = [], index = null, colours, timer = null, asking = null, wanting = null;
// `item` is the file or text, `bitmap` the picture, `looks` what was explained, by method, `view` what is on the stage.
const state = { item: null, bitmap: null, answer: null, looks: {}, view: "picture" };
const model = () => models.find(m => m.name === $("model").value);
const look = () => state.looks[state.view];

function fail(error) {
  if (error.name === "AbortError") return;
  $("error").textContent = error.message;
  $("error").hidden = false;
}
function busy(on) { $("busy").hidden = !on; $("stage").ariaBusy = on; }

// ---- taking ----

async function take(item) {
  if (!item) return;
  asking?.abort();
  const signal = (asking = new AbortController()).signal, m = model(), began = performance.now();
  stop();
  $("error").hidden = true;
  Object.assign(state, { item, bitmap: null, answer: null, looks: {} });
  $("lookCard").hidden = $("similarCard").hidden = $("share").hidden = $("views").hidden = true;
  $("timing").textContent = "";
  if (m.reads === "image") {
    state.bitmap = await createImageBitmap(item).catch(() => null);  // a browser may not know what the server knows
    if (signal.aborted) return;
    state.view = "picture";
    draw();
  }
  busy(true);
  try {
    if (headless(m)) $("answer").replaceChildren(element("p", { className: "soft" }, about(m)));
    else await predict(m, item, began, signal);
    if (m.reads === "image") {
      offerViews(m);
      const spatial = ["detect", "segment"].includes(m.task);
      await choose(!spatial && m.explains.includes("attention") ? "attention" : "picture", signal);
    }
  } catch (error) {
    if (error.name !== "AbortError") $("answer").replaceChildren(element("p", { className: "soft" }, "There is no answer."));
    fail(error);
  }
  if (index) {
    await post("/v1/search", item, { top_k: 8, thumbnails: true }, signal).then(showSimilar, error => m.reads === "image" ? fail(error) : null);
  }
  if (!signal.aborted) busy(false);
}

async function predict(m, item, began, signal) {
  const answer = await post("/v1/predict", item, { model: m.name }, signal);
  state.answer = answer;
  $("answer").replaceChildren(...show(answer, m.labels, colours));
  const { read_ms, wait_ms, run_ms, batch } = answer.timing, all = performance.now() - began;
  $("timing").textContent = `${all.toFixed(0)} ms: reading ${read_ms.toFixed(1)}, waiting ${wait_ms.toFixed(1)}, model ${run_ms.toFixed(1)}` +
    (batch > 1 ? `, ${batch} at once` : "");
}

function showSimilar({ matches }) {
  $("similar").replaceChildren(...matches.map(({ name, score, thumbnail }) => {
    const short = name.split("/").pop();
    const picture = thumbnail ? element("img", { src: `data:image/jpeg;base64,${thumbnail}`, alt: "" }) : element("div", { className: "none" });
    return element("li", { title: name }, picture, element("p", {}, short), element("p", { className: "soft" }, score.toFixed(3)));
  }));
  $("similarCard").hidden = !matches.length;
}

// ---- the stage ----

function offerViews(m) {
  const views = ["picture", ...Object.keys(NAMES).filter(name => m.explains.includes(name))];
  $("views").replaceChildren(...views.map(name => element("label", {},
    element("input", { type: "radio", name: "view", value: name, onchange: () => choose(name) }), NAMES[name])));
  $("views").hidden = views.length < 2;
  $("share").hidden = false;
}

async function choose(view, signal = asking?.signal) {
  if (view !== "picture" && !state.looks[view]) {
    const m = model(), several = m.task === "regress" && m.labels.length > 1;  // of numbers none is the likeliest
    const made = await explain(view, BY_CLASS.includes(view) && several ? { class: m.labels[0] } : {}, signal);
    if (signal?.aborted) return;
    if (!made) view = "picture";
  }
  turn(view);
}

// What the server makes of a view, kept; false if it could not be made.
async function explain(view, fields, signal = asking?.signal) {
  busy(true);
  $("error").hidden = true;
  try {
    const m = model(), asked = { model: m.name, method: view, rows: true, ...fields };
    const made = await Look.from(await post("/v1/explain", state.item, asked, signal), m.blocks);
    if (!signal?.aborted) state.looks[view] = made;
    return true;
  } catch (error) {
    fail(error);
    return false;
  } finally {
    if (!signal?.aborted) busy(false);
  }
}

// The same view of another block, patch or class, which only the server can tell; who asks again no longer wants the last.
async function again(fields) {
  wanting?.abort();
  wanting = new AbortController();
  const view = state.view, map = look().map, signal = AbortSignal.any([asking.signal, wanting.signal]);
  if (!await explain(view, fields, signal) || signal.aborted || state.view !== view) return;
  if (map < look().titles.length) look().map = map;
  turn(view);
}
const lookFrom = (layer, query) => again({ layer, patch: query < 0 ? null : look().pixel(query).join(",") });

function turn(view) {
  stop();
  state.view = view;
  for (const radio of $("views").querySelectorAll("input")) radio.checked = radio.value === view;
  const l = look();
  $("lookCard").hidden = !l;
  if (l) {
    const { labels } = model(), several = !l.live && view !== "tokens" && l.titles.length > 1;
    $("layer").max = l.layers - 1;
    $("attention").hidden = $("asks").hidden = !l.attends;
    $("headLabel").hidden = $("play").hidden = !l.live;
    if (l.live) [$("head").min, $("head").max] = [l.packed.heads.length > 1 ? -1 : 0, l.weights.kept - 1];
    $("cls").hidden = l.live && !l.cls;
    $("cls").textContent = l.live ? "Ask [CLS]" : "Ask all patches";
    $("classLabel").hidden = !BY_CLASS.includes(view) || labels.length < 2 || labels.length > MOST_CLASSES;
    $("classWord").textContent = model().task === "regress" ? "Number" : "Class";
    if (!$("classLabel").hidden) $("class").replaceChildren(...labels.map(name => element("option", { textContent: name, selected: name === l.target })));
    $("mapLabel").hidden = !several;
    $("mapWord").textContent = { attention: "Head", writing: "Token" }[view] ?? "Map";
    if (several) $("map").replaceChildren(...l.titles.map((title, i) => element("option", { value: i, textContent: title, selected: i === l.map })));
    const windows = l.live ? "" : "Patches look within windows: tap one to see where it looks";
    const note = [l.attends ? windows : l.about, `shown: ${l.part}`, l.packed?.note].filter(Boolean).join("; ");
    $("lookNote").textContent = note;
    $("lookNote").hidden = !note;
  }
  draw();
}

function draw() {
  const l = look();
  $("empty").hidden = !(canvas.hidden = !l && !state.bitmap);
  $("frame").hidden = true;
  if (canvas.hidden) return;
  const { width, height } = l ? l.picture : state.bitmap, longest = Math.max(width, height);
  const scale = longest > LARGEST ? LARGEST / longest : Math.max(1, Math.ceil(640 / longest));
  const size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  canvas.classList.toggle("small", longest < 200);
  canvas.classList.toggle("look", Boolean(l));
  if (l) {
    drawLook(l);
  } else {
    pen.imageSmoothingEnabled = longest >= 200;
    pen.clearRect(0, 0, ...size);
    pen.drawImage(state.bitmap, 0, 0, ...size);
    drawOn(pen, state.answer, model().labels, colours, scale);
  }
  const told = state.answer ? rowsOf(state.answer, model().labels, colours).slice(0, 3).map(r => `${r.name} ${r.value}`).join(", ") : "no answer";
  $("stage").ariaLabel = `${NAMES[state.view]}: ${told}` + (l ? ". Arrow keys move the patch." : "");
}

function drawLook(l) {
  const strength = +$("strength").value, shown = l.draw(pen, strength / 100, colours.maps), frame = $("frame"), at = l.frame;
  const box = canvas.getBoundingClientRect(), outer = $("stage").getBoundingClientRect();
  frame.hidden = at < 0;
  if (at >= 0) {
    const w = box.width / l.columns, h = box.height / l.rows;
    Object.assign(frame.style, { width: `${w}px`, height: `${h}px`, left: `${box.left - outer.left + (at % l.columns) * w}px`,
      top: `${box.top - outer.top + Math.floor(at / l.columns) * h}px` });
  }
  $("say").textContent = shown.say;
  $("legend").hidden = !shown.ends;
  if (shown.ends) {
    [$("least").textContent, $("most").textContent] = shown.ends;
    const brush = $("strip").getContext("2d"), table = shown.signed ? colours.maps : colours.maps.slice(colours.maps.length / 2);
    for (let i = 0; i < 256; i++) {
      brush.fillStyle = rgb(table[Math.floor(i * table.length / 256)]);
      brush.fillRect(i, 0, 1, 1);
    }
  }
  $("layer").value = l.layer; $("layerSays").textContent = l.layer;
  if (l.live) {
    $("head").value = l.head;
    $("headSays").textContent = l.head < 0 ? "mean" : l.packed.heads[l.head] ?? "mean";
  }
  $("strengthSays").textContent = `${strength} %`;
  $("play").textContent = timer ? "Stop" : "Play blocks";
}

function change(values) {
  if (!look()) return;
  Object.assign(look(), values);
  draw();
}
function point(event) {
  const l = look(), box = canvas.getBoundingClientRect();
  if (!l) return;
  const c = Math.floor((event.clientX - box.left) / box.width * l.columns), r = Math.floor((event.clientY - box.top) / box.height * l.rows);
  if (c < 0 || r < 0 || c >= l.columns || r >= l.rows) return;
  l.choose(r * l.columns + c);
  draw();
  if (event.type === "pointerdown" && l.attends && !l.live) lookFrom(l.layer, l.at);
}
function stop() { clearInterval(timer); timer = null; }
function play() {
  if (timer) stop(); else timer = setInterval(() => change({ layer: (look().layer + 1) % look().layers }), 700);
  draw();
}
function toLayer(layer) {
  const l = look();
  if (l.live) change({ layer }); else if (layer !== l.layer) lookFrom(layer, l.query);
}
const step = by => toLayer(Math.min(look().layers - 1, Math.max(0, look().layer + by)));
const askAll = () => { if (look().live) change({ query: -1 }); else lookFrom(look().layer, -1); };
const nextHead = () => change({ head: look().head + 1 > +$("head").max ? +$("head").min : look().head + 1 });

$("stage").addEventListener("keydown", event => {
  const l = look(), moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!l || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in moves) {
    const q = l.frame < 0 ? l.middle : l.frame, [dr, dc] = moves[event.key], r = Math.floor(q / l.columns) + dr, c = q % l.columns + dc;
    if (r >= 0 && c >= 0 && r < l.rows && c < l.columns) { l.choose(r * l.columns + c); draw(); }
  } else if (!l.attends) return;
  else if (event.key === "[") step(-1); else if (event.key === "]") step(1);
  else if (event.key === "c" && !$("cls").hidden) askAll();
  else if (event.key === "h" && l.live) nextHead(); else if (event.key === " " && l.live) play();
  else if (event.key === "Enter" && !l.live && l.at >= 0) lookFrom(l.layer, l.at);
  else return;
  event.preventDefault();
});
canvas.addEventListener("pointermove", point);
canvas.addEventListener("pointerdown", point);
$("layer").addEventListener("input", e => { if (look()?.live) toLayer(+e.target.value); else $("layerSays").textContent = e.target.value; });
$("layer").addEventListener("change", e => toLayer(+e.target.value));
$("class").addEventListener("change", e => again({ class: e.target.value }));
$("head").addEventListener("input", e => change({ head: +e.target.value }));
$("map").addEventListener("change", e => change({ map: +e.target.value }));
$("strength").addEventListener("input", draw);
$("play").addEventListener("click", play);
$("cls").addEventListener("click", askAll);
addEventListener("resize", draw);

// ---- ways in ----

$("stage").addEventListener("click", () => { if (!$("empty").hidden) $("file").click(); });
for (const id of ["file", "camera"]) $(id).addEventListener("change", e => { take(e.target.files[0]); e.target.value = ""; });
for (const kind of ["dragenter", "dragover"]) addEventListener(kind, e => { e.preventDefault(); $("stage").classList.add("over"); });
for (const kind of ["dragleave", "drop"]) addEventListener(kind, e => { e.preventDefault(); $("stage").classList.remove("over"); });
addEventListener("drop", e => { if (model()?.reads === "image") take(e.dataTransfer.files[0]); });
addEventListener("paste", e => { if (model()?.reads === "image") take(e.clipboardData.files[0]); });
$("texts").addEventListener("submit", e => { e.preventDefault(); take($("text").value); });
$("model").addEventListener("change", () => { suit(); if (state.item && (typeof state.item === "string") === (model().reads === "text")) take(state.item); });
$("key").addEventListener("click", askForKey);
$("share").addEventListener("click", () => {
  const caption = [NAMES[state.view], look()?.attends ? `block ${look().layer}, ${look().headName}` : ""].filter(Boolean).join(", ");
  share(canvas, `${model().name} · vitral`, state.answer ? rowsOf(state.answer, model().labels, colours) : [], caption);
});

async function sample(name) {
  take(await (await fetch(`/page/samples/${name}`)).blob());
}
function suit() {
  const text = model().reads === "text";
  $("images").hidden = text;
  $("texts").hidden = !text;
  if (!state.answer) $("answer").replaceChildren(element("p", { className: "soft" }, about(model())));
}
const headless = m => m.task === "classify" && !m.labels.length;
function about(m) {
  if (headless(m)) return "This model has learned no classes: see what it looks at.";
  const { task, labels, size } = m;
  const some = labels.slice(0, 12).join(", ") + (labels.length > 12 ? ", …" : ""), n = labels.length;
  const does = { classify: `Tells ${n} classes apart: ${some}.`, multilabel: `Finds which of ${n} labels fit: ${some}.`,
    segment: `Gives every pixel one of ${n} classes: ${some}.`, detect: `Finds objects of ${n} classes: ${some}.`,
    regress: `Tells ${some}.`, tag: `Tags the words of a text: ${some}.`, caption: "Writes what it sees.",
    translate: "Translates a text.", complete: "Goes on with a text." }[task];
  return does + (size ? ` It sees pictures as ${size[1]} x ${size[0]} pixels.` : "");
}

async function begin() {
  try {
    const [facts, palette] = await Promise.all([get("/v1/models"), get("/page/colours.json")]);
    ({ models, index } = facts);
    colours = palette;
    $("version").textContent = `vitral ${facts.version}`;
    $("model").replaceChildren(...models.map(m => element("option", { value: m.name, textContent: m.name })));
    document.title = `${models.map(m => m.name).join(", ")} · vitral`;
    $("samples").replaceChildren(...SAMPLES.map(name => element("button", { type: "button", title: name.split(".")[0], onclick: () => sample(name) },
      element("img", { src: `/page/samples/${name}`, alt: `Sample: ${name.split(".")[0]}` }))));
    $("key").hidden = !hasKey();
    suit();
  } catch (error) {
    fail(error);
  }
}
begin();
